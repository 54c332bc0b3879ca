/* Weight gradients of single records: formed, measured while they are in cache, and added up.

   native.py calls this on plain memory; nothing of Python or PyTorch is used. Every number has one
   order of operations, which depends on the layer's geometry alone: an entry of a gradient is one
   chain of multiplications and additions over the positions in their order, whichever entries are
   computed beside it, and an entry of a sum is one chain over the records in theirs. */

#include "../vectors.h"

enum { MOST_ROWS = 8, TOGETHER = 8 };

/* As native.py writes it. Rows are runs of the kernel along its last axis: of (channel, place on
   the first axis, place on the second); those from `first` to `last` are formed. */
typedef struct {
    int64_t channels, outputs, size[3], padding[3], kernel[3], stride[3], dilation[3];
    int64_t first, last, block;
} Geometry;

typedef struct {
    int64_t padded[3], places[3], steps[3], space, filled, lines, lines_at_once;
    int64_t first_channel, channels; /* that the rows read */
    int in_place;                    /* whether the image needs no zeros around it */
} Plan;

/* What all files of the library were: see compiled.py. */
const char *dpoptim_sources(void) { return DPOPTIM_SOURCES; }

/* The widest vectors of this processor that the functions below are made for. */
int dpoptim_level(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return WIDE_LEVEL;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? MIDDLE_LEVEL : NONE;
#elif defined(__aarch64__)
    return MIDDLE_LEVEL;
#else
    return NONE;
#endif
}

static Plan planned(const Geometry *of) {
    Plan plan = {.space = 1, .in_place = 1};
    for (int axis = 0; axis < 3; axis++) {
        plan.padded[axis] = of->size[axis] + 2 * of->padding[axis];
        plan.in_place &= of->padding[axis] == 0;
        plan.places[axis] =
            (plan.padded[axis] - of->dilation[axis] * (of->kernel[axis] - 1) - 1) / of->stride[axis] + 1;
        plan.space *= plan.padded[axis];
    }
    plan.steps[2] = of->stride[2];
    plan.steps[1] = of->stride[1] * plan.padded[2];
    plan.steps[0] = of->stride[0] * plan.padded[1] * plan.padded[2];
    plan.filled = (of->outputs + FILL - 1) / FILL * FILL;
    plan.lines = plan.places[0] * plan.places[1];
    plan.lines_at_once = POSITIONS / plan.places[2];
    if (plan.lines_at_once < 1) plan.lines_at_once = 1;
    if (plan.lines_at_once > plan.lines) plan.lines_at_once = plan.lines;
    int64_t of_channel = of->kernel[0] * of->kernel[1];
    plan.first_channel = of->first / of_channel;
    plan.channels = (of->last - 1) / of_channel + 1 - plan.first_channel;
    return plan;
}

/* Floats of room that `dpoptim_form` needs beside its results. */
int64_t dpoptim_room(const Geometry *of) {
    Plan plan = planned(of);
    int64_t image = plan.in_place ? 0 : plan.channels * plan.space;
    return plan.lines_at_once * plan.places[2] * plan.filled + image;
}

/* Output gradients (outputs, positions) with positions first: (positions, filled), zeros after. */
static void turn(const float *g, int64_t stride, int64_t outputs, int64_t positions, int64_t filled,
                 float *out) {
    int64_t i = 0;
    for (; i + 4 <= outputs; i += 4) {
        int64_t t = 0;
        for (; t + 4 <= positions; t += 4) {
            const float *from = g + i * stride + t;
            v4 a = *(const v4 *)from, b = *(const v4 *)(from + stride);
            v4 c = *(const v4 *)(from + 2 * stride), d = *(const v4 *)(from + 3 * stride);
            v4 low = PICK(i4, a, b, 0, 4, 1, 5);
            v4 high = PICK(i4, a, b, 2, 6, 3, 7);
            v4 low2 = PICK(i4, c, d, 0, 4, 1, 5);
            v4 high2 = PICK(i4, c, d, 2, 6, 3, 7);
            float *to = out + t * filled + i;
            *(v4 *)to = PICK(i4, low, low2, 0, 1, 4, 5);
            *(v4 *)(to + filled) = PICK(i4, low, low2, 2, 3, 6, 7);
            *(v4 *)(to + 2 * filled) = PICK(i4, high, high2, 0, 1, 4, 5);
            *(v4 *)(to + 3 * filled) = PICK(i4, high, high2, 2, 3, 6, 7);
        }
        for (; t < positions; t++)
            for (int64_t j = i; j < i + 4; j++) out[t * filled + j] = g[j * stride + t];
    }
    for (; i < filled; i++)
        for (int64_t t = 0; t < positions; t++)
            out[t * filled + i] = i < outputs ? g[i * stride + t] : 0.0f;
}

