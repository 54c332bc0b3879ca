/* Ghost norms of single records: squared norms of sums over positions of outer products, by the Gram
   form sum_st (g_s . g_t)(a_s . a_t), which is symmetric: each pair of positions is met once.

   What is computed of a record is a function of its own rows, in one order of operations that the
   geometry alone decides; positions of zeros at the end change nothing. */

#include "vectors.h"

/* Sums of neighbours: those of a, and then those of b. */
#define HALVES_16(a, b)                                                                            \
    (PICK(i16, a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +                  \
     PICK(i16, a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31))
#define HALVES_8(a, b)                                                                             \
    (PICK(i8, a, b, 0, 2, 4, 6, 8, 10, 12, 14) + PICK(i8, a, b, 1, 3, 5, 7, 9, 11, 13, 15))
#define HALVED(HALVES, LEFT)                                                                       \
    UNROLLED for (int i = 0; i < LEFT; i++) sum[i] = HALVES(sum[2 * i], sum[2 * i + 1]);

/* Inner products of R rows with four others, (R, 4), each of `inner` numbers: one vector adds up one
   of them, in a register, and there are as many as a vector has lanes. */
enum { OTHERS = 4, MOST = 4 };

#define PRODUCTS(NAME, TARGET, VECTOR, HALVES, R)                                                  \
    TARGET static void NAME(const float *const *rows, const float *const *others, int64_t inner,   \
                            float *out) {                                                          \
        enum { LANES = sizeof(VECTOR) / sizeof(float) };                                           \
        VECTOR sum[LANES], y[OTHERS]; /* stay in registers */                                      \
        int64_t k = 0;                                                                             \
        UNROLLED for (int i = 0; i < LANES; i++) sum[i] = (VECTOR){0};                             \
        for (; k + LANES <= inner; k += LANES) {                                                   \
            UNROLLED for (int s = 0; s < OTHERS; s++) y[s] = *(const VECTOR *)(others[s] + k);     \
            UNROLLED for (int r = 0; r < R; r++) {                                                 \
                VECTOR x = *(const VECTOR *)(rows[r] + k);                                         \
                UNROLLED for (int s = 0; s < OTHERS; s++) sum[r * OTHERS + s] += x * y[s];         \
            }                                                                                      \
        }                                                                                          \
        if (LANES == 16) HALVED(HALVES, 8)                                                         \
        HALVED(HALVES, 4)                                                                          \
        HALVED(HALVES, 2)                                                                          \
        HALVED(HALVES, 1)                                                                          \
        *(VECTOR *)out = sum[0];                                                                   \
        for (; k < inner; k++)                                                                     \
            for (int i = 0; i < LANES; i++) out[i] += rows[i / OTHERS][k] * others[i % OTHERS][k]; \
    }
PRODUCTS(wide_products, WIDE, v16, HALVES_16, 4)
PRODUCTS(middle_products, MIDDLE, v8, HALVES_8, 2)

/* What is added up of a record: products of pairs of different positions, by their places in a tile,
   those of each position with itself, their roots, and the longest of g. */
typedef struct {
    double pairs[MOST * OTHERS], squares, lengths, longest;
} Found;

/* Takes in a tile of both Gram matrices, of which `lanes` are pairs of positions from (t, s) on. */
MIDDLE static void take_in(Found *found, const float *of_g, const float *of_a, int lanes, int64_t t,
                    int64_t s, int64_t positions) {
    if (s + OTHERS <= t && t + lanes / OTHERS <= positions) {
        for (int i = 0; i < lanes; i++) found->pairs[i] += (double)of_g[i] * of_a[i];
        return;
    }
    for (int i = 0; i < lanes; i++) {
        int64_t row = t + i / OTHERS, other = s + i % OTHERS;
        double product = (double)of_g[i] * of_a[i]; /* exact */
        if (row >= positions || other > row) continue;
        if (other < row) {
            found->pairs[i] += product;
            continue;
        }
        found->squares += product;
        found->lengths += __builtin_sqrt(product);
        if (of_g[i] > found->longest || of_g[i] != of_g[i]) found->longest = of_g[i];
    }
}

static Found measured(int64_t positions, const float *g, int64_t g_step, int64_t rows,
                      const float *a, int64_t a_step, int64_t columns, int level) {
    int lanes = level == WIDE_LEVEL ? 16 : 8, high = lanes / OTHERS;
    Found found = {{0}, 0.0, 0.0, 0.0};
    for (int64_t t = 0; t < positions; t += high)
        for (int64_t s = 0; s < t + high && s < positions; s += OTHERS) {
            const float *of_rows[2][MOST], *of_others[2][OTHERS];
            float both[2][16];
            for (int i = 0; i < high + OTHERS; i++) {
                int64_t here = i < high ? t + i : s + i - high;
                if (here >= positions) here = positions - 1; /* the last one again, for nothing */
                (i < high ? of_rows[0] + i : of_others[0] + i - high)[0] = g + here * g_step;
                (i < high ? of_rows[1] + i : of_others[1] + i - high)[0] = a + here * a_step;
            }
            for (int side = 0; side < 2; side++)
                (level == WIDE_LEVEL ? wide_products : middle_products)(
                    of_rows[side], of_others[side], side ? columns : rows, both[side]);
            take_in(&found, both[0], both[1], lanes, t, s, positions);
        }
    return found;
}

/* Of each record, with g (positions, rows) and a (positions, columns) and steps from one position to
   the next: the squared norm of sum_t g[t] a[t]^T, the sum of |g[t]| |a[t]|, and the longest squared
   norm of a g[t], each as far as float32 can tell. */
void dpoptim_ghost_norms(int64_t records, int64_t positions, int64_t rows, int64_t columns,
                         const float *g, int64_t g_stride, int64_t g_step, const float *a,
                         int64_t a_stride, int64_t a_step, double *out, int level) {
    for (int64_t i = 0; i < records; i++, g += g_stride, a += a_stride, out += 3) {
        Found found = measured(positions, g, g_step, rows, a, a_step, columns, level);
        double pairs = 0.0;
        for (int lane = 0; lane < MOST * OTHERS; lane++) pairs += found.pairs[lane];
        out[0] = 2.0 * pairs + found.squares;
        out[1] = found.lengths;
        out[2] = found.longest;
    }
}
