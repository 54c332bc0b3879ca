/* Ghost norms of single records: squared norms of sums over positions of outer products, by the Gram
   form sum_st (g_s . g_t)(a_s . a_t), which is symmetric: each pair of positions is met once.

   What is computed of a record is a function of its own rows, in one order of operations that the
   geometry alone decides; positions of zeros at the end change nothing. */

#include "../vectors.h"

/* Sums of neighbours in each four numbers: of a, and beside them of b. */
#define HALVES_16(a, b)                                                                            \
    (PICK(i16, a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +                  \
     PICK(i16, a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31))
#define HALVES_8(a, b)                                                                             \
    (PICK(i8, a, b, 0, 2, 8, 10, 4, 6, 12, 14) + PICK(i8, a, b, 1, 3, 9, 11, 5, 7, 13, 15))

/* Inner products of R positions with four others, (R, 4), each of `inner` numbers, from these places
   in x on: one vector adds up one of them, in a register. */
enum { OTHERS = 4, WIDE_ROWS = 4, MIDDLE_ROWS = 3, MOST = 4 };

#define PRODUCTS(NAME, TARGET, VECTOR, HALVES, R)                                                  \
    TARGET static void NAME(const float *x, const int64_t *rows, const int64_t *others,            \
                            int64_t inner, float *out) {                                           \
        enum { LANES = sizeof(VECTOR) / sizeof(float) };                                           \
        VECTOR sum[R][OTHERS]; /* stay in registers */                                             \
        int64_t k = 0;                                                                             \
        UNROLLED for (int r = 0; r < R; r++)                                                       \
            UNROLLED for (int s = 0; s < OTHERS; s++) sum[r][s] = (VECTOR){0};                     \
        for (; k + LANES <= inner; k += LANES) {                                                   \
            VECTOR some[R];                                                                        \
            UNROLLED for (int r = 0; r < R; r++) some[r] = *(const VECTOR *)(x + rows[r] + k);     \
            UNROLLED for (int s = 0; s < OTHERS; s++) {                                            \
                VECTOR other = *(const VECTOR *)(x + others[s] + k);                               \
                UNROLLED for (int r = 0; r < R; r++) sum[r][s] += some[r] * other;                 \
            }                                                                                      \
        }                                                                                          \
        UNROLLED for (int r = 0; r < R; r++) {                                                     \
            VECTOR all = HALVES(HALVES(sum[r][0], sum[r][1]), HALVES(sum[r][2], sum[r][3]));       \
            v4 parts[LANES / OTHERS];                                                              \
            memcpy(parts, &all, sizeof all);                                                       \
            v4 both = parts[0] + parts[1];                                                         \
            if (LANES == 16) both += parts[LANES / OTHERS - 2] + parts[LANES / OTHERS - 1];        \
            *(v4 *)(out + r * OTHERS) = both;                                                      \
        }                                                                                          \
        for (; k < inner; k++)                                                                     \
            for (int r = 0; r < R; r++)                                                            \
                for (int s = 0; s < OTHERS; s++)                                                   \
                    out[r * OTHERS + s] += x[rows[r] + k] * x[others[s] + k];                      \
    }
PRODUCTS(wide_products, WIDE, v16, HALVES_16, WIDE_ROWS)
PRODUCTS(middle_products, MIDDLE, v8, HALVES_8, MIDDLE_ROWS)

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

/* Where some positions begin, after each other from one on; the last one again where none is left. */
static void places(int64_t from, int some, int64_t positions, int64_t step, int64_t *out) {
    for (int i = 0; i < some; i++) out[i] = (from + i < positions ? from + i : positions - 1) * step;
}

/* One record's; `soon` are both sides of another one, which is read ahead. */
static Found measured(int64_t positions, const float *g, int64_t g_step, int64_t rows,
                      const float *a, int64_t a_step, int64_t columns, Ahead *soon, int level) {
    int high = level == WIDE_LEVEL ? WIDE_ROWS : MIDDLE_ROWS;
    const float *of_side[2] = {g, a};
    int64_t steps[2] = {g_step, a_step}, inner[2] = {rows, columns};
    Found found = {{0}, 0.0, 0.0, 0.0};
    for (int64_t s = 0; s < positions; s += OTHERS)
        for (int64_t t = s / high * high; t < positions; t += high) {
            float both[2][MOST * OTHERS];
            for (int side = 0; side < 2; side++) {
                int64_t of_rows[MOST], of_others[OTHERS];
                places(t, high, positions, steps[side], of_rows);
                places(s, OTHERS, positions, steps[side], of_others);
                (level == WIDE_LEVEL ? wide_products : middle_products)(
                    of_side[side], of_rows, of_others, inner[side], both[side]);
                read_ahead(soon + side);
            }
            take_in(&found, both[0], both[1], high * OTHERS, t, s, positions);
        }
    return found;
}

/* Of each record, with g (positions, rows) and a (positions, columns) and steps from one position to
   the next: the squared norm of sum_t g[t] a[t]^T, the sum of |g[t]| |a[t]|, and the longest squared
   norm of a g[t], each as far as float32 can tell. */
void dpoptim_ghost_norms(int64_t records, int64_t positions, int64_t rows, int64_t columns,
                         const float *g, int64_t g_stride, int64_t g_step, const float *a,
                         int64_t a_stride, int64_t a_step, double *out, int level) {
    int64_t tiles = positions * positions / (2 * MIDDLE_ROWS * OTHERS) + 1; /* about */
    for (int64_t i = 0; i < records; i++, g += g_stride, a += a_stride, out += 3) {
        int more = i + 1 < records;
        Ahead soon[2] = {ahead(g + more * g_stride, more * positions, g_step, rows, tiles),
                         ahead(a + more * a_stride, more * positions, a_step, columns, tiles)};
        Found found = measured(positions, g, g_step, rows, a, a_step, columns, soon, level);
        double pairs = 0.0;
        for (int lane = 0; lane < MOST * OTHERS; lane++) pairs += found.pairs[lane];
        out[0] = 2.0 * pairs + found.squares;
        out[1] = found.lengths;
        out[2] = found.longest;
    }
}
