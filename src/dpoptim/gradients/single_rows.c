/* Layers in which a record is a single row: its gradient is an outer product, never formed.

   Rows are measured one by one: squares are added in float32 in chains of CHAIN at most, and these in
   float64, so that what is lost is less than `norms.most_lost` says of blocks of any size. */

#include "vectors.h"

enum { CHAIN = 8, SIDE = 4 };

/* As single_rows.py writes it: g (records, rows) and a (records, columns), steps apart. */
typedef struct {
    const float *g, *a;
    int64_t g_step, a_step, rows, columns;
    int64_t weight, bias;                      /* unit of each; -1: it is not trained */
    double g_factor, g_term, a_factor, a_term; /* that squares are raised by */
} Layer;

/* A layer's sums: of the weight's gradients, (rows, columns), and of the bias's. */
typedef struct {
    float *weight;
    double *bias;
} Totals;

/* Squares that float32 can add up, what those that float64 adds up are raised by, and the largest of a
   factor. */
typedef struct {
    double least, most, factor, longest;
} Limits;

/* All that is to be measured: squared norms of each weight's gradients, (layers, records), of each
   unit, (units, records), and of each record's longest g. */
typedef struct {
    int64_t count, records, level, units;
    double *squared, *of_units, *longest;
    Limits limits;
    Layer layers[];
} Measured;

/* A block of groups from a record on: what was measured, and weights, (units, records). */
typedef struct {
    int64_t count, records, level, groups, from;
    const double *squared, *weights;
    Layer layers[]; /* then `Totals` of each, and then the sizes of the groups */
} Added;

/* The sum of the squares of one row. */
#define SQUARES(NAME, TARGET, VECTOR)                                                              \
    TARGET static double NAME(const float *x, int64_t entries) {                                   \
        enum { LANES = sizeof(VECTOR) / sizeof(float) };                                           \
        double total[SIDE] = {0.0};                                                                \
        int64_t i = 0;                                                                             \
        while (i + LANES <= entries) {                                                             \
            VECTOR squares[SIDE];                                                                  \
            memset(squares, 0, sizeof squares);                                                    \
            int64_t whole = (entries - i) / (SIDE * LANES);                                        \
            for (int64_t n = whole < CHAIN ? whole : CHAIN; n > 0; n--, i += SIDE * LANES)         \
                for (int v = 0; v < SIDE; v++) {                                                   \
                    VECTOR some = *(const VECTOR *)(x + i + v * LANES);                            \
                    squares[v] += some * some;                                                     \
                }                                                                                  \
            for (int v = 0; whole < CHAIN && i + LANES <= entries; v++, i += LANES) {              \
                VECTOR some = *(const VECTOR *)(x + i);                                            \
                squares[v] += some * some;                                                         \
            }                                                                                      \
            VECTOR all = (squares[0] + squares[1]) + (squares[2] + squares[3]);                    \
            for (int lane = 0; lane < LANES; lane++) total[lane % SIDE] += all[lane];              \
        }                                                                                          \
        for (int v = 0; i < entries; i++, v = (v + 1) % SIDE) total[v] += (double)x[i] * x[i];     \
        return (total[0] + total[1]) + (total[2] + total[3]);                                      \
    }
SQUARES(wide_squares, WIDE, v16)
SQUARES(middle_squares, MIDDLE, v8)


static double squared_norm(const float *x, int64_t entries, double factor, double term,
                           const Limits *limits, int level) {
    double square = (level == WIDE_LEVEL ? wide_squares : middle_squares)(x, entries);
    square = square * factor + term;
    if (square > limits->least && square < limits->most) return square; /* no if NaN */
    square = 0.0;
    for (int64_t i = 0; i < entries; i++) square += (double)x[i] * x[i];
    return square * limits->factor;
}

