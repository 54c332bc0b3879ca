/* Layers in which a record is a single row: its gradient is an outer product, never formed.

   Rows are measured one by one: squares are added in float32 in chains of CHAIN at most, and these in
   float64, so that what is lost is less than `norms.most_lost` says of blocks of any size. */

#include "../vectors.h"

enum { CHAIN = 8, SIDE = 4 };

/* As single_rows.py writes it: g (records, rows) and a (records, columns), steps apart. */
typedef struct {
    const float *g, *a;
    int64_t g_step, a_step, rows, columns;
    int64_t weight, bias;                      /* unit of each; -1: it is not trained */
    double g_factor, g_term, a_factor, a_term; /* that squares are raised by */
    float *weights;          /* sum of the weight's gradients, (rows, columns), of one block of groups */
    double *blocks, *biases; /* of all blocks, if there are several; of the bias's, (rows) */
} Layer;

/* Squares that float32 can add up, what those that float64 adds up are raised by, and the largest of a
   factor. */
typedef struct {
    double least, most, factor, longest;
} Limits;

/* Arguments of `dpoptim_clip_factors`, of a unit. */
typedef struct {
    double raised, bound, gamma, most, least;
} Rule;

/* Records that are added up in one chain, and the block that it belongs to. */
typedef struct {
    int64_t size, block;
} Group;

/* Squared norms of each weight's gradients, (layers, records), of each unit, (units, records), and of
   each record's longest g; the factors of each unit, (units, records), by rules, if there are any; and
   groups of records, from one on. */
typedef struct {
    int64_t count, records, level, units;
    double *squared, *of_units, *longest, *factors;
    int64_t rules, groups, from;
    Limits limits;
    Layer layers[]; /* then the rules, and then the groups */
} Rows;

typedef double d4 __attribute__((vector_size(32)));
typedef double d8 __attribute__((vector_size(64)));

/* The sum of the squares of one row. */
#define SQUARES(NAME, TARGET, VECTOR, HALF, DOUBLES)                                               \
    TARGET static double NAME(const float *x, int64_t entries) {                                   \
        enum { LANES = sizeof(VECTOR) / sizeof(float), HALVES = 2 };                               \
        DOUBLES total = {0.0};                                                                     \
        int64_t i = 0;                                                                             \
        while (i + LANES <= entries) {                                                             \
            VECTOR squares[SIDE];                                                                  \
            UNROLLED for (int v = 0; v < SIDE; v++) squares[v] = (VECTOR){0};                      \
            int64_t whole = (entries - i) / (SIDE * LANES);                                        \
            for (int64_t n = whole < CHAIN ? whole : CHAIN; n > 0; n--, i += SIDE * LANES)         \
                UNROLLED for (int v = 0; v < SIDE; v++) {                                          \
                    VECTOR some = *(const VECTOR *)(x + i + v * LANES);                            \
                    squares[v] += some * some;                                                     \
                }                                                                                  \
            UNROLLED for (int v = 0; v < SIDE - 1; v++) {                                          \
                if (whole >= CHAIN || i + LANES > entries) break;                                  \
                VECTOR some = *(const VECTOR *)(x + i);                                            \
                squares[v] += some * some;                                                         \
                i += LANES;                                                                        \
            }                                                                                      \
            VECTOR all = (squares[0] + squares[1]) + (squares[2] + squares[3]);                    \
            HALF halves[HALVES];                                                                   \
            memcpy(halves, &all, sizeof all);                                                      \
            total += __builtin_convertvector(halves[0], DOUBLES) +                                 \
                     __builtin_convertvector(halves[1], DOUBLES);                                  \
        }                                                                                          \
        double of_rest = 0.0;                                                                      \
        for (; i < entries; i++) of_rest += (double)x[i] * x[i];                                   \
        for (int lane = 0; lane < LANES / HALVES; lane++) of_rest += total[lane];                  \
        return of_rest;                                                                            \
    }
SQUARES(wide_squares, WIDE, v16, v8, d8)
SQUARES(middle_squares, MIDDLE, v8, v4, d4)


static double squared_norm(const float *x, int64_t entries, double factor, double term,
                           const Limits *limits, int level) {
    double square = (level == WIDE_LEVEL ? wide_squares : middle_squares)(x, entries);
    square = square * factor + term;
    if (square > limits->least && square < limits->most) return square; /* no if NaN */
    square = 0.0;
    for (int64_t i = 0; i < entries; i++) square += (double)x[i] * x[i];
    return square * limits->factor;
}

void dpoptim_clip_factors(int64_t records, const double *squared, double raised, double bound,
                          double gamma, double most, double least, double *factors);