static void pad(const Geometry *of, const Plan *plan, const float *x, float *image) {
    for (int64_t c = 0; c < plan->channels; c++)
        for (int64_t d = 0; d < of->size[0]; d++)
            for (int64_t h = 0; h < of->size[1]; h++) {
                int64_t line = (d + of->padding[0]) * plan->padded[1] + h + of->padding[1];
                const float *from = x + ((c * of->size[0] + d) * of->size[1] + h) * of->size[2];
                float *to = image + c * plan->space + line * plan->padded[2] + of->padding[2];
                memcpy(to, from, sizeof(float) * of->size[2]);
            }
}

/* A tile of a gradient: R rows of K entries each, for V vectors of outputs, of which `lanes` are
   stored. Lines `from` to `to` of positions are added to what `out` holds, if `more`. */
typedef void (*Tile)(const Plan *, const float *const *rows, const float *g, float *const *out,
                     int64_t outputs, int64_t lanes, int64_t from, int64_t to, int more);

#define TILE(NAME, TARGET, VECTOR, K, R, V)                                                        \
    TARGET static void NAME(const Plan *plan, const float *const *rows, const float *g,            \
                            float *const *out, int64_t outputs, int64_t lanes, int64_t from,       \
                            int64_t to, int more) {                                                \
        enum { LANES = sizeof(VECTOR) / sizeof(float) };                                           \
        const int64_t filled = plan->filled, width = plan->places[2], step = plan->steps[2];       \
        VECTOR sum[R][K][V], some[V]; /* sums stay in registers: nothing else points at them */    \
        memset(some, 0, sizeof some);                                                              \
        for (int r = 0; r < R; r++)                                                                \
            for (int k = 0; k < K; k++) {                                                          \
                if (more) memcpy(some, out[r] + k * outputs, sizeof(float) * lanes);               \
                for (int v = 0; v < V; v++) sum[r][k][v] = some[v];                                \
            }                                                                                      \
        for (int64_t line = from; line < to; line++) {                                             \
            int64_t start = line / plan->places[1] * plan->steps[0];                               \
            start += line % plan->places[1] * plan->steps[1];                                      \
            const float *x[R];                                                                     \
            for (int r = 0; r < R; r++) x[r] = rows[r] + start;                                    \
            for (int64_t place = 0; place < width; place++, g += filled) {                         \
                VECTOR slopes[V];                                                                  \
                for (int v = 0; v < V; v++) slopes[v] = *(const VECTOR *)(g + v * LANES);          \
                for (int r = 0; r < R; r++) {                                                      \
                    for (int k = 0; k < K; k++)                                                    \
                        for (int v = 0; v < V; v++) sum[r][k][v] += slopes[v] * x[r][k];           \
                    x[r] += step;                                                                  \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
        for (int r = 0; r < R; r++)                                                                \
            for (int k = 0; k < K; k++) {                                                          \
                float *here = out[r] + k * outputs;                                                \
                for (int v = 0; v < V; v++)                                                        \
                    if (lanes == V * LANES) *(VECTOR *)(here + v * LANES) = sum[r][k][v];          \
                    else some[v] = sum[r][k][v];                                                   \
                if (lanes < V * LANES) memcpy(here, some, sizeof(float) * lanes);                  \
            }                                                                                      \
    }

/* As many sums as there are registers for, beside what they are made of. */
TILE(wide_4_3, WIDE, v16, 4, 3, 2)
TILE(wide_3_4, WIDE, v16, 3, 4, 2)
TILE(wide_1_8, WIDE, v16, 1, 8, 2)
TILE(wide_4_6, WIDE, v16, 4, 6, 1)
TILE(wide_3_8, WIDE, v16, 3, 8, 1)
TILE(wide_1_8_half, WIDE, v16, 1, 8, 1)
TILE(middle_4_1, MIDDLE, v8, 4, 1, 2)
TILE(middle_3_2, MIDDLE, v8, 3, 2, 2)
TILE(middle_1_6, MIDDLE, v8, 1, 6, 2)

typedef struct {
    Tile tile;
    int rows, lanes;
} Choice;

static Choice chosen(int level, int run, int64_t left) {
    if (level != WIDE_LEVEL)
        return run == 4 ? (Choice){middle_4_1, 1, 16}
                        : run == 3 ? (Choice){middle_3_2, 2, 16} : (Choice){middle_1_6, 6, 16};
    if (left >= 32)
        return run == 4 ? (Choice){wide_4_3, 3, 32}
                        : run == 3 ? (Choice){wide_3_4, 4, 32} : (Choice){wide_1_8, 8, 32};
    return run == 4 ? (Choice){wide_4_6, 6, 16}
                    : run == 3 ? (Choice){wide_3_8, 8, 16} : (Choice){wide_1_8_half, 8, 16};
}

/* Adds lines `from` to `to` of positions to the gradients of all rows, if there is `more` there. */
static void form_lines(const Geometry *of, const Plan *plan, const float *image, const float *g,
                       float *out, int64_t from, int64_t to, int more, int level) {
    for (int64_t w = 0; w < of->kernel[2];) {
        int64_t left = of->kernel[2] - w;
        int run = of->dilation[2] != 1 ? 1 : left >= 4 ? 4 : left == 3 ? 3 : 1;
        for (int64_t output = 0; output < plan->filled;) {
            Choice way = chosen(level, run, plan->filled - output);
            int64_t lanes = of->outputs - output < way.lanes ? of->outputs - output : way.lanes;
            for (int64_t row = of->first; row < of->last; row += way.rows) {
                const float *rows[MOST_ROWS];
                float *outs[MOST_ROWS];
                for (int r = 0; r < way.rows; r++) {
                    /* the last one again, to the same numbers, where there are no more */
                    int64_t here = row + r < of->last ? row + r : of->last - 1;
                    int64_t h = here % of->kernel[1], d = here / of->kernel[1] % of->kernel[0];
                    int64_t c = here / of->kernel[1] / of->kernel[0] - plan->first_channel;
                    int64_t line = d * of->dilation[0] * plan->padded[1] + h * of->dilation[1];
                    rows[r] = image + c * plan->space + line * plan->padded[2] + w * of->dilation[2];
                    outs[r] = out + ((here - of->first) * of->kernel[2] + w) * of->outputs + output;
                }
                way.tile(plan, rows, g + output, outs, of->outputs, lanes, from, to, more);
            }
            output += way.lanes;
        }
        w += run;
    }
}

/* The gradients of some records, (entries of the kernel by rows, outputs), and their blocks' norms.

   A record has `images` images, one after the other, and the sum of their gradients: one chain over
   the positions of all. `there` tells which images count, (records, images); NULL: all. Strides are
   those of images and records, in floats; x and g are dense in an image. */
void dpoptim_form(const Geometry *of, int64_t records, int64_t images, const uint8_t *there,
                  const float *x, int64_t x_stride, const float *g, int64_t g_stride, float *out,
                  int64_t out_stride, float *norms, int64_t norms_stride, float *room, int level) {
    Plan plan = planned(of);
    int64_t positions = plan.lines * plan.places[2];
    int64_t entries = (of->last - of->first) * of->kernel[2] * of->outputs;
    float *image = room + plan.lines_at_once * plan.places[2] * plan.filled;
    x += plan.first_channel * of->size[0] * of->size[1] * of->size[2];
    if (!plan.in_place) memset(image, 0, sizeof(float) * plan.channels * plan.space);
    for (int64_t i = 0; i < records; i++, out += out_stride) {
        int more = 0;
        for (int64_t each = 0; each < images; each++, x += x_stride, g += g_stride) {
            if (there && !there[i * images + each]) continue;
            if (!plan.in_place) pad(of, &plan, x, image);
            for (int64_t from = 0; from < plan.lines; from += plan.lines_at_once) {
                int64_t to = from + plan.lines_at_once;
                if (to > plan.lines) to = plan.lines;
                turn(g + from * plan.places[2], positions, of->outputs,
                     (to - from) * plan.places[2], plan.filled, room);
                form_lines(of, &plan, plan.in_place ? x : image, room, out, from, to, more, level);
                more = 1;
            }
        }
        if (!more) memset(out, 0, sizeof(float) * entries);
        (level == WIDE_LEVEL ? wide_norms : middle_norms)(out, entries, of->block, norms);
        norms += norms_stride;
    }
}

/* Adds weighted rows to a total, one after the other. */
#define ADD(NAME, TARGET, VECTOR)                                                                  \
    TARGET static void NAME(float *total, int64_t entries, const float *const *rows,               \
                            const float *weights, int count) {                                     \
        enum { LANES = sizeof(VECTOR) / sizeof(float) };                                           \
        int64_t e = 0;                                                                             \
        for (; e + 2 * LANES <= entries; e += 2 * LANES) {                                         \
            VECTOR first = *(const VECTOR *)(total + e), second = *(const VECTOR *)(total + e + LANES); \
            for (int r = 0; r < count; r++) {                                                      \
                first += weights[r] * *(const VECTOR *)(rows[r] + e);                              \
                second += weights[r] * *(const VECTOR *)(rows[r] + e + LANES);                     \
            }                                                                                      \
            *(VECTOR *)(total + e) = first;                                                        \
            *(VECTOR *)(total + e + LANES) = second;                                               \
        }                                                                                          \
        for (; e < entries; e++)                                                                   \
            for (int r = 0; r < count; r++) total[e] += weights[r] * rows[r][e];                   \
    }
ADD(wide_add, WIDE, v16)
ADD(middle_add, MIDDLE, v8)

/* Adds the weighted rows of some records to a total; rows of weight zero may be anything. */
void dpoptim_add(float *total, int64_t entries, const float *rows, int64_t stride,
                 const float *weights, int64_t records, int level) {
    const float *some[TOGETHER];
    float factors[TOGETHER];
    int count = 0;
    for (int64_t i = 0; i < records; i++) {
        if (weights[i] != 0.0f) {
            some[count] = rows + i * stride;
            factors[count++] = weights[i];
        }
        if (count == TOGETHER || (i + 1 == records && count > 0)) {
            (level == WIDE_LEVEL ? wide_add : middle_add)(total, entries, some, factors, count);
            count = 0;
        }
    }
}
