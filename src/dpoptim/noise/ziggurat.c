/* What `ziggurat.py` and `gaussian.py` do with numbers, to the last bit: products and sums are rounded
   one by one, but where `fma` is written. */

#include "keystream.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

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
            int64_t end = start + TOGETHER < n ? start + TOGETHER : n;                             \
            int any = 1;                                                                           \
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

#if defined(__x86_64__)
/* As numbers, rounded once: both halves are exact, beside powers of two that leave them room. */
MIDDLE static inline __m256d middle_number(__m256i word) {
    const __m256i low_one = _mm256_set1_epi64x(0x4330000000000000);  /* 2^52 */
    const __m256i high_one = _mm256_set1_epi64x(0x4530000080000000); /* 2^84 + 2^63 */
    const __m256d both = _mm256_castsi256_pd(_mm256_set1_epi64x(0x4530000080100000));
    __m256i low = _mm256_blend_epi32(low_one, word, 0x55);
    __m256i high = _mm256_xor_si256(_mm256_srli_epi64(word, 32), high_one);
    __m256d above = _mm256_sub_pd(_mm256_castsi256_pd(high), both);
    return _mm256_add_pd(above, _mm256_castsi256_pd(low));
}

/* Loads both numbers of a layer at once: to gather each for some words takes four times as long. */
#define ANY_PLACE(NAME, TARGET, TO_NUMBER)                                                         \
    TARGET static inline int NAME(const int64_t *words, const Layer *layers, double *out) {        \
        __m256d outside = _mm256_setzero_pd();                                                     \
        for (int i = 0; i < TOGETHER; i += 4) {                                                    \
            const double *a = &layers[words[i] & LAYER_BITS].step;                                 \
            const double *b = &layers[words[i + 1] & LAYER_BITS].step;                             \
            const double *c = &layers[words[i + 2] & LAYER_BITS].step;                             \
            const double *d = &layers[words[i + 3] & LAYER_BITS].step;                             \
            __m256d even = _mm256_insertf128_pd(_mm256_castpd128_pd256(_mm_loadu_pd(a)),           \
                                                _mm_loadu_pd(c), 1);                               \
            __m256d odd = _mm256_insertf128_pd(_mm256_castpd128_pd256(_mm_loadu_pd(b)),            \
                                               _mm_loadu_pd(d), 1);                                \
            __m256i word = _mm256_loadu_si256((const __m256i *)(words + i));                       \
            __m256d here = _mm256_mul_pd(_mm256_unpacklo_pd(even, odd), TO_NUMBER(word));          \
            __m256d size = _mm256_andnot_pd(_mm256_set1_pd(-0.0), here);                           \
            outside = _mm256_or_pd(                                                                \
                outside, _mm256_cmp_pd(size, _mm256_unpackhi_pd(even, odd), _CMP_GE_OQ));          \
            _mm256_storeu_pd(out + i, here);                                                       \
        }                                                                                          \
        return _mm256_movemask_pd(outside);                                                        \
    }
ANY_PLACE(wide_any_place, WIDE, _mm256_cvtepi64_pd)
ANY_PLACE(middle_any_place, MIDDLE, middle_number)
#else
static inline int any_any_place(const int64_t *words, const Layer *layers, double *out) {
    int any = 0;
    for (int i = 0; i < TOGETHER; i++) {
        Layer of = layers[words[i] & LAYER_BITS];
        out[i] = of.step * (double)words[i];
        any |= fabs(out[i]) >= of.inner;
    }
    return any;
}
#endif

/* target + std z, each rounded once in float64, and once more to the target's numbers. */
#define ADD(NAME, TARGET, NUMBER)                                                                  \
    TARGET static void NAME(NUMBER *target, int64_t n, const double *z, double std) {              \
        for (int64_t i = 0; i < n; i++) target[i] = (NUMBER)fma(z[i], std, (double)target[i]);     \
    }

