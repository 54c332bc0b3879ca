/* Vectors of this processor's widths, and norms by them, for the files beside this one. */

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#define WIDE __attribute__((target("avx512f,fma")))
#define MIDDLE __attribute__((target("avx2,fma")))
#else
#define WIDE
#define MIDDLE
#endif

typedef float v4 __attribute__((vector_size(16), aligned(4)));
typedef float v8 __attribute__((vector_size(32), aligned(4)));
typedef float v16 __attribute__((vector_size(64), aligned(4)));

enum { NONE, MIDDLE_LEVEL, WIDE_LEVEL };
enum { FILL = 16, POSITIONS = 512 }; /* outputs side by side; positions that are added at a time */

/* Norms of blocks of numbers, each block's squares added in float32. */
#define NORMS(NAME, TARGET, VECTOR)                                                                \
    TARGET static void NAME(const float *x, int64_t entries, int64_t block, float *out) {          \
        enum { LANES = sizeof(VECTOR) / sizeof(float) };                                           \
        for (int64_t start = 0; start < entries; start += block) {                                 \
            int64_t end = start + block < entries ? start + block : entries, i = start;            \
            VECTOR squares[4];                                                                     \
            memset(squares, 0, sizeof squares);                                                    \
            for (; i + 4 * LANES <= end; i += 4 * LANES)                                           \
                for (int v = 0; v < 4; v++) {                                                      \
                    VECTOR some = *(const VECTOR *)(x + i + v * LANES);                            \
                    squares[v] += some * some;                                                     \
                }                                                                                  \
            VECTOR all = (squares[0] + squares[1]) + (squares[2] + squares[3]);                    \
            float total = 0.0f;                                                                    \
            for (int lane = 0; lane < LANES; lane++) total += all[lane];                           \
            for (; i < end; i++) total += x[i] * x[i];                                             \
            *out++ = __builtin_sqrtf(total);                                                       \
        }                                                                                          \
    }
NORMS(wide_norms, WIDE, v16)
NORMS(middle_norms, MIDDLE, v8)
