/* Convolutions of small images, and what they hand back to their inputs: sums over a few places of
   an image, each times a row of weights.

   `small_convolutions.py` says which places, and in which order; nothing of Python or PyTorch is
   used. Every number of a result is one chain of multiplications and additions over the places in
   their order, whatever is computed beside it, wherever its record lies and on whichever thread. */

#include "../vectors.h"

enum { MOST_TOGETHER = 12 };

/* Results that read the same places, seen from where each of them is: `offsets` of so many `taps`,
   each with a row of `weights`, (taps, filled). Result i is read from entry `from[i]` of the
   image on, and is the `to[i]`-th. */
typedef struct {
    int64_t taps;
    const int64_t *offsets;
    const float *weights;
    int64_t results;
    const int64_t *from, *to;
} Phase;

/* As small_convolutions.py writes it. An image, dense (channels, size...), lies `before` the start
   of zeros that are `padded` as large, along each axis; results are dense, (outputs, places).
   `bias` may be NULL; `filled` is the number of outputs, rounded up to whole vectors. */
typedef struct {
    int64_t records, channels, size[3], before[3], padded[3];
    int64_t outputs, filled, places, phases, level;
    const float *x, *bias;
    float *out;
    Phase of_results[];
} Convolving;

/* Some results for one vector, or two, of outputs; `out` is of the first, results `filled` apart. */
typedef void (*Tile)(const Phase *, const float *image, const float *weights, const float *bias,
                     int64_t first, int64_t filled, float *out);

#define TILE(NAME, TARGET, VECTOR, TOGETHER, V)                                                    \
    TARGET static void NAME(const Phase *of, const float *image, const float *weights,             \
                            const float *bias, int64_t first, int64_t filled, float *out) {        \
        enum { LANES = sizeof(VECTOR) / sizeof(float) };                                           \
        const int64_t *offsets = of->offsets, taps = of->taps;                                     \
        const float *x[TOGETHER];                                                                  \
        VECTOR sum[TOGETHER][V];                                                                   \
        memset(sum, 0, sizeof sum);                                                                \
        UNROLLED for (int i = 0; i < TOGETHER; i++) {                                              \
            /* the last one again, to the same numbers, where there are no more */                 \
            int64_t here = first + i < of->results ? first + i : of->results - 1;                  \
            x[i] = image + of->from[here];                                                         \
            if (bias)                                                                              \
                UNROLLED for (int v = 0; v < V; v++) sum[i][v] = *(const VECTOR *)(bias + v * LANES); \
        }                                                                                          \
        for (int64_t t = 0; t < taps; t++, weights += filled) {                                    \
            VECTOR some[V];                                                                        \
            UNROLLED for (int v = 0; v < V; v++) some[v] = *(const VECTOR *)(weights + v * LANES); \
            UNROLLED for (int i = 0; i < TOGETHER; i++) {                                          \
                float number = x[i][offsets[t]];                                                   \
                UNROLLED for (int v = 0; v < V; v++) sum[i][v] += number * some[v];                \
            }                                                                                      \
        }                                                                                          \
        UNROLLED for (int i = 0; i < TOGETHER; i++) {                                              \
            int64_t here = first + i < of->results ? first + i : of->results - 1;                  \
            float *to = out + of->to[here] * filled;                                               \
            UNROLLED for (int v = 0; v < V; v++) *(VECTOR *)(to + v * LANES) = sum[i][v];          \
        }                                                                                          \
    }
TILE(wide, WIDE, v16, 12, 1)
TILE(middle, MIDDLE, v8, 6, 2)

static void place(const Convolving *of, const float *x, float *image) {
    for (int64_t c = 0; c < of->channels; c++)
        for (int64_t d = 0; d < of->size[0]; d++)
            for (int64_t h = 0; h < of->size[1]; h++, x += of->size[2]) {
                int64_t line = (c * of->padded[0] + d + of->before[0]) * of->padded[1] + h + of->before[1];
                memcpy(image + line * of->padded[2] + of->before[2], x, sizeof(float) * of->size[2]);
            }
}

/* Results (places, filled) with outputs first: (outputs, places). */
static void turn_back(const float *from, int64_t places, int64_t filled, int64_t outputs, float *out) {
    int64_t o = 0;
    for (; o + 4 <= outputs; o += 4) {
        int64_t i = 0;
        for (; i + 4 <= places; i += 4) {
            const float *here = from + i * filled + o;
            v4 a = *(const v4 *)here, b = *(const v4 *)(here + filled);
            v4 c = *(const v4 *)(here + 2 * filled), d = *(const v4 *)(here + 3 * filled);
            v4 low = PICK(i4, a, b, 0, 4, 1, 5), high = PICK(i4, a, b, 2, 6, 3, 7);
            v4 low2 = PICK(i4, c, d, 0, 4, 1, 5), high2 = PICK(i4, c, d, 2, 6, 3, 7);
            float *to = out + o * places + i;
            *(v4 *)to = PICK(i4, low, low2, 0, 1, 4, 5);
            *(v4 *)(to + places) = PICK(i4, low, low2, 2, 3, 6, 7);
            *(v4 *)(to + 2 * places) = PICK(i4, high, high2, 0, 1, 4, 5);
            *(v4 *)(to + 3 * places) = PICK(i4, high, high2, 2, 3, 6, 7);
        }
        for (; i < places; i++)
            for (int64_t each = o; each < o + 4; each++) out[each * places + i] = from[i * filled + each];
    }
    for (; o < outputs; o++)
        for (int64_t i = 0; i < places; i++) out[o * places + i] = from[i * filled + o];
}

/* Convolves one of several parts of the records; the room is for an image and a record's results. */
void dpoptim_convolve(const void *given, int64_t part, int64_t parts, float *room) {
    const Convolving *of = given;
    const Tile tile = of->level == WIDE_LEVEL ? wide : middle;
    const int together = of->level == WIDE_LEVEL ? 12 : 6;
    int64_t of_image = of->channels * of->padded[0] * of->padded[1] * of->padded[2];
    int64_t of_record = of->channels * of->size[0] * of->size[1] * of->size[2];
    float *image = room, *results = room + of_image;
    memset(image, 0, sizeof(float) * of_image);
    int64_t end = (part + 1) * of->records / parts;
    for (int64_t record = part * of->records / parts; record < end; record++) {
        place(of, of->x + record * of_record, image);
        for (const Phase *some = of->of_results; some < of->of_results + of->phases; some++)
            for (int64_t output = 0; output < of->filled; output += FILL)
                for (int64_t first = 0; first < some->results; first += together)
                    tile(some, image, some->weights + output, of->bias ? of->bias + output : 0, first,
                         of->filled, results + output);
        turn_back(results, of->places, of->filled, of->outputs,
                  of->out + record * of->outputs * of->places);
    }
}
