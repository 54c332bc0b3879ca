/* Weight gradients of single records that are sums over positions of outer products: formed and
   measured, or measured and added to a total where they are formed.

   As in record_gradients.c, every number has one order of operations: an entry is one chain over the
   positions in their order, whichever entries are computed beside it. */

#include "../vectors.h"

/* Sums over positions of outer products, in tiles of some rows and a few vectors of columns. A tile's
   sums stay in registers until they are written or, times a weight, added to what is there. */

enum { PANEL = 12, LEAST_PANEL = 2 }; /* rows side by side */
enum { COPIED = 8, SOON = 8 };        /* positions copied at a time; how many ahead lines are fetched */

/* Rows in the panel that begins where so many are left: the last ones are filled up with zeros. */
static int64_t panel(int64_t left) {
    return left >= PANEL ? PANEL : (left + LEAST_PANEL - 1) / LEAST_PANEL * LEAST_PANEL;
}

/* How what a tile adds up enters the result: alone, after what is there in one chain, as a sum of its
   own added to what is there, or so added times a weight, when it is measured as well. */
enum { ONLY, MORE, ADDED, WEIGHTED };

/* Clears R rows of V vectors `sum`, and adds positions to them, with steps from one to the next. */
#define CLEAR(VECTOR, R, V)                                                                        \
    UNROLLED for (int r = 0; r < R; r++)                                                           \
        UNROLLED for (int v = 0; v < V; v++) sum[r][v] = (VECTOR){0};

#define ADD_POSITIONS(VECTOR, R, V)                                                                \
    for (int64_t t = 0; t < positions; t++, g += g_step, a += a_step) {                            \
        VECTOR x[V];                                                                               \
        UNROLLED for (int v = 0; v < V; v++) x[v] = *(const VECTOR *)(a + v * LANES);              \
        UNROLLED for (int v = 0; v < V; v++) __builtin_prefetch(a + SOON * a_step + v * LANES);    \
        UNROLLED for (int r = 0; r < R; r++)                                                       \
            UNROLLED for (int v = 0; v < V; v++) sum[r][v] += x[v] * g[r];                         \
    }

/* R rows of V vectors, a step apart in `out`: sums over positions, with steps from one to the next. */
#define OUTER(NAME, TARGET, VECTOR, R, V)                                                          \
    TARGET static void NAME(int64_t positions, const float *g, int64_t g_step, const float *a,     \
                            int64_t a_step, float *out, int64_t step, int how) {                   \
        enum { LANES = sizeof(VECTOR) / sizeof(float) };                                           \
        VECTOR sum[R][V]; /* stay in registers */                                                  \
        CLEAR(VECTOR, R, V)                                                                        \
        UNROLLED for (int r = 0; how == MORE && r < R; r++)                                        \
            UNROLLED for (int v = 0; v < V; v++)                                                   \
                sum[r][v] = *(const VECTOR *)(out + r * step + v * LANES);                         \
        ADD_POSITIONS(VECTOR, R, V)                                                                \
        UNROLLED for (int r = 0; r < R; r++)                                                       \
            UNROLLED for (int v = 0; v < V; v++) {                                                 \
                VECTOR *to = (VECTOR *)(out + r * step + v * LANES);                               \
                *to = how == ADDED ? *to + sum[r][v] : sum[r][v];                                  \
            }                                                                                      \
    }

/* The same whole tile, added times a weight. Adds the squares of each column, R of them added in
   float32, to `squares`. */
#define WEIGHTED_TILE(NAME, TARGET, VECTOR, R, V)                                                  \
    TARGET static void NAME(int64_t positions, const float *g, int64_t g_step, const float *a,     \
                            int64_t a_step, float *out, int64_t step, float weight,                \
                            double *squares) {                                                     \
        enum { LANES = sizeof(VECTOR) / sizeof(float) };                                           \
        VECTOR sum[R][V], of_rows[V];                                                              \
        CLEAR(VECTOR, R, V)                                                                        \
        UNROLLED for (int v = 0; v < V; v++) of_rows[v] = (VECTOR){0};                             \
        ADD_POSITIONS(VECTOR, R, V)                                                                \
        UNROLLED for (int r = 0; r < R; r++, out += step)                                          \
            UNROLLED for (int v = 0; v < V; v++) {                                                 \
                of_rows[v] += sum[r][v] * sum[r][v];                                               \
                *(VECTOR *)(out + v * LANES) += sum[r][v] * weight;                                \
            }                                                                                      \
        float of_columns[V * LANES];                                                               \
        memcpy(of_columns, of_rows, sizeof of_columns);                                            \
        for (int i = 0; i < V * LANES; i++) squares[i] += of_columns[i];                           \
    }