/* The same of some entries of a target; not `added`: z alone. */
#define PUT_AT(NAME, TARGET, NUMBER)                                                               \
    TARGET static void NAME(NUMBER *target, int64_t n, const int64_t *where, const double *z,      \
                            double std, int64_t added) {                                           \
        for (int64_t i = 0; i < n; i++) {                                                          \
            NUMBER *to = target + where[i];                                                        \
            *to = (NUMBER)(added ? fma(z[i], std, (double)*to) : z[i]);                            \
        }                                                                                          \
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

/* Draws that are put into numbers, or added to what they hold. As ziggurat.py writes it; `where`, `place`
   and `layer` are for as many. */
typedef struct {
    const uint8_t *key;
    uint64_t number, start; /* of the keystream */
    int64_t n, way;
    const Layer *layers;
    void *target;
    double std;
    int64_t *where;
    double *place;
    int64_t *layer;
    int64_t *found; /* how many lie outside of their layer's inner part, in each part */
    const Rows *rows;
} Draws;

enum { IN, ADDED_TO, OVER_ROWS, OF_DOUBLES = 4 }; /* ways */

static int64_t begin_of(const Draws *of, int64_t part, int64_t parts) {
    int64_t blocks = (of->n + IN_CACHE - 1) / IN_CACHE, first = blocks * part / parts * IN_CACHE;
    return first < of->n ? first : of->n;
}

/* One of several parts. What lies outside of its layer's inner part changes nothing yet: it is 0 here. */
#define DRAW(NAME, WIDTH, TARGET)                                                                  \
    TARGET static void NAME(const Draws *of, int64_t part, int64_t parts) {                        \
        int64_t begin = begin_of(of, part, parts), last = begin_of(of, part + 1, parts);           \
        int64_t words[IN_CACHE], outside = begin, next = 0;                                        \
        double z[IN_CACHE];                                                                        \
        Keys keys;                                                                                 \
        dpoptim_expand(of->key, &keys);                                                            \
        for (int64_t first = begin; first < last; first += IN_CACHE) {                             \
            int64_t size = last - first < IN_CACHE ? last - first : IN_CACHE;                      \
            dpoptim_put_out(&keys, of->number, of->start + 8 * first, (uint8_t *)words, 8 * size); \
            int64_t found =                                                                        \
                WIDTH##_places(words, size, of->layers, z, first, of->where + outside,             \
                               of->place + outside, of->layer + outside);                          \
            for (int64_t i = 0; i < found; i++) z[of->where[outside + i] - first] = 0.0;           \
            outside += found;                                                                      \
            float *some = (float *)of->target + first;                                             \
            double *many = (double *)of->target + first;                                           \
            const Rows *rows = of->rows;                                                           \
            switch (of->way) {                                                                     \
            case IN: WIDTH##_write_float(some, size, z); break;                                    \
            case ADDED_TO: WIDTH##_add_float(some, size, z, of->std); break;                       \
            case OVER_ROWS:                                                                        \
                WIDTH##_over_rows_of_float(some, size, z, of->std, rows, rows->first + first,      \
                                           &next);                                                 \
                break;                                                                             \
            case IN + OF_DOUBLES: WIDTH##_write_double(many, size, z); break;                      \
            case ADDED_TO + OF_DOUBLES: WIDTH##_add_double(many, size, z, of->std); break;         \
            case OVER_ROWS + OF_DOUBLES:                                                           \
                WIDTH##_over_rows_of_double(many, size, z, of->std, rows, rows->first + first,     \
                                            &next);                                                \
                break;                                                                             \
            }                                                                                      \
        }                                                                                          \
        of->found[part] = outside - begin;                                                         \
        dpoptim_clear(&keys, sizeof keys);                                                         \
        dpoptim_clear(words, sizeof words);                                                        \
        dpoptim_clear(z, sizeof z);                                                                \
    }

#define FOR_NUMBERS(WIDTH, TARGET, NUMBER)                                                         \
    ADD(WIDTH##_add_##NUMBER, TARGET, NUMBER)                                                      \
    PUT_AT(WIDTH##_put_at_##NUMBER, TARGET, NUMBER)                                                \
    WRITE(WIDTH##_write_##NUMBER, TARGET, NUMBER)                                                  \
    OVER_ROWS(WIDTH##_over_rows_of_##NUMBER, TARGET, NUMBER)

#define FOR_PROCESSORS(WIDTH, TARGET)                                                              \
    PLACES(WIDTH##_places, TARGET, WIDTH##_any_place)                                              \
    FOR_NUMBERS(WIDTH, TARGET, float)                                                              \
    FOR_NUMBERS(WIDTH, TARGET, double)                                                             \
    DRAW(WIDTH##_draw, WIDTH, TARGET)

#if defined(__x86_64__)
FOR_PROCESSORS(wide, WIDE)
FOR_PROCESSORS(middle, MIDDLE)
#else
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

void dpoptim_put_at_float(float *target, int64_t n, const int64_t *where, const double *z,
                          double std, int64_t added) {
    WIDEST(put_at_float)(target, n, where, z, std, added);
}

void dpoptim_put_at_double(double *target, int64_t n, const int64_t *where, const double *z,
                           double std, int64_t added) {
    WIDEST(put_at_double)(target, n, where, z, std, added);
}

/* Does one of several parts of `Draws`. */
void dpoptim_draw(const void *given, int64_t part, int64_t parts, float *room) {
    (void)room;
    WIDEST(draw)(given, part, parts);
}

/* Brings together what lies outside, as `dpoptim_places` writes it, and returns how many do. */
int64_t dpoptim_outside(const void *given, int64_t parts) {
    const Draws *of = given;
    int64_t outside = of->found[0];
    for (int64_t part = 1; part < parts; part++) {
        int64_t from = begin_of(of, part, parts), found = of->found[part];
        memmove(of->where + outside, of->where + from, found * sizeof(int64_t));
        memmove(of->place + outside, of->place + from, found * sizeof(double));
        memmove(of->layer + outside, of->layer + from, found * sizeof(int64_t));
        outside += found;
    }
    return outside;
}

/* Does some draws one after the other, each in one part, with what lies outside brought together, and
   writes how many there are up to the end of each. */
void dpoptim_draw_in_turn(const void *given, int64_t count, int64_t *ends) {
    int64_t outside = 0;
    for (int64_t i = 0; i < count; i++) {
        Draws of = ((const Draws *)given)[i];
        int64_t found = 0;
        of.where += outside, of.place += outside, of.layer += outside, of.found = &found;
        dpoptim_draw(&of, 0, 1, NULL);
        ends[i] = outside += found;
    }
}
