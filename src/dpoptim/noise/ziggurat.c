/* What `ziggurat.py` and `gaussian.py` do with a block of numbers, to the last bit. */

#include <math.h>
#include <stdint.h>

#if defined(__x86_64__)
#define WIDE __attribute__((target("avx512f,avx512dq,avx512vl")))
#define MIDDLE __attribute__((target("avx2,fma")))
#define WIDEST(name)                                                                               \
    (__builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") ? wide_##name        \
                                                                              : middle_##name)
#endif

enum { LAYER_BITS = 1023, TOGETHER = 16 };

/* Writes each word's place in its layer. Returns how many are outside of its inner part, and writes
   which, and their places and layers. */
#define PLACES(NAME, TARGET)                                                                       \
    TARGET static int64_t NAME(const int64_t *words, int64_t n, const double *step,                \
                               const double *inner, double *out, int64_t *where, double *place,    \
                               int64_t *layer) {                                                   \
        int64_t outside = 0;                                                                       \
        for (int64_t start = 0; start < n; start += TOGETHER) {                                    \
            int64_t end = start + TOGETHER < n ? start + TOGETHER : n, any = 0;                    \
            if (end == start + TOGETHER)                                                           \
                for (int i = 0; i < TOGETHER; i++) {                                               \
                    int64_t word = words[start + i];                                               \
                    double here = step[word & LAYER_BITS] * (double)word;                          \
                    out[start + i] = here;                                                         \
                    any |= -(int64_t)(fabs(here) >= inner[word & LAYER_BITS]);                     \
                }                                                                                  \
            else                                                                                   \
                for (int64_t i = start; i < end; i++) {                                            \
                    out[i] = step[words[i] & LAYER_BITS] * (double)words[i];                       \
                    any = 1;                                                                       \
                }                                                                                  \
            for (int64_t i = start; any && i < end; i++)                                           \
                if (fabs(out[i]) >= inner[words[i] & LAYER_BITS]) {                                \
                    where[outside] = i;                                                            \
                    place[outside] = out[i];                                                       \
                    layer[outside++] = words[i] & LAYER_BITS;                                      \
                }                                                                                  \
        }                                                                                          \
        return outside;                                                                            \
    }

/* target + std z, each rounded once in float64, and once more to the target's numbers. */
#define ADD(NAME, TARGET, NUMBER)                                                                  \
    TARGET static void NAME(NUMBER *target, int64_t n, const double *z, double std) {              \
        for (int64_t i = 0; i < n; i++) target[i] = (NUMBER)fma(z[i], std, (double)target[i]);     \
    }

#if defined(__x86_64__)
PLACES(wide_places, WIDE)
PLACES(middle_places, MIDDLE)
ADD(wide_add_float, WIDE, float)
ADD(middle_add_float, MIDDLE, float)
ADD(wide_add_double, WIDE, double)
ADD(middle_add_double, MIDDLE, double)
#else
PLACES(any_places, )
ADD(any_add_float, , float)
ADD(any_add_double, , double)
#define WIDEST(name) any_##name
#endif

int64_t dpoptim_places(const int64_t *words, int64_t n, const double *step, const double *inner,
                       double *out, int64_t *where, double *place, int64_t *layer) {
    return WIDEST(places)(words, n, step, inner, out, where, place, layer);
}

void dpoptim_add_float(float *target, int64_t n, const double *z, double std) {
    WIDEST(add_float)(target, n, z, std);
}

void dpoptim_add_double(double *target, int64_t n, const double *z, double std) {
    WIDEST(add_double)(target, n, z, std);
}