/* Measures one of several parts of the records. */
void dpoptim_measure_rows(const void *given, int64_t part, int64_t parts, float *room) {
    (void)room;
    const Measured *what = given;
    int64_t count = what->count, records = what->records, units = what->units;
    const Layer *layers = what->layers;
    const Limits *limits = &what->limits;
    double *squared = what->squared, *of_units = what->of_units, *longest = what->longest;
    int level = (int)what->level;
    for (int64_t i = records * part / parts; i < records * (part + 1) / parts; i++) {
        for (int64_t unit = 0; unit < units; unit++) of_units[unit * records + i] = 0.0;
        longest[i] = 0.0;
        for (int64_t layer = 0; layer < count; layer++) {
            const Layer *of = layers + layer;
            double left = squared_norm(of->g + i * of->g_step, of->rows, of->g_factor, of->g_term,
                                       limits, level);
            longest[i] = left > longest[i] || left != left ? left : longest[i];
            if (of->bias >= 0) of_units[of->bias * records + i] += left;
            if (of->weight < 0) continue;
            double right = squared_norm(of->a + i * of->a_step, of->columns, of->a_factor,
                                        of->a_term, limits, level);
            int too_long = left > limits->longest || right > limits->longest;
            double both = too_long && left > 0.0 && right > 0.0 ? __builtin_inf() : left * right;
            squared[layer * records + i] = both;
            of_units[of->weight * records + i] += both;
        }
    }
}

/* The sum of weighted rows in float64. */
#define BIAS(NAME, TARGET)                                                                         \
    TARGET static void NAME(const float *g, int64_t step, int64_t rows, const double *weights,     \
                            int64_t records, double *total) {                                      \
        memset(total, 0, sizeof(double) * rows);                                                   \
        for (int64_t i = 0; i < records; i++, g += step) {                                         \
            if (weights[i] == 0.0) continue;                                                       \
            for (int64_t row = 0; row < rows; row++) total[row] += weights[i] * g[row];            \
        }                                                                                          \
    }
BIAS(wide_bias, WIDE)
BIAS(middle_bias, MIDDLE)

/* The sum of what is to be added: one of several parts of the columns of weights, and of biases. */
void dpoptim_add_rows(const void *given, int64_t part, int64_t parts, float *room) {
    const Added *what = given;
    int64_t records = what->records, groups = what->groups, from = what->from, of_block = 0;
    const double *squared = what->squared;
    const Totals *totals = (const Totals *)(what->layers + what->count);
    const int64_t *sizes = (const int64_t *)(totals + what->count);
    int level = (int)what->level;
    float some[POSITIONS];
    for (int64_t group = 0; group < groups; group++) of_block += sizes[group];
    for (int64_t layer = 0; layer < what->count; layer++, squared += records) {
        const Layer *of = what->layers + layer;
        const float *g = of->g + from * of->g_step;
        int64_t row = of->rows * part / parts, rows = of->rows * (part + 1) / parts - row;
        if (of->bias >= 0)
            (level == WIDE_LEVEL ? wide_bias : middle_bias)(
                g + row, of->g_step, rows, what->weights + of->bias * records + from, of_block,
                totals[layer].bias + row);
        if (of->weight < 0) continue;
        const double *factors = what->weights + of->weight * records + from;
        const double *measured = squared + from;
        int64_t tiles = (of->columns + 2 * FILL - 1) / (2 * FILL);
        int64_t column = tiles * part / parts * 2 * FILL, end = tiles * (part + 1) / parts * 2 * FILL;
        int64_t columns = (end < of->columns ? end : of->columns) - column;
        const float *a = of->a + from * of->a_step + column;
        for (int64_t group = 0, size; columns > 0 && group < groups; group++) {
            size = sizes[group];
            for (int64_t i = 0; i < size; i++) /* of zero no factor need be finite */
                some[i] = measured[i] == 0.0 ? 0.0f : (float)factors[i];
            dpoptim_add_group(size, some, of->rows, g, of->g_step, columns, a, of->a_step,
                              totals[layer].weight + column, of->columns, group > 0, room,
                              level);
            factors += size, measured += size, g += size * of->g_step, a += size * of->a_step;
        }
    }
}
