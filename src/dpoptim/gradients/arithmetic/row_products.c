/* Products of rows with one matrix, out = x @ w.T + bias.

   Every number of the result is one chain of multiplications and additions over the inner length, in its
   order and in float32, whatever other rows there are, wherever they lie, to whichever thread they are
   dealt and however wide the processor's vectors are. The matrix is laid out once in panels of PANEL outputs, (inner, PANEL) each; some rows of x
   are copied beside each other first, because rows a power of two apart would push each other out of
   cache; meanwhile the next ones are asked for. */

#include "../vectors.h"

enum { PANEL = 32, SIDE = 16 };
enum { ROWS = 14, FEW = 4, MIDDLE_ROWS = 12, SOME = 6, FEWER = 3 }; /* taken together */
enum { INNER = 384, MIDDLE_INNER = 192, APART = INNER + SIDE, DEEP = 1024, KEPT = 1 << 18 }; /* for the caches */

/* Floats of room for the panels of an (outputs, inner) matrix. */
int64_t dpoptim_panels_room(int64_t outputs, int64_t inner) {
    return (outputs + PANEL - 1) / PANEL * PANEL * inner;
}

/* A square of EACH rows, `step` apart, turned, into rows PANEL apart. */
#define TURN(NAME, TARGET, EACH, ROUNDS, VECTOR, PLACES, LOW, HIGH)                                \
    TARGET static void NAME(const float *from, int64_t step, float *to) {                          \
        VECTOR rows[EACH], zipped[EACH];                                                           \
        UNROLLED for (int i = 0; i < EACH; i++) rows[i] = *(const VECTOR *)(from + i * step);      \
        UNROLLED for (int round = 0; round < ROUNDS; round++) {                                    \
            UNROLLED for (int i = 0; i < EACH / 2; i++) {                                          \
                zipped[2 * i] = PICK(PLACES, rows[i], rows[i + EACH / 2], LOW);                    \
                zipped[2 * i + 1] = PICK(PLACES, rows[i], rows[i + EACH / 2], HIGH);               \
            }                                                                                      \
            UNROLLED for (int i = 0; i < EACH; i++) rows[i] = zipped[i];                           \
        }                                                                                          \
        UNROLLED for (int i = 0; i < EACH; i++) *(VECTOR *)(to + i * PANEL) = rows[i];             \
    }