/* The same of `rows` of `lanes` sums that lie in `sums`: at the edges. */
MIDDLE static void weighted_edge(const float *sums, int64_t width, float *out, int64_t step,
                                 int64_t rows, int64_t lanes, float weight, double *squares) {
    float of_rows[2 * FILL] = {0};
    for (int64_t r = 0; r < rows; r++, sums += width, out += step)
        for (int64_t i = 0; i < lanes; i++) {
            of_rows[i] += sums[i] * sums[i];
            out[i] += sums[i] * weight;
        }
    for (int64_t i = 0; i < lanes; i++) squares[i] += of_rows[i];
}

OUTER(wide_outer_12, WIDE, v16, 12, 2)
OUTER(wide_outer_10, WIDE, v16, 10, 2)
OUTER(wide_outer_8, WIDE, v16, 8, 2)
OUTER(wide_outer_6, WIDE, v16, 6, 2)
OUTER(wide_outer_4, WIDE, v16, 4, 2)
OUTER(wide_outer_2, WIDE, v16, 2, 2)
OUTER(wide_outer_12_half, WIDE, v16, 12, 1)
OUTER(wide_outer_10_half, WIDE, v16, 10, 1)
OUTER(wide_outer_8_half, WIDE, v16, 8, 1)
OUTER(wide_outer_6_half, WIDE, v16, 6, 1)
OUTER(wide_outer_4_half, WIDE, v16, 4, 1)
OUTER(wide_outer_2_half, WIDE, v16, 2, 1)
OUTER(middle_outer_6, MIDDLE, v8, 6, 2)
OUTER(middle_outer_4, MIDDLE, v8, 4, 2)
OUTER(middle_outer_2, MIDDLE, v8, 2, 2)
WEIGHTED_TILE(wide_weighted, WIDE, v16, 12, 2)
WEIGHTED_TILE(wide_weighted_8, WIDE, v16, 8, 2)
WEIGHTED_TILE(middle_weighted, MIDDLE, v8, 6, 2)

/* Whether a weighted tile of so many rows and columns is whole. */
static int whole(int64_t rows, int64_t lanes, int level) {
    return level == WIDE_LEVEL ? lanes == 2 * FILL && (rows == PANEL || rows == 8)
                               : lanes == FILL && rows == PANEL;
}

static void weighted_tile(int64_t positions, const float *g, int64_t rows, const float *a,
                          int64_t a_step, float *out, int64_t step, float weight, double *squares,
                          int level) {
    if (level == WIDE_LEVEL) {
        (rows == PANEL ? wide_weighted : wide_weighted_8)(positions, g, rows, a, a_step, out, step,
                                                          weight, squares);
        return;
    }
    for (int64_t r = 0; r < rows; r += 6)
        middle_weighted(positions, g + r, rows, a, a_step, out + r * step, step, weight, squares);
}

typedef void Tile(int64_t positions, const float *g, int64_t g_step, const float *a, int64_t a_step,
                  float *out, int64_t step, int how);

/* By half the number of rows. */
static Tile *const wide_tiles[] = {NULL,         wide_outer_2, wide_outer_4,  wide_outer_6,
                                   wide_outer_8, wide_outer_10, wide_outer_12};
static Tile *const wide_halves[] = {
    NULL,         wide_outer_2_half, wide_outer_4_half,  wide_outer_6_half, wide_outer_8_half,
    wide_outer_10_half, wide_outer_12_half};
static Tile *const middle_tiles[] = {NULL, middle_outer_2, middle_outer_4, middle_outer_6};

