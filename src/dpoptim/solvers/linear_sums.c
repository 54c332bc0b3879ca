/* Sums over records of clipped gradients of linear models, in one pass: linear_model.py says of which.

   Some rows at a time are widened to float64 and stay in cache, while their scores are computed, the
   derivatives of their losses, their norms and factors, and what they add. All of it is float64. What
   is computed of a row is one chain of operations in an order that the model alone decides, whatever
   other rows there are; rows are added in their order, AT_MOST of them to a sum of their own. */

#include "../gradients/vectors.h"

typedef double d4 __attribute__((vector_size(32), aligned(8)));
typedef double d8 __attribute__((vector_size(64), aligned(8)));

enum { SOFTMAX, LOGISTIC, SQUARED, HUBER };
enum { TOGETHER = 16, AT_MOST = 8192, FILLED = 8 }; /* rows, rows of a sum; numbers of a vector */

/* As linear_sums.py writes it. Rows of x, `x_step` apart, float64 or else float32; `targets` numbers of
   y a row; norms: squared, of rows with their 1; shares and weights may be NULL. Points: dense
   (terms, outputs, columns), and a coefficient each. Then a clipping rule, see `Clipping.in_c`, the
   largest squared norm of a row or a residual, and where Huber's loss becomes linear. What is found is
   added to `out`, (outputs, columns). */
typedef struct {
    int64_t rows, features, columns, outputs, terms, loss, targets, x_step, x_is_double, level;
    const void *x;
    const double *y, *norms, *shares, *weights, *points, *coefficients;
    double raised, bound, gamma, most, least, longest, delta;
    double *out, *room;
} Sums;

static inline int64_t filled(int64_t columns, int64_t lanes) {
    return (columns + lanes - 1) / lanes * lanes;
}

/* Numbers of room for rows, points and a sum, filled up with zeros; for residuals of a point, of all
   points together, and targets. */
int64_t dpoptim_linear_room(int64_t columns, int64_t outputs, int64_t terms) {
    return (TOGETHER + (terms + 1) * outputs) * filled(columns, FILLED) + 3 * outputs * TOGETHER;
}

typedef int64_t w4 __attribute__((vector_size(32), aligned(8)));
typedef int64_t w8 __attribute__((vector_size(64), aligned(8)));

/* Numbers of a where a mask of words is set, else of b. */
#define PICKED(VECTOR, WORDS, mask, a, b) \
    ((VECTOR)(((WORDS)(a) & (mask)) | ((WORDS)(b) & ~(mask))))

