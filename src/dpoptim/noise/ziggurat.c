/* What `ziggurat.py` and `gaussian.py` do with a block of numbers, to the last bit. */

#include "keystream.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define WIDE __attribute__((target("avx512f,avx512dq,avx512vl")))
#define MIDDLE __attribute__((target("avx2,fma")))
#define WIDEST(name)                                                                               \
    (__builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") ? wide_##name        \
                                                                              : middle_##name)
#endif

enum { LAYER_BITS = 1023, TOGETHER = 16, IN_CACHE = 1024 };

/* Of a layer: what a signed word is multiplied with, and the edge of its inner part. */
typedef struct {
    double step, inner;
} Layer;

/* The rows of a table that hold a sum, ascending: the others hold 0. `first`: the entry of the table
   that a target begins with. */
typedef struct {
    int64_t first, columns, count;
    const int64_t *row;
    const double *value;
} Rows;

/* Writes each word's place in its layer. Returns how many are outside of its inner part, and writes
   which (from `first` on), and their places and layers. `ANY` writes some places and returns
   whether any is outside. */
#define PLACES(NAME, TARGET, ANY)                                                                  \
    TARGET static int64_t NAME(const int64_t *words, int64_t n, const Layer *layers, double *out,  \
                               int64_t first, int64_t *where, double *place, int64_t *layer) {     \
        int64_t outside = 0;                                                                       \
        for (int64_t start = 0; start < n; start += TOGETHER) {                                    \
            int64_t end = start + TOGETHER < n ? start + TOGETHER : n, any = 1;                    \
            if (end == start + TOGETHER)                                                           \
                any = ANY(words + start, layers, out + start);                                     \
            else                                                                                   \
                for (int64_t i = start; i < end; i++)                                              \
                    out[i] = layers[words[i] & LAYER_BITS].step * (double)words[i];                \
            for (int64_t i = start; any && i < end; i++)                                           \
                if (fabs(out[i]) >= layers[words[i] & LAYER_BITS].inner) {                         \
                    where[outside] = first + i;                                                    \
                    place[outside] = out[i];                                                       \
                    layer[outside++] = words[i] & LAYER_BITS;                                      \
                }                                                                                  \
        }                                                                                          \
        return outside;                                                                            \
    }

#define ANY_PLACE(NAME, TARGET)                                                                    \
    TARGET static inline int64_t NAME(const int64_t *words, const Layer *layers, double *out) {    \
        int64_t any = 0;                                                                           \
        for (int i = 0; i < TOGETHER; i++) {                                                       \
            Layer of = layers[words[i] & LAYER_BITS];                                              \
            out[i] = of.step * (double)words[i];                                                   \
            any |= -(int64_t)(fabs(out[i]) >= of.inner);                                           \
        }                                                                                          \
        return any;                                                                                \
    }

#if defined(__x86_64__)
/* Loads both numbers of a layer at once: to gather each for some words takes four times as long. */
WIDE static inline int64_t wide_any_place(const int64_t *words, const Layer *layers, double *out) {
    unsigned any = 0;
    for (int i = 0; i < TOGETHER; i += 4) {
        const double *a = &layers[words[i] & LAYER_BITS].step;
        const double *b = &layers[words[i + 1] & LAYER_BITS].step;
        const double *c = &layers[words[i + 2] & LAYER_BITS].step;
        const double *d = &layers[words[i + 3] & LAYER_BITS].step;
        __m256d even = _mm256_insertf128_pd(_mm256_castpd128_pd256(_mm_loadu_pd(a)),
                                            _mm_loadu_pd(c), 1);
        __m256d odd = _mm256_insertf128_pd(_mm256_castpd128_pd256(_mm_loadu_pd(b)),
                                           _mm_loadu_pd(d), 1);
        __m256i word = _mm256_loadu_si256((const __m256i *)(words + i));
        __m256d here = _mm256_mul_pd(_mm256_unpacklo_pd(even, odd), _mm256_cvtepi64_pd(word));
        __m256d size = _mm256_andnot_pd(_mm256_set1_pd(-0.0), here);
        any |= _mm256_cmp_pd_mask(size, _mm256_unpackhi_pd(even, odd), _CMP_GE_OQ);
        _mm256_storeu_pd(out + i, here);
    }
    return any;
}
#endif

/* target + std z, each rounded once in float64, and once more to the target's numbers. */
#define ADD(NAME, TARGET, NUMBER)                                                                  \
    TARGET static void NAME(NUMBER *target, int64_t n, const double *z, double std) {              \
        for (int64_t i = 0; i < n; i++) target[i] = (NUMBER)fma(z[i], std, (double)target[i]);     \
    }

#define WRITE(NAME, TARGET, NUMBER)                                                                \
    TARGET static void NAME(NUMBER *target, int64_t n, const double *z) {                          \
        for (int64_t i = 0; i < n; i++) target[i] = (NUMBER)z[i];                                  \
    }

/* What `ADD` leaves where the target held the sums of these rows, and 0 elsewhere. `begin`: the
   target's first entry in the table; `next`: a row that no entry from there on comes before. */
#define OVER_ROWS(NAME, TARGET, NUMBER)                                                            \
    TARGET static void NAME(NUMBER *target, int64_t n, const double *z, double std,                \
                            const Rows *rows, int64_t begin, int64_t *next) {                      \
        for (int64_t i = 0; i < n; i++) target[i] = (NUMBER)fma(z[i], std, 0.0);                   \
        int64_t columns = rows->columns, k = *next;                                                \
        for (; k < rows->count && rows->row[k] * columns < begin + n; k++) {                       \
            int64_t at = rows->row[k] * columns - begin, end = at + columns;                       \
            const double *value = rows->value + k * columns - at;                                  \
            for (int64_t i = at < 0 ? 0 : at; i < (end < n ? end : n); i++)                        \
                target[i] = (NUMBER)fma(z[i], std, value[i]);                                      \
            if (end > n) break; /* its rest is to come */                                          \
        }                                                                                          \
        *next = k;                                                                                 \
    }

/* What lies outside of its layer's inner part changes nothing yet: it is 0 here. */
#define NORMALS(NAME, PLACES, PUT, TARGET, NUMBER)                                                 \
    TARGET static int64_t NAME(const uint8_t *key, uint64_t number, uint64_t start, int64_t n,     \
                               const Layer *layers, NUMBER *target, double std, int64_t *where,    \
                               double *place, int64_t *layer, const Rows *rows) {                  \
        int64_t words[IN_CACHE], outside = 0, next = 0;                                            \
        (void)std, (void)rows, (void)next;                                                         \
        double z[IN_CACHE];                                                                        \
        for (int64_t first = 0; first < n; first += IN_CACHE) {                                    \
            int64_t size = n - first < IN_CACHE ? n - first : IN_CACHE;                            \
            dpoptim_keystream(key, number, start + 8 * first, (uint8_t *)words, 8 * size);         \
            int64_t found = PLACES(words, size, layers, z, first, where + outside,                 \
                                   place + outside, layer + outside);                              \
            for (int64_t i = 0; i < found; i++) z[where[outside + i] - first] = 0.0;               \
            outside += found;                                                                      \
            PUT;                                                                                   \
        }                                                                                          \
        memset(words, 0, sizeof words);                                                            \
        memset(z, 0, sizeof z);                                                                    \
        __asm__ volatile("" : : "r"(words), "r"(z) : "memory"); /* so that they are cleared */     \
        return outside;                                                                            \
    }

#define FOR_NUMBERS(WIDTH, TARGET, NUMBER)                                                         \
    ADD(WIDTH##_add_##NUMBER, TARGET, NUMBER)                                                      \
    WRITE(WIDTH##_write_##NUMBER, TARGET, NUMBER)                                                  \
    OVER_ROWS(WIDTH##_over_rows_of_##NUMBER, TARGET, NUMBER)                                       \
    NORMALS(WIDTH##_normals_added_to_##NUMBER, WIDTH##_places,                                     \
            WIDTH##_add_##NUMBER(target + first, size, z, std), TARGET, NUMBER)                    \
    NORMALS(WIDTH##_normals_in_##NUMBER, WIDTH##_places,                                           \
            WIDTH##_write_##NUMBER(target + first, size, z), TARGET, NUMBER)                       \
    NORMALS(WIDTH##_normals_over_rows_of_##NUMBER, WIDTH##_places,                                 \
            WIDTH##_over_rows_of_##NUMBER(target + first, size, z, std, rows,                      \
                                          rows->first + first, &next),                             \
            TARGET, NUMBER)

#define FOR_PROCESSORS(WIDTH, TARGET)                                                              \
    PLACES(WIDTH##_places, TARGET, WIDTH##_any_place)                                              \
    FOR_NUMBERS(WIDTH, TARGET, float)                                                              \
    FOR_NUMBERS(WIDTH, TARGET, double)

#if defined(__x86_64__)
ANY_PLACE(middle_any_place, MIDDLE)
FOR_PROCESSORS(wide, WIDE)
FOR_PROCESSORS(middle, MIDDLE)
#else
ANY_PLACE(any_any_place, )
FOR_PROCESSORS(any, )
#define WIDEST(name) any_##name
#endif

int64_t dpoptim_places(const int64_t *words, int64_t n, const Layer *layers, double *out,
                       int64_t *where, double *place, int64_t *layer) {
    return WIDEST(places)(words, n, layers, out, 0, where, place, layer);
}

void dpoptim_add_float(float *target, int64_t n, const double *z, double std) {
    WIDEST(add_float)(target, n, z, std);
}

void dpoptim_add_double(double *target, int64_t n, const double *z, double std) {
    WIDEST(add_double)(target, n, z, std);
}

/* All of it for some numbers at a time, which stay in cache. As `dpoptim_places` returns and writes
   what is outside. */
#define PUBLIC(NAME, NUMBER)                                                                       \
    int64_t dpoptim_##NAME(const uint8_t *key, uint64_t number, uint64_t start, int64_t n,         \
                           const Layer *layers, NUMBER *target, double std, int64_t *where,        \
                           double *place, int64_t *layer, const Rows *rows) {                      \
        return WIDEST(NAME)(key, number, start, n, layers, target, std, where, place, layer,       \
                            rows);                                                                 \
    }

PUBLIC(normals_added_to_float, float)
PUBLIC(normals_added_to_double, double)
PUBLIC(normals_in_float, float)
PUBLIC(normals_in_double, double)
PUBLIC(normals_over_rows_of_float, float)
PUBLIC(normals_over_rows_of_double, double)