/* The factors of some records, which are zero in all units or in none. */
static void clip_rows(const Rows *what, const Rule *rules, int64_t first, int64_t end) {
    int64_t records = what->records, units = what->units;
    double *factors = what->factors;
    for (int64_t unit = 0; unit < units; unit++) {
        const Rule *of = rules + unit;
        dpoptim_clip_factors(end - first, what->of_units + unit * records + first, of->raised,
                             of->bound, of->gamma, of->most, of->least,
                             factors + unit * records + first);
    }
    for (int64_t i = first; units > 1 && i < end; i++) {
        int counts = 1;
        for (int64_t unit = 0; unit < units; unit++) counts &= factors[unit * records + i] > 0.0;
        for (int64_t unit = 0; unit < units; unit++) factors[unit * records + i] *= counts;
    }
}

/* Measures one of several parts of the records, and finds their factors where there are rules. */
void dpoptim_measure_rows(const void *given, int64_t part, int64_t parts, float *room) {
    (void)room;
    const Rows *what = given;
    int64_t count = what->count, records = what->records, units = what->units;
    int64_t first = records * part / parts, end = records * (part + 1) / parts;
    const Layer *layers = what->layers;
    const Limits *limits = &what->limits;
    double *squared = what->squared, *of_units = what->of_units, *longest = what->longest;
    int level = (int)what->level;
    for (int64_t i = first; i < end; i++) {
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
    if (what->rules) clip_rows(what, (const Rule *)(layers + count), first, end);
}

/* The sum of weighted rows in float64; `more`: added to what is there. */
#define BIAS(NAME, TARGET)                                                                         \
    TARGET static void NAME(const float *g, int64_t step, int64_t rows, const double *weights,     \
                            int64_t records, double *total, int more) {                            \
        if (!more) memset(total, 0, sizeof(double) * rows);                                        \
        for (int64_t i = 0; i < records; i++, g += step) {                                         \
            if (weights[i] == 0.0) continue;                                                       \
            for (int64_t row = 0; row < rows; row++) total[row] += weights[i] * g[row];            \
        }                                                                                          \
    }
BIAS(wide_bias, WIDE)
BIAS(middle_bias, MIDDLE)

/* Adds one block's sum, (rows, columns) of `step` each, to that of those before it, if any. */
#define BLOCK(NAME, TARGET)                                                                        \
    TARGET static void NAME(const float *block, int64_t rows, int64_t columns, int64_t step,       \
                            double *total, int more) {                                             \
        for (int64_t row = 0; row < rows; row++, block += step, total += step)                     \
            for (int64_t i = 0; i < columns; i++) total[i] = (more ? total[i] : 0.0) + block[i];   \
    }
BLOCK(wide_block, WIDE)
BLOCK(middle_block, MIDDLE)

/* The sum of all groups: one of several parts of the columns of weights, and of biases. */
void dpoptim_add_rows(const void *given, int64_t part, int64_t parts, float *room) {
    const Rows *what = given;
    const Layer *layers = what->layers;
    const Group *groups = (const Group *)((const Rule *)(layers + what->count) + what->rules);
    const Group *last = groups + what->groups - 1;
    const double *squared = what->squared + what->from;
    int level = (int)what->level;
    float some[POSITIONS];
    for (const Layer *of = layers; of < layers + what->count; of++, squared += what->records) {
        const double *factors = what->factors + what->from;
        const double *of_weight = factors + of->weight * what->records;
        int64_t row = of->rows * part / parts, rows = of->rows * (part + 1) / parts - row;
        int64_t tiles = (of->columns + 2 * FILL - 1) / (2 * FILL);
        int64_t column = tiles * part / parts * 2 * FILL, end = tiles * (part + 1) / parts * 2 * FILL;
        int64_t columns = (end < of->columns ? end : of->columns) - column, first = 0;
        const float *g = of->g + what->from * of->g_step, *a = of->a + what->from * of->a_step + column;
        for (const Group *group = groups; group <= last; first += group->size, group++)
            if (of->bias >= 0)
                (level == WIDE_LEVEL ? wide_bias : middle_bias)(
                    g + first * of->g_step + row, of->g_step, rows,
                    factors + of->bias * what->records + first, group->size, of->biases + row,
                    group > groups);
        if (of->weight < 0 || columns <= 0) continue;
        first = 0;
        for (const Group *group = groups; group <= last; first += group->size, group++) {
            for (int64_t i = first; i < first + group->size; i++) /* of zero no factor need be finite */
                some[i - first] = squared[i] == 0.0 ? 0.0f : (float)of_weight[i];
            dpoptim_add_group(group->size, some, of->rows, g + first * of->g_step, of->g_step,
                              columns, a + first * of->a_step, of->a_step, of->weights + column,
                              of->columns, group > groups && group->block == group[-1].block, room,
                              level);
            if (of->blocks && (group == last || group->block != group[1].block))
                (level == WIDE_LEVEL ? wide_block : middle_block)(
                    of->weights + column, of->rows, columns, of->columns, of->blocks + column,
                    group->block > groups->block);
        }
    }
}
