/* Sums over a record's positions of its rows, and of their products with other rows: what a bias and
   the weight of a normalisation get as their gradients.

   What is computed of a record is a function of its own rows: each column's numbers are added in the
   order of the positions, `BLOCK` at a time, whatever the vectors' width and the number of parts. */

#include "../vectors.h"

enum { BLOCK = 64, SIDE_BY_SIDE = 4 };

/* As position_sums.py writes it: g (records, positions, columns) with steps from one record to the
   next and from one position to the next, columns side by side, and so x; mean and scale (records,
   positions) and both results (records, columns) dense, which hold zeros. x may be left out, and the
   mean. */
typedef struct {
    int64_t records, positions, columns;
    const float *g;
    int64_t g_stride, g_step;
    const float *x;
    int64_t x_stride, x_step;
    const float *mean, *scale;
    float *sums, *scaled;
    int64_t level;
} Rows;

/* Adds `some` rows, and their products with normalised ones. */
#define ADD_ROWS(NAME, TARGET, SOME)                                                               \
    TARGET static void NAME(int64_t columns, const float *restrict g, int64_t g_step,              \
                            const float *restrict x, int64_t x_step, const float *mean,            \
                            const float *scale, float *restrict sums, float *restrict scaled) {    \
        float from[SOME], by[SOME];                                                                \
        if (!x) {                                                                                  \
            for (int64_t j = 0; j < columns; j++) {                                                \
                float sum = sums[j];                                                               \
                UNROLLED for (int t = 0; t < SOME; t++) sum += g[t * g_step + j];                  \
                sums[j] = sum;                                                                     \
            }                                                                                      \
            return;                                                                                \
        }                                                                                          \
        for (int t = 0; t < SOME; t++) from[t] = mean ? mean[t] : 0.0f, by[t] = scale[t];          \
        for (int64_t j = 0; j < columns; j++) {                                                    \
            float sum = sums[j], product = scaled[j];                                              \
            UNROLLED for (int t = 0; t < SOME; t++) {                                              \
                float of_g = g[t * g_step + j];                                                    \
                sum += of_g;                                                                       \
                product += (x[t * x_step + j] - from[t]) * by[t] * of_g;                           \
            }                                                                                      \
            sums[j] = sum, scaled[j] = product;                                                    \
        }                                                                                          \
    }
ADD_ROWS(wide_rows, WIDE, SIDE_BY_SIDE)
ADD_ROWS(wide_row, WIDE, 1)
ADD_ROWS(middle_rows, MIDDLE, SIDE_BY_SIDE)
ADD_ROWS(middle_row, MIDDLE, 1)

static void add_up(const Rows *of, int64_t record, float *room) {
    int wide = of->level == WIDE_LEVEL;
    int64_t columns = of->columns, both = of->x ? 2 * columns : columns;
    const float *g = of->g + record * of->g_stride;
    const float *x = of->x ? of->x + record * of->x_stride : 0;
    const float *mean = of->mean ? of->mean + record * of->positions : 0;
    const float *scale = of->x ? of->scale + record * of->positions : 0;
    float *results[2] = {of->sums + record * columns, of->x ? of->scaled + record * columns : 0};
    for (int64_t start = 0; start < of->positions; start += BLOCK) {
        int64_t end = start + BLOCK < of->positions ? start + BLOCK : of->positions, t = start;
        memset(room, 0, both * sizeof(float));
        while (t < end) {
            int some = t + SIDE_BY_SIDE <= end ? SIDE_BY_SIDE : 1;
            (some > 1 ? wide ? wide_rows : middle_rows : wide ? wide_row : middle_row)(
                columns, g + t * of->g_step, of->g_step, x ? x + t * of->x_step : 0, of->x_step,
                mean ? mean + t : 0, scale ? scale + t : 0, room, room + columns);
            t += some;
        }
        for (int side = 0; side < 2; side++)
            if (results[side])
                for (int64_t j = 0; j < columns; j++)
                    results[side][j] += room[side * columns + j];
    }
}

/* Does one of several parts: some records, one after the other. The room holds twice as many as columns. */
void dpoptim_sum_positions(const Rows *of, int64_t part, int64_t parts, float *room) {
    int64_t first = of->records * part / parts, end = of->records * (part + 1) / parts;
    for (int64_t record = first; record < end; record++) add_up(of, record, room);
}