/* exp to 2^-46 of it, of what is cut to where it is finite; NaN of NaN. */
#define EXPONENTIAL(NAME, TARGET, VECTOR, WORDS)                                                   \
    TARGET static inline VECTOR NAME(VECTOR x) {                                                   \
        const double round = 0x1.8p52; /* added, it leaves the whole number in the last bits */    \
        const VECTOR most = 708.0 + (VECTOR){0};                                                   \
        static const double terms[] = {                                                            \
            1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,       \
            1.0 / 120,      1.0 / 24,      1.0 / 6,      0.5,         1.0,        1.0};            \
        x = PICKED(VECTOR, WORDS, x > most, most, x);                                              \
        x = PICKED(VECTOR, WORDS, x < -most, -most, x);                                            \
        VECTOR rounded = x * 1.4426950408889634 + round, k = rounded - round;                      \
        VECTOR r = (x - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10;          \
        VECTOR sum = terms[0] + (VECTOR){0};                                                       \
        UNROLLED for (int i = 1; i < 12; i++) sum = sum * r + terms[i];                            \
        return sum * (VECTOR)(((WORDS)rounded + 1023) << 52);                                      \
    }
EXPONENTIAL(wide_exponential, WIDE, d8, w8)
EXPONENTIAL(middle_exponential, MIDDLE, d4, w4)

/* Scores become derivatives of the losses by them, both (outputs, TOGETHER); y likewise. */
#define DERIVE(NAME, TARGET, VECTOR, WORDS, EXP)                                                   \
    TARGET static void NAME(const Sums *of, const double *y, double *s) {                          \
        enum { LANES = sizeof(VECTOR) / sizeof(double) };                                          \
        int64_t outputs = of->outputs;                                                             \
        if (of->loss == SQUARED || of->loss == HUBER) {                                            \
            VECTOR most = (of->loss == HUBER ? of->delta : __builtin_inf()) + (VECTOR){0};         \
            for (int64_t i = 0; i < outputs * TOGETHER; i += LANES) {                              \
                VECTOR rest = *(VECTOR *)(s + i) - *(const VECTOR *)(y + i);                       \
                rest = PICKED(VECTOR, WORDS, rest > most, most, rest);                             \
                *(VECTOR *)(s + i) = PICKED(VECTOR, WORDS, rest < -most, -most, rest);             \
            }                                                                                      \
            return;                                                                                \
        }                                                                                          \
        for (int r = 0; r < TOGETHER; r += LANES) {                                                \
            VECTOR largest = *(VECTOR *)(s + r), total = {0}, zero = {0};                          \
            VECTOR label = *(const VECTOR *)(y + r);                                               \
            WORDS known = zero != zero;                                                            \
            if (of->loss == LOGISTIC) {                                                            \
                *(VECTOR *)(s + r) = 1.0 / (1.0 + EXP(-largest)) - label;                          \
                continue;                                                                          \
            }                                                                                      \
            for (int64_t o = 1; o < outputs; o++) {                                                \
                VECTOR score = *(VECTOR *)(s + o * TOGETHER + r);                                  \
                largest = PICKED(VECTOR, WORDS, score > largest, score, largest);                  \
            }                                                                                      \
            for (int64_t o = 0; o < outputs; o++) {                                                \
                VECTOR *score = (VECTOR *)(s + o * TOGETHER + r);                                  \
                *score = EXP(*score - largest);                                                    \
                total += *score;                                                                   \
            }                                                                                      \
            for (int64_t o = 0; o < outputs; o++) {                                                \
                VECTOR *score = (VECTOR *)(s + o * TOGETHER + r);                                  \
                WORDS here = label == (double)o + zero;                                            \
                *score = *score / total - PICKED(VECTOR, WORDS, here, 1.0 + zero, zero);           \
                known |= here;                                                                     \
            }                                                                                      \
            /* no class: not counted, since infinite */                                            \
            VECTOR away = PICKED(VECTOR, WORDS, known, zero, __builtin_inf() + zero);              \
            *(VECTOR *)(s + r) += away;                                                            \
        }                                                                                          \
    }
DERIVE(wide_derive, WIDE, d8, w8, wide_exponential)
DERIVE(middle_derive, MIDDLE, d4, w4, middle_exponential)

/* Residuals times their rows' factors and shares, and the factors; zero of rows that do not count. */
#define CLIP(NAME, TARGET, VECTOR, WORDS)                                                          \
    TARGET static void NAME(const Sums *of, const double *norms, const double *shares, double *g,  \
                            double *factors) {                                                     \
        enum { LANES = sizeof(VECTOR) / sizeof(double) };                                          \
        const VECTOR zero = {0}, most = of->most + zero, longest = of->longest + zero;             \
        for (int r = 0; r < TOGETHER; r += LANES) {                                                \
            VECTOR squared = zero, rows = *(const VECTOR *)(norms + r), product, factor;           \
            for (int64_t o = 0; o < of->outputs; o++) {                                            \
                VECTOR residual = *(VECTOR *)(g + o * TOGETHER + r);                               \
                squared += residual * residual;                                                    \
            }                                                                                      \
            product = squared * rows * of->raised;                                                 \
            UNROLLED for (int lane = 0; lane < LANES; lane++)                                      \
                factor[lane] = __builtin_sqrt(product[lane]);                                      \
            factor = of->bound / (factor + of->gamma);                                             \
            factor = PICKED(VECTOR, WORDS, factor > most, most, factor);                           \
            WORDS counts = (factor > of->least + zero) & (squared <= longest) & (rows <= longest); \
            factor = PICKED(VECTOR, WORDS, counts, factor, zero);                                  \
            *(VECTOR *)(factors + r) = factor;                                                     \
            factor *= *(const VECTOR *)(shares + r);                                               \
            for (int64_t o = 0; o < of->outputs; o++) {                                            \
                VECTOR *residual = (VECTOR *)(g + o * TOGETHER + r);                               \
                *residual = PICKED(VECTOR, WORDS, counts, *residual * factor, zero);               \
            }                                                                                      \
        }                                                                                          \
    }
CLIP(wide_clip, WIDE, d8, w8)
CLIP(middle_clip, MIDDLE, d4, w4)

/* Scores of ROWS rows for OUTPUTS outputs. */
#define SCORES(NAME, TARGET, VECTOR, ROWS, OUTPUTS)                                                \
    TARGET static void NAME(const double *rows, const double *points, int64_t pad, double *out) {  \
        enum { LANES = sizeof(VECTOR) / sizeof(double) };                                          \
        VECTOR sums[OUTPUTS][ROWS];                                                                \
        memset(sums, 0, sizeof sums);                                                              \
        for (int64_t i = 0; i < pad; i += LANES)                                                   \
            UNROLLED for (int o = 0; o < OUTPUTS; o++) {                                           \
                VECTOR point = *(const VECTOR *)(points + o * pad + i);                            \
                UNROLLED for (int r = 0; r < ROWS; r++)                                            \
                    sums[o][r] += point * *(const VECTOR *)(rows + r * pad + i);                   \
            }                                                                                      \
        UNROLLED for (int o = 0; o < OUTPUTS; o++)                                                 \
            UNROLLED for (int r = 0; r < ROWS; r++) {                                              \
                double total = 0.0;                                                                \
                UNROLLED for (int lane = 0; lane < LANES; lane++) total += sums[o][r][lane];       \
                out[o * TOGETHER + r] = total;                                                     \
            }                                                                                      \
    }
SCORES(wide_one, WIDE, d8, 8, 1)
SCORES(wide_two, WIDE, d8, 8, 2)
SCORES(middle_one, MIDDLE, d4, 8, 1)
SCORES(middle_two, MIDDLE, d4, 4, 2)

/* Adds rows times their residuals of an output, one after the other. */
#define ADD(NAME, TARGET, VECTOR)                                                                  \
    TARGET static void NAME(const double *rows, const double *g, int64_t pad, double *out) {       \
        enum { LANES = sizeof(VECTOR) / sizeof(double), ROWS = 8 };                                \
        for (int64_t first = 0; first < TOGETHER; first += ROWS, rows += ROWS * pad, g += ROWS) {  \
            VECTOR times[ROWS];                                                                    \
            UNROLLED for (int r = 0; r < ROWS; r++) times[r] = g[r] + (VECTOR){0};                 \
            for (int64_t i = 0; i < pad; i += LANES) {                                             \
                VECTOR sum = *(VECTOR *)(out + i);                                                 \
                UNROLLED for (int r = 0; r < ROWS; r++)                                            \
                    sum += times[r] * *(const VECTOR *)(rows + r * pad + i);                       \
                *(VECTOR *)(out + i) = sum;                                                        \
            }                                                                                      \
        }                                                                                          \
    }
ADD(wide_add, WIDE, d8)
ADD(middle_add, MIDDLE, d4)

/* Rows, each with its 1 behind it, as float64. Those that come next are asked for. */
#define WIDEN(NAME, TARGET, VECTOR, HALF)                                                          \
    TARGET static void NAME(const Sums *of, int64_t first, int64_t count, int64_t pad,             \
                            double *rows) {                                                        \
        enum { LANES = sizeof(VECTOR) / sizeof(double) };                                          \
        int64_t columns = of->features, entry = of->x_is_double ? sizeof(double) : sizeof(float);  \
        const char *start = (const char *)of->x + first * of->x_step * entry;                      \
        int64_t step = of->x_step * entry, ahead = of->rows - first > 2 * TOGETHER ? TOGETHER : 0; \
        for (int64_t r = 0; r < count; r++, rows += pad, start += step) {                          \
            for (const char *next = start + ahead * step, *end = next + columns * entry;           \
                 next < end; next += LINE)                                                         \
                __builtin_prefetch(next);                                                          \
            if (of->x_is_double)                                                                   \
                memcpy(rows, start, columns * sizeof(double));                                     \
            else if (columns < LANES)                                                              \
                for (int64_t i = 0; i < columns; i++) rows[i] = ((const float *)start)[i];         \
            else {                                                                                 \
                const float *x = (const float *)start;                                             \
                for (int64_t i = 0; i + LANES <= columns; i += LANES)                              \
                    *(VECTOR *)(rows + i) =                                                        \
                        __builtin_convertvector(*(const HALF *)(x + i), VECTOR);                   \
                *(VECTOR *)(rows + columns - LANES) = /* some of them again */                     \
                    __builtin_convertvector(*(const HALF *)(x + columns - LANES), VECTOR);         \
            }                                                                                      \
            if (of->columns > columns) rows[columns] = 1.0;                                        \
        }                                                                                          \
        memset(rows, 0, (TOGETHER - count) * pad * sizeof(double));                                \
    }
WIDEN(wide_widen, WIDE, d8, v8)
WIDEN(middle_widen, MIDDLE, d4, v4)

/* Targets, (targets, TOGETHER), norms and shares of some rows; rows that are not there do not count. */
static void read_numbers(const Sums *of, int64_t first, int64_t count, double *y, double *norms,
                         double *shares) {
    int64_t targets = of->targets;
    if (targets == 1)
        memcpy(y, of->y + first, count * sizeof(double));
    else
        for (int64_t r = 0; r < count; r++)
            for (int64_t t = 0; t < targets; t++)
                y[t * TOGETHER + r] = of->y[(first + r) * targets + t];
    memcpy(norms, of->norms + first, count * sizeof(double));
    if (of->shares) memcpy(shares, of->shares + first, count * sizeof(double));
    for (int64_t r = of->shares ? count : 0; r < TOGETHER; r++) shares[r] = 1.0;
    for (int64_t r = count; r < TOGETHER; r++) norms[r] = __builtin_inf();
}

#define SUM(NAME, TARGET, WIDTH, LANES, TWO_ROWS)                                                  \
    TARGET static void NAME(const Sums *of) {                                                      \
        int64_t outputs = of->outputs, pad = filled(of->columns, LANES);                           \
        double *rows = of->room, *points = rows + TOGETHER * pad;                                  \
        double *sum = points + of->terms * outputs * pad, *scores = sum + outputs * pad;           \
        double *together = scores + outputs * TOGETHER, *y = together + outputs * TOGETHER;        \
        double norms[TOGETHER], shares[TOGETHER], factors[TOGETHER];                               \
        memset(of->room, 0, (y - of->room + outputs * TOGETHER) * sizeof(double));                 \
        for (int64_t o = 0; o < of->terms * outputs; o++)                                          \
            memcpy(points + o * pad, of->points + o * of->columns, of->columns * sizeof(double));  \
        for (int64_t first = 0; first < of->rows; first += TOGETHER) {                             \
            int64_t count = of->rows - first < TOGETHER ? of->rows - first : TOGETHER;             \
            WIDTH##_widen(of, first, count, pad, rows);                                            \
            read_numbers(of, first, count, y, norms, shares);                                      \
            memset(together, 0, outputs * TOGETHER * sizeof(double));                              \
            for (int64_t term = 0; term < of->terms; term++) {                                     \
                const double *point = points + term * outputs * pad;                               \
                int64_t o = 0;                                                                     \
                for (; o + 2 <= outputs; o += 2)                                                   \
                    for (int r = 0; r < TOGETHER; r += TWO_ROWS)                                   \
                        WIDTH##_two(rows + r * pad, point + o * pad, pad,                          \
                                    scores + o * TOGETHER + r);                                    \
                for (int r = 0; o < outputs && r < TOGETHER; r += 8)                               \
                    WIDTH##_one(rows + r * pad, point + o * pad, pad, scores + o * TOGETHER + r);  \
                WIDTH##_derive(of, y, scores);                                                     \
                for (int64_t i = 0; i < outputs * TOGETHER; i++)                                   \
                    together[i] += of->coefficients[term] * scores[i];                             \
            }                                                                                      \
            for (int64_t r = 0; of->weights && r < count; r++)                                     \
                for (int64_t o = 0; o < outputs; o++)                                              \
                    together[o * TOGETHER + r] *= of->weights[first + r];                          \
            WIDTH##_clip(of, norms, shares, together, factors);                                    \
            for (int64_t r = 0; r < count; r++)                                                    \
                if (!(factors[r] > 0.0)) memset(rows + r * pad, 0, pad * sizeof(double));          \
            for (int64_t o = 0; o < outputs; o++)                                                  \
                WIDTH##_add(rows, together + o * TOGETHER, pad, sum + o * pad);                    \
            if ((first + TOGETHER) % AT_MOST && first + TOGETHER < of->rows) continue;             \
            for (int64_t o = 0; o < outputs; o++)                                                  \
                for (int64_t i = 0; i < of->columns; i++)                                          \
                    of->out[o * of->columns + i] += sum[o * pad + i];                              \
            memset(sum, 0, outputs * pad * sizeof(double));                                        \
        }                                                                                          \
    }
SUM(wide, WIDE, wide, 8, 8)
SUM(middle, MIDDLE, middle, 4, 4)

void dpoptim_linear_sum(const void *given) {
    const Sums *of = given;
    (of->level == WIDE_LEVEL ? wide : middle)(of);
}
