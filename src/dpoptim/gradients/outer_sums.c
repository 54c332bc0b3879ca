/* Weight gradients of single records that are sums over positions of outer products: formed and
   measured, or measured and added to a total where they are formed.

   As in record_gradients.c, every number has one order of operations: an entry is one chain over the
   positions in their order, whichever entries are computed beside it. */

#include "vectors.h"

/* Sums over positions of outer products, in tiles of some rows and a few vectors of columns. A tile's
   sums stay in registers until they are written or, times a weight, added to what is there. */

enum { PANEL = 12, LEAST_PANEL = 4, COPIED = 8 }; /* rows side by side; positions copied at a time */

/* Rows in the panel that begins where so many are left: the last ones are filled up with zeros. */
static int64_t panel(int64_t left) {
    return left >= PANEL ? PANEL : (left + LEAST_PANEL - 1) / LEAST_PANEL * LEAST_PANEL;
}

/* How what a tile adds up enters the result: alone, added to what is there, or added times a weight,
   when it is measured as well. */
enum { ONLY, MORE, WEIGHTED };

/* R rows of V vectors: adds positions to `sums`. */
#define OUTER(NAME, TARGET, VECTOR, R, V)                                                          \
    TARGET static void NAME(int64_t positions, const float *g, int64_t step, const float *a,       \
                            float *sums) {                                                         \
        enum { LANES = sizeof(VECTOR) / sizeof(float) };                                           \
        VECTOR sum[R][V]; /* stay in registers */                                                  \
        for (int r = 0; r < R; r++)                                                                \
            for (int v = 0; v < V; v++) sum[r][v] = *(const VECTOR *)(sums + (r * V + v) * LANES); \
        for (int64_t t = 0; t < positions; t++, g += step, a += V * LANES) {                       \
            VECTOR x[V];                                                                           \
            for (int v = 0; v < V; v++) x[v] = *(const VECTOR *)(a + v * LANES);                   \
            for (int r = 0; r < R; r++)                                                            \
                for (int v = 0; v < V; v++) sum[r][v] += x[v] * g[r];                              \
        }                                                                                          \
        for (int r = 0; r < R; r++)                                                                \
            for (int v = 0; v < V; v++) *(VECTOR *)(sums + (r * V + v) * LANES) = sum[r][v];       \
    }

/* Adds `rows` of `lanes` sums, times a weight, to the result. Returns the sum of the squares of all,
   of which as many are added in float32 as there are rows. */
#define WEIGHTED_SUMS(NAME, TARGET, VECTOR)                                                        \
    TARGET static double NAME(const float *sums, int64_t width, float *out, int64_t columns,       \
                              int64_t rows, int64_t lanes, float weight) {                         \
        enum { LANES = sizeof(VECTOR) / sizeof(float), MOST = 2 * FILL / LANES };                  \
        VECTOR squares[MOST];                                                                      \
        double total = 0.0;                                                                        \
        memset(squares, 0, sizeof squares);                                                        \
        for (int64_t r = 0; r < rows; r++, sums += width, out += columns) {                        \
            for (int64_t v = 0; v * LANES < width; v++) {                                          \
                VECTOR some = *(const VECTOR *)(sums + v * LANES);                                 \
                squares[v] += some * some;                                                         \
                if (lanes == width) *(VECTOR *)(out + v * LANES) += some * weight;                 \
            }                                                                                      \
            if (lanes == width) continue;                                                          \
            for (int64_t i = 0; i < lanes; i++) out[i] += sums[i] * weight;                        \
        }                                                                                          \
        for (int64_t v = 0; v * LANES < width; v++)                                                \
            for (int lane = 0; lane < LANES; lane++) total += squares[v][lane];                    \
        return total;                                                                              \
    }

OUTER(wide_outer_12, WIDE, v16, 12, 2)
OUTER(wide_outer_8, WIDE, v16, 8, 2)
OUTER(wide_outer_4, WIDE, v16, 4, 2)
OUTER(wide_outer_12_half, WIDE, v16, 12, 1)
OUTER(wide_outer_8_half, WIDE, v16, 8, 1)
OUTER(wide_outer_4_half, WIDE, v16, 4, 1)
OUTER(middle_outer_6, MIDDLE, v8, 6, 2)
OUTER(middle_outer_4, MIDDLE, v8, 4, 2)
WEIGHTED_SUMS(wide_weighted, WIDE, v16)
WEIGHTED_SUMS(middle_weighted, MIDDLE, v8)

/* Adds positions to a panel of sums, (rows in it, width). */
static void outer_tile(int64_t positions, const float *g, int64_t rows, const float *a,
                       int64_t width, float *sums, int level) {
    if (level != WIDE_LEVEL) {
        int some = rows == PANEL ? 6 : 4;
        for (int64_t r = 0; r < rows; r += some)
            (some == 6 ? middle_outer_6 : middle_outer_4)(positions, g + r, rows, a, sums + r * width);
    } else if (width > FILL) {
        (rows == 12 ? wide_outer_12 : rows == 8 ? wide_outer_8 : wide_outer_4)(positions, g, rows, a,
                                                                                sums);
    } else {
        (rows == 12  ? wide_outer_12_half
         : rows == 8 ? wide_outer_8_half
                     : wide_outer_4_half)(positions, g, rows, a, sums);
    }
}