/* A panel of sums, (rows in it, width), rows of `out` a step apart. */
static void outer_tile(int64_t positions, const float *g, int64_t rows, const float *a,
                       int64_t a_step, int64_t width, float *out, int64_t step, int how, int level) {
    if (level == WIDE_LEVEL) {
        (width > FILL ? wide_tiles : wide_halves)[rows / 2](positions, g, rows, a, a_step, out, step,
                                                            how);
        return;
    }
    int64_t most = rows == 8 ? 4 : 6; /* of eight, each half */
    for (int64_t r = 0, some; r < rows; r += some) {
        some = rows - r < most ? rows - r : most;
        middle_tiles[some / 2](positions, g + r, rows, a, a_step, out + r * step, step, how);
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

/* Some columns, with positions first: (positions, width), zeros after the last column. Of positions
   that are not all there, `which` are. */
static void pack_columns(const float *a, int64_t step, const int32_t *which, int64_t positions,
                         int64_t columns, int64_t width, float *out) {
    for (int64_t t = 0; t < positions; t++, out += width) {
        const float *from = a + (which ? which[t] : t) * step;
        if (columns == FILL || columns == 2 * FILL) { /* of known sizes: no calls */
            memcpy(out, from, sizeof(float) * FILL);
            if (columns > FILL) memcpy(out + FILL, from + FILL, sizeof(float) * FILL);
            continue;
        }
        memset(out, 0, sizeof(float) * width);
        memcpy(out, from, sizeof(float) * columns);
    }
}

/* Floats of room that `dpoptim_outer` and `dpoptim_add_outer` need beside their results. */
int64_t dpoptim_outer_room(int64_t positions, int64_t rows) {
    int64_t some = positions < POSITIONS ? positions : POSITIONS;
    return some * (2 * FILL + rows + LEAST_PANEL);
}

/* Adds some positions to sum_t g[t, i] a[t, j], (rows, columns), with rows of `out` a step apart;
   adds the squares of columns side by side in each piece of so many rows, a multiple of PANEL, to
   `squares`, (pieces, 2 * FILL), where `how` is WEIGHTED. `packed` is what `pack_rows` made of g,
   `which` as for `pack_columns`, and `soon` what is read ahead, or NULL. */
static void outer_tiles(const float *packed, int64_t rows, const float *a, int64_t a_step,
                          const int32_t *which, int64_t columns, int64_t positions, float *out,
                          int64_t step, float *room, int how, float weight, int64_t piece,
                        double *squares, Ahead *soon, int level) {
    _Alignas(64) float sums[PANEL * 2 * FILL] = {0.0f}; /* also where a panel has no rows */
    for (int64_t column = 0, width; column < columns; column += width) {
        int64_t left = columns - column;
        width = level == WIDE_LEVEL && left > FILL ? 2 * FILL : FILL;
        int64_t lanes = left < width ? left : width;
        int read_once = !which && rows <= PANEL;
        if (read_once && how == ONLY && lanes < width && column > 0) { /* some again: same numbers */
            column -= width - lanes;
            lanes = width;
        }
        int as_it_is = read_once && lanes == width; /* where it lies */
        if (!as_it_is) pack_columns(a + column, a_step, which, positions, lanes, width, room);
        for (int64_t row = 0; row < rows; row += PANEL) {
            int64_t of_panel = panel(rows - row), some = rows - row < PANEL ? rows - row : PANEL;
            float *to = out + row * step + column;
            for (int side = 0; soon && side < 2; side++) read_ahead(soon + side);
            for (int64_t r = 0; r < some; r++)
                for (int64_t i = 0; i < lanes; i += FILL) __builtin_prefetch(to + r * step + i, 1);
            const float *g = packed + row * positions, *x = as_it_is ? a + column : room;
            int64_t x_step = as_it_is ? a_step : width;
            if (some == of_panel && lanes == width && how != WEIGHTED) {
                outer_tile(positions, g, of_panel, x, x_step, width, to, step, how, level);
                continue;
            }
            double *of_piece = how == WEIGHTED ? squares + row / piece * 2 * FILL : NULL;
            if (how == WEIGHTED && whole(some, lanes, level)) {
                weighted_tile(positions, g, some, x, x_step, to, step, weight, of_piece, level);
                continue;
            }
            for (int64_t r = 0; how == MORE && r < some; r++)
                memcpy(sums + r * width, to + r * step, sizeof(float) * lanes);
            outer_tile(positions, g, of_panel, x, x_step, width, sums, width,
                       how == MORE ? MORE : ONLY, level);
            if (how == WEIGHTED)
                weighted_edge(sums, width, to, step, some, lanes, weight, of_piece);
            for (int64_t r = 0; how == ADDED && r < some; r++)
                for (int64_t i = 0; i < lanes; i++) to[r * step + i] += sums[r * width + i];
            for (int64_t r = 0; how < ADDED && r < some; r++)
                memcpy(to + r * step, sums + r * width, sizeof(float) * lanes);
        }
    }
}

static void outer_positions(const float *g, int64_t g_step, int64_t rows, const float *a,
                              int64_t a_step, int64_t columns, int64_t positions, float *out,
                              float *room, int how, float weight, int64_t piece, double *squares,
                              Ahead *soon, int level) {
    float *packed = room + positions * 2 * FILL;
    pack_rows(g, g_step, positions, rows, packed);
    outer_tiles(packed, rows, a, a_step, NULL, columns, positions, out, columns, room, how, weight,
                piece, squares, soon, level);
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
                            some, out, room, from > 0 ? MORE : ONLY, 0.0f, 0, NULL, NULL, level);
        }
        (level == WIDE_LEVEL ? wide_norms : middle_norms)(out, rows * columns, block, norms);
        norms += norms_stride;
    }
}

