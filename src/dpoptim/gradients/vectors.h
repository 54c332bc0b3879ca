/* Vectors of this processor's widths, and norms by them, for the files beside this one. */

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#define WIDE __attribute__((target("avx512f,fma")))
#define MIDDLE __attribute__((target("avx2,fma")))
#else
#define WIDE
#define MIDDLE
#endif

typedef float v4 __attribute__((vector_size(16), aligned(4)));
typedef float v8 __attribute__((vector_size(32), aligned(4)));
typedef float v16 __attribute__((vector_size(64), aligned(4)));

/* Some numbers of a, and of b after them, by their places. */
#if defined(__clang__) || __GNUC__ >= 12
#define PICK(PLACES, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t i4 __attribute__((vector_size(16)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef int32_t i16 __attribute__((vector_size(64)));
#define PICK(PLACES, a, b, ...) __builtin_shuffle(a, b, (PLACES){__VA_ARGS__})
#endif

/* Before loops over vectors that are to stay in registers: else they are zeroed in memory first. */
#if defined(__clang__)
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED _Pragma("GCC unroll 32")
#endif

enum { NONE, MIDDLE_LEVEL, WIDE_LEVEL };
enum { FILL = 16, POSITIONS = 512 }; /* outputs side by side; positions that are added at a time */

/* Rows that are read next: their lines are fetched meanwhile, some in each of several calls. Each
   record's lie apart from those before, and the processor, left to itself, waits for them. */
typedef struct {
    const char *at;
    int64_t rows, step, lines, next, each; /* rows left, bytes apart; a row's lines; so many a call */
} Ahead;

enum { LINE = 64 };

static inline __attribute__((unused)) Ahead ahead(const float *x, int64_t rows, int64_t step,
                                                  int64_t columns, int64_t calls) {
    if (step == columns) columns *= rows, rows = rows > 0; /* no gaps */
    int64_t lines = ((int64_t)sizeof(float) * columns + LINE - 1) / LINE;
    return (Ahead){(const char *)x, rows, (int64_t)sizeof(float) * step, lines, 0,
                   rows * lines / calls + 1};
}

static inline __attribute__((unused)) void read_ahead(Ahead *of) {
    for (int64_t left = of->rows > 0 ? of->each : 0; left > 0 && of->rows > 0;) {
        int64_t end = of->next + left < of->lines ? of->next + left : of->lines;
        left -= end - of->next;
        for (; of->next < end; of->next++) __builtin_prefetch(of->at + of->next * LINE, 0, 2);
        if (of->next == of->lines) of->rows--, of->at += of->step, of->next = 0;
    }
}

/* Norms of blocks of numbers, each block's squares added in float32. */
#define NORMS(NAME, TARGET, VECTOR)                                                                \
    TARGET static __attribute__((unused)) void NAME(const float *x, int64_t entries,              \
                                                    int64_t block, float *out) {                  \
        enum { LANES = sizeof(VECTOR) / sizeof(float) };                                           \
        for (int64_t start = 0; start < entries; start += block) {                                 \
            int64_t end = start + block < entries ? start + block : entries, i = start;            \
            VECTOR squares[4];                                                                     \
            memset(squares, 0, sizeof squares);                                                    \
            for (; i + 4 * LANES <= end; i += 4 * LANES)                                           \
                for (int v = 0; v < 4; v++) {                                                      \
                    VECTOR some = *(const VECTOR *)(x + i + v * LANES);                            \
                    squares[v] += some * some;                                                     \
                }                                                                                  \
            VECTOR all = (squares[0] + squares[1]) + (squares[2] + squares[3]);                    \
            float total = 0.0f;                                                                    \
            for (int lane = 0; lane < LANES; lane++) total += all[lane];                           \
            for (; i < end; i++) total += x[i] * x[i];                                             \
            *out++ = __builtin_sqrtf(total);                                                       \
        }                                                                                          \
    }
NORMS(wide_norms, WIDE, v16)
NORMS(middle_norms, MIDDLE, v8)

/* The sum over a group of records of weights[i] outer(g[i], a[i]), (rows, columns), rows of `out` a
   step apart; `more`: added to what is there. What has weight zero may be anything. The room is so
   many floats. */
void dpoptim_add_group(int64_t size, const float *weights, int64_t rows, const float *g,
                       int64_t g_step, int64_t columns, const float *a, int64_t a_step, float *out,
                       int64_t step, int more, float *room, int level);
int64_t dpoptim_group_room(int64_t size, int64_t rows);