/* Panels of rows one after the other, in each the positions first: (positions, rows in it). */
static void pack_rows(const float *g, int64_t step, int64_t positions, int64_t rows, float *out) {
    for (int64_t from = 0; from < positions; from += COPIED) {
        int64_t to = from + COPIED < positions ? from + COPIED : positions;
        for (int64_t row = 0; row < rows;) {
            int64_t width = panel(rows - row), some = rows - row < width ? rows - row : width;
            const float *x = g + from * step + row;
            float *packed = out + row * positions + from * width;
            for (int64_t t = from; t < to; t++, x += step, packed += width) {
                if (some == PANEL) { /* of known size: no call */
                    memcpy(packed, x, sizeof(float) * PANEL);
                    continue;
                }
                memset(packed, 0, sizeof(float) * width);
                memcpy(packed, x, sizeof(float) * some);
            }
            row += some;
        }
    }
}

/* Some columns, with positions first: (positions, width), zeros after the last column. */
static void pack_columns(const float *a, int64_t step, int64_t positions, int64_t columns,
                         int64_t width, float *out) {
    for (int64_t t = 0; t < positions; t++, a += step, out += width) {
        if (columns == 2 * FILL) {
            memcpy(out, a, sizeof(float) * 2 * FILL);
            continue;
        }
        memset(out, 0, sizeof(float) * width);
        memcpy(out, a, sizeof(float) * columns);
    }
}

/* Floats of room that `dpoptim_outer` and `dpoptim_add_outer` need beside their results. */
int64_t dpoptim_outer_room(int64_t positions, int64_t rows) {
    int64_t some = positions < POSITIONS ? positions : POSITIONS;
    return some * (2 * FILL + rows + LEAST_PANEL);
}

/* Adds some positions to sum_t g[t, i] a[t, j], (rows, columns); returns the sum of the squares where
   `how` is WEIGHTED. */
static double outer_positions(const float *g, int64_t g_step, int64_t rows, const float *a,
                              int64_t a_step, int64_t columns, int64_t positions, float *out,
                              float *room, int how, float weight, int level) {
    float *packed = room + positions * 2 * FILL, sums[PANEL * 2 * FILL];
    double squares = 0.0;
    pack_rows(g, g_step, positions, rows, packed);
    for (int64_t column = 0, width; column < columns; column += width) {
        int64_t left = columns - column;
        width = level == WIDE_LEVEL && left > FILL ? 2 * FILL : FILL;
        int64_t lanes = left < width ? left : width;
        pack_columns(a + column, a_step, positions, lanes, width, room);
        for (int64_t row = 0; row < rows; row += PANEL) {
            int64_t of_panel = panel(rows - row), some = rows - row < PANEL ? rows - row : PANEL;
            float *to = out + row * columns + column;
            for (int64_t r = 0; r < some; r++)
                for (int64_t i = 0; i < lanes; i += FILL) __builtin_prefetch(to + r * columns + i, 1);
            memset(sums, 0, sizeof(float) * of_panel * width);
            for (int64_t r = 0; how == MORE && r < some; r++)
                memcpy(sums + r * width, to + r * columns, sizeof(float) * lanes);
            outer_tile(positions, packed + row * positions, of_panel, room, width, sums, level);
            if (how == WEIGHTED)
                squares += (level == WIDE_LEVEL ? wide_weighted : middle_weighted)(
                    sums, width, to, columns, some, lanes, weight);
            for (int64_t r = 0; how != WEIGHTED && r < some; r++)
                memcpy(to + r * columns, sums + r * width, sizeof(float) * lanes);
        }
    }
    return squares;
}

/* As `dpoptim_form`, of sums over positions of outer products: g (positions, rows), a (positions,
   columns), with steps from one position to the next. */
void dpoptim_outer(int64_t records, int64_t positions, int64_t rows, int64_t columns,
                   const float *g, int64_t g_stride, int64_t g_step, const float *a,
                   int64_t a_stride, int64_t a_step, float *out, int64_t out_stride, float *norms,
                   int64_t norms_stride, int64_t block, float *room, int level) {
    for (int64_t i = 0; i < records; i++, g += g_stride, a += a_stride, out += out_stride) {
        for (int64_t from = 0; from == 0 || from < positions; from += POSITIONS) { /* none: zeros */
            int64_t some = positions - from < POSITIONS ? positions - from : POSITIONS;
            outer_positions(g + from * g_step, g_step, rows, a + from * a_step, a_step, columns,
                            some, out, room, from > 0 ? MORE : ONLY, 0.0f, level);
        }
        (level == WIDE_LEVEL ? wide_norms : middle_norms)(out, rows * columns, block, norms);
        norms += norms_stride;
    }
}

/* Adds the same gradients, of POSITIONS positions at most, to a total, each times its weight, and
   writes the sum of its squares; what has weight zero may be anything, and is written as zero. */
void dpoptim_add_outer(int64_t records, int64_t positions, int64_t rows, int64_t columns,
                       const float *g, int64_t g_stride, int64_t g_step, const float *a,
                       int64_t a_stride, int64_t a_step, float *total, const float *weights,
                       double *squares, float *room, int level) {
    for (int64_t i = 0; i < records; i++, g += g_stride, a += a_stride)
        squares[i] = weights[i] == 0.0f
                         ? 0.0
                         : outer_positions(g, g_step, rows, a, a_step, columns, positions, total,
                                           room, WEIGHTED, weights[i], level);
}
