/* Work that is cut into parts, on the threads of PyTorch's own OpenMP. */

#include <stdint.h>

/* Does one of several parts of the work that is described, with room of its own. */
typedef void (*Piece)(const void *given, int64_t part, int64_t parts, float *room);

/* OpenMP's GOMP_parallel: calls back on so many threads, the caller's among them, or on fewer. */
typedef void (*Region)(void (*body)(void *), void *data, unsigned threads, unsigned flags);

typedef struct {
    Piece piece;
    const void *given;
    int64_t parts, next;
    float *room;
    int64_t room_each;
} Work;

static void take_parts(void *data) {
    Work *work = data;
    for (;;) {
        int64_t part = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
        if (part >= work->parts) return;
        work->piece(work->given, part, work->parts, work->room + part * work->room_each);
    }
}

/* Parts of what is described so many bytes further on; the room of each is so many floats. */
typedef struct {
    Piece piece;
    int64_t at, parts, room_each;
} Step;

/* Does all parts of some steps, one step after the other. */
void dpoptim_do_steps(Region region, const Step *steps, int64_t count, const char *given,
                      float *room) {
    for (const Step *step = steps; step < steps + count; step++) {
        Work work = {step->piece, given + step->at, step->parts, 0, room, step->room_each};
        if (step->parts > 1)
            region(take_parts, &work, (unsigned)step->parts, 0);
        else
            take_parts(&work);
    }
}
