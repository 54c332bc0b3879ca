/* Products of rows with one matrix, out = x @ w.T + bias, on processors with vectors of 16.

   Every number of the result is one chain of multiplications and additions over the inner length, in its
   order and in float32, whatever other rows there are, wherever they lie and to whichever thread they
   are dealt. The matrix is laid out once in panels of PANEL outputs, (inner, PANEL) each; some rows of x
   are copied beside each other first, because rows a power of two apart would push each other out of
   cache; meanwhile the next ones are asked for. */

#include "vectors.h"

enum { PANEL = 32, SIDE = 16, ROWS = 14, FEW = 4 };
enum { INNER = 384, APART = INNER + SIDE, DEEP = 1024, KEPT = 1 << 18 }; /* for the caches */

/* Floats of room for the panels of an (outputs, inner) matrix. */
int64_t dpoptim_panels_room(int64_t outputs, int64_t inner) {
    return (outputs + PANEL - 1) / PANEL * PANEL * inner;
}

#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31

/* A square of SIDE rows, `step` apart, turned, into rows PANEL apart. */
WIDE static void turn(const float *from, int64_t step, float *to) {
    v16 rows[SIDE], zipped[SIDE];
    UNROLLED for (int i = 0; i < SIDE; i++) rows[i] = *(const v16 *)(from + i * step);
    UNROLLED for (int round = 0; round < 4; round++) {
        UNROLLED for (int i = 0; i < SIDE / 2; i++) {
            zipped[2 * i] = PICK(i16, rows[i], rows[i + SIDE / 2], LOW);
            zipped[2 * i + 1] = PICK(i16, rows[i], rows[i + SIDE / 2], HIGH);
        }
        UNROLLED for (int i = 0; i < SIDE; i++) rows[i] = zipped[i];
    }
    UNROLLED for (int i = 0; i < SIDE; i++) *(v16 *)(to + i * PANEL) = rows[i];
}

/* A matrix w, (outputs, inner), of which entries are `row` apart from output to output, and `column`
   along the inner length, one of which is 1; and its panels. As row_products.py writes it. */
typedef struct {
    int64_t outputs, inner;
    const float *w;
    int64_t row, column;
    float *panels;
} Matrix;

/* Rows of x, `x_step` apart, with panels; out is dense; bias may be NULL. */
typedef struct {
    int64_t rows, inner, outputs;
    const float *x;
    int64_t x_step;
    const float *panels, *bias;
    float *out;
} Product;