#define LIST(...) __VA_ARGS__
TURN(turn_16, WIDE, 16, 4, v16, i16, LIST(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
     LIST(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31))
TURN(turn_8, MIDDLE, 8, 3, v8, i8, LIST(0, 8, 1, 9, 2, 10, 3, 11), LIST(4, 12, 5, 13, 6, 14, 7, 15))

/* A matrix w, (outputs, inner), of which entries are `row` apart from output to output, and `column`
   along the inner length, one of which is 1; and its panels. As row_products.py writes it. */
typedef struct {
    int64_t outputs, inner;
    const float *w;
    int64_t row, column;
    float *panels;
    int64_t level;
} Matrix;

/* Rows of x, `x_step` apart, with panels; out is dense; bias may be NULL. */
typedef struct {
    int64_t rows, inner, outputs;
    const float *x;
    int64_t x_step;
    const float *panels, *bias;
    float *out;
    int64_t level;
} Product;

/* Lays out one of several parts of a `Matrix`'s panels. */
void dpoptim_lay_out(const void *given, int64_t part, int64_t parts, float *room) {
    (void)room;
    const Matrix *of = given;
    int64_t outputs = of->outputs, inner = of->inner, row = of->row, column = of->column;
    const float *w = of->w;
    float *panels = of->panels;
    int64_t side = of->level == WIDE_LEVEL ? 16 : 8;
    int64_t all = (outputs + PANEL - 1) / PANEL;
    for (int64_t p = all * part / parts; p < all * (part + 1) / parts; p++) {
        const float *from = w + p * PANEL * row;
        float *to = panels + p * PANEL * inner;
        int64_t wide = outputs - p * PANEL < PANEL ? outputs - p * PANEL : PANEL;
        if (wide < PANEL) memset(to, 0, PANEL * inner * sizeof(float));
        int64_t done = 0, squares = column == 1 ? wide / side * side : 0;
        for (; squares && done + side <= inner; done += side)
            for (int64_t o = 0; o < squares; o += side)
                (side == 16 ? turn_16 : turn_8)(from + o * row + done, row, to + done * PANEL + o);
        for (int64_t i = 0; i < inner; i++) {
            if (row == 1)
                memcpy(to + i * PANEL, from + i * column, wide * sizeof(float));
            else
                for (int64_t o = i < done ? squares : 0; o < wide; o++)
                    to[i * PANEL + o] = from[o * row + i * column];
        }
    }
}

/* Some rows, APART apart, with VECTORS of a panel: goes on from `out`, whose rows are `step` apart. */
#define SOME_ROWS(NAME, TARGET, VECTOR, COUNT, VECTORS)                                            \
    TARGET static void NAME(int64_t inner, const float *x, const float *panel, float *out,         \
                            int64_t step) {                                                        \
        enum { LANES = sizeof(VECTOR) / sizeof(float) };                                           \
        VECTOR sums[COUNT][VECTORS], some[VECTORS];                                                \
        UNROLLED for (int r = 0; r < COUNT; r++) {                                                 \
            UNROLLED for (int v = 0; v < VECTORS; v++)                                             \
                sums[r][v] = *(const VECTOR *)(out + r * step + v * LANES);                        \
        }                                                                                          \
        for (int64_t i = 0; i < inner; i++) {                                                      \
            UNROLLED for (int v = 0; v < VECTORS; v++)                                             \
                some[v] = *(const VECTOR *)(panel + i * PANEL + v * LANES);                        \
            UNROLLED for (int r = 0; r < COUNT; r++) {                                             \
                float factor = x[r * APART + i];                                                   \
                UNROLLED for (int v = 0; v < VECTORS; v++) sums[r][v] += factor * some[v];         \
            }                                                                                      \
        }                                                                                          \
        UNROLLED for (int r = 0; r < COUNT; r++) {                                                 \
            UNROLLED for (int v = 0; v < VECTORS; v++)                                             \
                *(VECTOR *)(out + r * step + v * LANES) = sums[r][v];                              \
        }                                                                                          \
    }
SOME_ROWS(all_wide, WIDE, v16, ROWS, 2)
SOME_ROWS(few_wide, WIDE, v16, FEW, 2)
SOME_ROWS(one_wide, WIDE, v16, 1, 2)
SOME_ROWS(all_narrow, WIDE, v16, ROWS, 1)
SOME_ROWS(few_narrow, WIDE, v16, FEW, 1)
SOME_ROWS(one_narrow, WIDE, v16, 1, 1)
SOME_ROWS(some_middle, MIDDLE, v8, SOME, 2)
SOME_ROWS(few_middle, MIDDLE, v8, FEWER, 2)
SOME_ROWS(one_middle, MIDDLE, v8, 1, 2)

typedef void (*SomeRows)(int64_t, const float *, const float *, float *, int64_t);

/* As many rows at a time as there are functions for. */
static void by_counts(int64_t count, int64_t inner, const float *x, const float *panel, float *out,
                      int64_t step, const int *counts, const SomeRows *functions) {
    for (int64_t r = 0; count > 0; counts++, functions++)
        for (; count >= *counts; count -= *counts, r += *counts)
            (*functions)(inner, x + r * APART, panel, out + r * step, step);
}

static void some_rows(int64_t count, int64_t inner, const float *x, const float *panel, float *out,
                      int64_t step, int narrow, int level) {
    static const int of_wide[] = {ROWS, FEW, 1}, of_middle[] = {SOME, FEWER, 1};
    static const SomeRows wide[] = {all_wide, few_wide, one_wide};
    static const SomeRows narrower[] = {all_narrow, few_narrow, one_narrow};
    static const SomeRows middle[] = {some_middle, few_middle, one_middle};
    if (level == WIDE_LEVEL) {
        by_counts(count, inner, x, panel, out, step, of_wide, narrow ? narrower : wide);
        return;
    }
    for (int64_t half = 0; half < (narrow ? SIDE : PANEL); half += SIDE)
        by_counts(count, inner, x, panel + half, out + half, step, of_middle, middle);
}

/* The next entries of some rows' sums with a panel; an unfilled one by way of `edge`. */
static void with_panel(int64_t count, int64_t inner, const float *x, const float *panel, float *out,
                       int64_t step, int64_t wide, float *edge, int level) {
    if (wide >= PANEL) {
        some_rows(count, inner, x, panel, out, step, 0, level);
        return;
    }
    for (int64_t r = 0; r < count; r++)
        memcpy(edge + r * PANEL, out + r * step, wide * sizeof(float));
    some_rows(count, inner, x, panel, edge, PANEL, wide <= SIDE, level);
    for (int64_t r = 0; r < count; r++)
        memcpy(out + r * step, edge + r * PANEL, wide * sizeof(float));
}

/* One of several parts of the rows of a `Product`. */
void dpoptim_multiply_rows(const void *given, int64_t part, int64_t parts, float *unused) {
    (void)unused;
    const Product *of = given;
    int64_t rows = of->rows, inner = of->inner, outputs = of->outputs, x_step = of->x_step;
    const float *x = of->x, *panels = of->panels, *bias = of->bias;
    float *out = of->out;
    int level = (int)of->level;
    int64_t most = level == WIDE_LEVEL ? ROWS : MIDDLE_ROWS; /* rows together */
    int64_t some = level == WIDE_LEVEL ? INNER : MIDDLE_INNER;
    _Alignas(64) float room[ROWS * APART], edge[ROWS * PANEL];
    int64_t blocks = (rows + most - 1) / most, deep = inner < DEEP ? inner : DEEP;
    int64_t first = blocks * part / parts * most, end = blocks * (part + 1) / parts * most;
    int64_t together = KEPT / deep / PANEL * PANEL;
    if (end > rows) end = rows;
    for (int64_t chunk = 0; chunk < outputs; chunk += together) {
        int64_t last = chunk + together < outputs ? chunk + together : outputs;
        for (int64_t begun = 0; begun < inner; begun += deep)
            for (int64_t r = first; r < end; r += most) {
                int64_t count = end - r < most ? end - r : most, size = (last - chunk) * sizeof(float);
                float *to = out + r * outputs + chunk;
                for (int64_t each = 0; each < count && !begun; each++)
                    if (bias)
                        memcpy(to + each * outputs, bias + chunk, size);
                    else
                        memset(to + each * outputs, 0, size);
                int64_t stop = begun + deep < inner ? begun + deep : inner;
                for (int64_t i = begun; i < stop; i += some) {
                    int64_t length = stop - i < some ? stop - i : some;
                    for (int64_t each = 0; each < count; each++) {
                        const float *from = x + (r + each) * x_step + i;
                        memcpy(room + each * APART, from, length * sizeof(float));
                        for (int64_t j = 0; j < length && r + each + most < end; j += SIDE)
                            __builtin_prefetch(from + most * x_step + j, 0, 2);
                    }
                    for (int64_t o = chunk; o < last; o += PANEL)
                        with_panel(count, length, room, panels + o * inner + i * PANEL,
                                   to + o - chunk, outputs, outputs - o, edge, level);
                }
            }
    }
}