/* Adds the same gradients, of POSITIONS positions at most, to a total, each times its weight, and
   writes the sum of the squares of each piece of so many rows, (pieces, records); what has weight zero
   may be anything, and is written as zero. A piece has PANEL rows or some times as many; `columns_of`
   is room for 2 * FILL numbers of each. */
void dpoptim_add_outer(int64_t records, int64_t positions, int64_t rows, int64_t columns,
                       const float *g, int64_t g_stride, int64_t g_step, const float *a,
                       int64_t a_stride, int64_t a_step, float *total, const float *weights,
                       int64_t piece, double *squares, double *columns_of, float *room, int level) {
    int64_t pieces = (rows + piece - 1) / piece, width = level == WIDE_LEVEL ? 2 * FILL : FILL;
    int64_t tiles = (rows / PANEL + 1) * (columns / width + 1); /* about */
    for (int64_t i = 0; i < records; i++, g += g_stride, a += a_stride) {
        int more = i + 1 < records;
        Ahead soon[2] = {ahead(g + more * g_stride, more * positions, g_step, rows, tiles),
                         ahead(a + more * a_stride, more * positions, a_step, columns, tiles)};
        memset(columns_of, 0, sizeof(double) * pieces * 2 * FILL);
        if (weights[i] != 0.0f)
            outer_positions(g, g_step, rows, a, a_step, columns, positions, total, room, WEIGHTED,
                            weights[i], piece, columns_of, soon, level);
        for (int64_t k = 0; k < pieces; k++) {
            double all = 0.0;
            for (int j = 0; j < 2 * FILL; j++) all += columns_of[k * 2 * FILL + j];
            squares[k * records + i] = all;
        }
    }
}

/* As vectors.h has it: weighted rows, of POSITIONS records at most, as positions of one sum. */
void dpoptim_add_group(int64_t size, const float *weights, int64_t rows, const float *g,
                       int64_t g_step, int64_t columns, const float *a, int64_t a_step, float *out,
                       int64_t step, int more, float *room, int level) {
    int32_t which[POSITIONS];
    int64_t some = 0;
    float *weighted = room + 2 * FILL * size, *packed = weighted + size * rows;
    for (int64_t i = 0; i < size; i++, g += g_step) {
        if (weights[i] == 0.0f) continue;
        for (int64_t row = 0; row < rows; row++) weighted[some * rows + row] = weights[i] * g[row];
        which[some++] = (int32_t)i;
    }
    pack_rows(weighted, rows, some, rows, packed);
    outer_tiles(packed, rows, a, a_step, some < size ? which : NULL, columns, some, out, step, room,
                more ? ADDED : ONLY, 0.0f, 0, NULL, NULL, level);
}

int64_t dpoptim_group_room(int64_t size, int64_t rows) {
    return size * rows + dpoptim_outer_room(size, rows);
}