/* Lays out one of several parts of a `Matrix`'s panels. */
WIDE void dpoptim_lay_out(const void *given, int64_t part, int64_t parts, float *room) {
    (void)room;
    const Matrix *of = given;
    int64_t outputs = of->outputs, inner = of->inner, row = of->row, column = of->column;
    const float *w = of->w;
    float *panels = of->panels;
    int64_t all = (outputs + PANEL - 1) / PANEL;
    for (int64_t p = all * part / parts; p < all * (part + 1) / parts; p++) {
        const float *from = w + p * PANEL * row;
        float *to = panels + p * PANEL * inner;
        int64_t wide = outputs - p * PANEL < PANEL ? outputs - p * PANEL : PANEL;
        if (wide < PANEL) memset(to, 0, PANEL * inner * sizeof(float));
        int64_t done = 0, squares = column == 1 ? wide / SIDE * SIDE : 0;
        for (; squares && done + SIDE <= inner; done += SIDE)
            for (int64_t o = 0; o < squares; o += SIDE)
                turn(from + o * row + done, row, to + done * PANEL + o);
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
#define SOME_ROWS(NAME, COUNT, VECTORS)                                                            \
    WIDE static void NAME(int64_t inner, const float *x, const float *panel, float *out,           \
                          int64_t step) {                                                          \
        v16 sums[COUNT][VECTORS], some[VECTORS];                                                   \
        UNROLLED for (int r = 0; r < COUNT; r++) {                                                 \
            UNROLLED for (int v = 0; v < VECTORS; v++)                                             \
                sums[r][v] = *(const v16 *)(out + r * step + v * SIDE);                            \
        }                                                                                          \
        for (int64_t i = 0; i < inner; i++) {                                                      \
            UNROLLED for (int v = 0; v < VECTORS; v++)                                             \
                some[v] = *(const v16 *)(panel + i * PANEL + v * SIDE);                            \
            UNROLLED for (int r = 0; r < COUNT; r++) {                                             \
                float factor = x[r * APART + i];                                                   \
                UNROLLED for (int v = 0; v < VECTORS; v++) sums[r][v] += factor * some[v];         \
            }                                                                                      \
        }                                                                                          \
        UNROLLED for (int r = 0; r < COUNT; r++) {                                                 \
            UNROLLED for (int v = 0; v < VECTORS; v++)                                             \
                *(v16 *)(out + r * step + v * SIDE) = sums[r][v];                                  \
        }                                                                                          \
    }
SOME_ROWS(all_wide, ROWS, 2)
SOME_ROWS(few_wide, FEW, 2)
SOME_ROWS(one_wide, 1, 2)
SOME_ROWS(all_narrow, ROWS, 1)
SOME_ROWS(few_narrow, FEW, 1)
SOME_ROWS(one_narrow, 1, 1)

typedef void (*SomeRows)(int64_t, const float *, const float *, float *, int64_t);

static void some_rows(int64_t count, int64_t inner, const float *x, const float *panel, float *out,
                      int64_t step, int narrow) {
    SomeRows all = narrow ? all_narrow : all_wide, few = narrow ? few_narrow : few_wide;
    SomeRows one = narrow ? one_narrow : one_wide;
    int64_t r = 0;
    if (count == ROWS) {
        all(inner, x, panel, out, step);
        return;
    }
    for (; r + FEW <= count; r += FEW) few(inner, x + r * APART, panel, out + r * step, step);
    for (; r < count; r++) one(inner, x + r * APART, panel, out + r * step, step);
}

/* The next entries of some rows' sums with a panel; an unfilled one by way of `edge`. */
static void with_panel(int64_t count, int64_t inner, const float *x, const float *panel, float *out,
                       int64_t step, int64_t wide, float *edge) {
    if (wide >= PANEL) {
        some_rows(count, inner, x, panel, out, step, 0);
        return;
    }
    for (int64_t r = 0; r < count; r++)
        memcpy(edge + r * PANEL, out + r * step, wide * sizeof(float));
    some_rows(count, inner, x, panel, edge, PANEL, wide <= SIDE);
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
    _Alignas(64) float room[ROWS * APART], edge[ROWS * PANEL];
    int64_t blocks = (rows + ROWS - 1) / ROWS, deep = inner < DEEP ? inner : DEEP;
    int64_t first = blocks * part / parts * ROWS, end = blocks * (part + 1) / parts * ROWS;
    int64_t together = KEPT / deep / PANEL * PANEL;
    if (end > rows) end = rows;
    for (int64_t chunk = 0; chunk < outputs; chunk += together) {
        int64_t last = chunk + together < outputs ? chunk + together : outputs;
        for (int64_t begun = 0; begun < inner; begun += deep)
            for (int64_t r = first; r < end; r += ROWS) {
                int64_t count = end - r < ROWS ? end - r : ROWS, size = (last - chunk) * sizeof(float);
                float *to = out + r * outputs + chunk;
                for (int64_t each = 0; each < count && !begun; each++)
                    if (bias)
                        memcpy(to + each * outputs, bias + chunk, size);
                    else
                        memset(to + each * outputs, 0, size);
                int64_t stop = begun + deep < inner ? begun + deep : inner;
                for (int64_t i = begun; i < stop; i += INNER) {
                    int64_t length = stop - i < INNER ? stop - i : INNER;
                    for (int64_t each = 0; each < count; each++) {
                        const float *from = x + (r + each) * x_step + i;
                        memcpy(room + each * APART, from, length * sizeof(float));
                        for (int64_t j = 0; j < length && r + each + ROWS < end; j += SIDE)
                            __builtin_prefetch(from + ROWS * x_step + j, 0, 2);
                    }
                    for (int64_t o = chunk; o < last; o += PANEL)
                        with_panel(count, length, room, panels + o * inner + i * PANEL,
                                   to + o - chunk, outputs, outputs - o, edge);
                }
            }
    }
}
