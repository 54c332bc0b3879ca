/* Throws outside of their layer's inner part, settled as `ziggurat.settle` does, to the last bit: products
   and sums are rounded one by one. */

#include "keystream.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

enum { LAYER_BITS = 1023, READ = 128, TERMS = 14, ODD_TERMS = 11 };

/* As ziggurat.py writes it: layers, (step, inner) each, and what there is under the curve over the
   layer's end; terms of the series of exp and of log. */
typedef struct {
    const double *layers, *floor, *rise, *terms, *odd_terms;
    double tail_start;
} Curve;

/* Random words, in their order. */
typedef struct {
    Keys keys;
    uint64_t number, start;
    int64_t used;
    uint64_t read[READ];
} Words;

static uint64_t next_word(Words *of) {
    int64_t at = of->used++ % READ;
    if (at == 0)
        dpoptim_put_out(&of->keys, of->number, of->start + 8 * (of->used - 1), (uint8_t *)of->read,
                        sizeof of->read);
    return of->read[at];
}

static double uniform(Words *of) { return ((double)next_word(of) + 0.5) * 0x1p-64; }

static double from_bits(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static const double LN2_HIGH = 6.93147180369123816490e-01, LN2_LOW = 1.90821492927058770002e-10;

/* exp of x, -700 < x <= 0: `series.exponential`. */
static double exponential(double x, const double *terms) {
    const double one_and_a_half = 0x1.8p52; /* to which a number is added to round it */
    double k = (x * 1.4426950408889634 + one_and_a_half) - one_and_a_half;
    double r = (x - k * LN2_HIGH) - k * LN2_LOW, sum = terms[TERMS - 1];
    for (int i = TERMS - 2; i >= 0; i--) sum = sum * r + terms[i];
    return sum * from_bits((uint64_t)(1023 + (int64_t)k) << 52);
}

/* log of x, 2^-1000 < x <= 1: `series.logarithm`. */
static double logarithm(double x, const double *odd_terms) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    int64_t k = (int64_t)(bits >> 52) - 1022;
    double m = from_bits((bits & 0xfffffffffffffull) | 1022ull << 52); /* at least a half */
    if (m < 0.7071067811865476) m = m + m, k--;
    double s = (m - 1.0) / (m + 1.0), z = s * s, sum = odd_terms[ODD_TERMS - 1];
    for (int i = ODD_TERMS - 2; i >= 0; i--) sum = sum * z + odd_terms[i];
    return (double)k * LN2_HIGH + ((s + s) * sum + (double)k * LN2_LOW);
}

/* Places in the tail, as many as there are in `which`, whose signs they have. */
static void throw_into_tail(Words *words, int64_t count, const int64_t *which, double *place,
                            double *drawn, const Curve *curve) {
    int64_t done = 0;
    while (done < count) {
        int64_t from = done;
        for (int64_t i = from; i < count; i++)
            drawn[i] = -logarithm(uniform(words), curve->odd_terms) / curve->tail_start;
        for (int64_t i = from; i < count; i++) {
            double excess = drawn[i];
            if (-2.0 * logarithm(uniform(words), curve->odd_terms) > excess * excess)
                drawn[done++] = curve->tail_start + excess;
        }
    }
    for (int64_t i = 0; i < count; i++) place[which[i]] = copysign(drawn[i], place[which[i]]);
}

/* Overwrites n places with draws, and their layers; `left`, `beyond` and `drawn` are room for as many
   numbers. Returns how many words were used. */
int64_t dpoptim_settle(const uint8_t *key, uint64_t number, uint64_t start, int64_t n, double *place,
                       int64_t *layer, int64_t *left, int64_t *beyond, double *drawn,
                       const Curve *curve) {
    Words words;
    words.number = number, words.start = start, words.used = 0;
    dpoptim_expand(key, &words.keys);
    for (int64_t i = 0; i < n; i++) left[i] = i;
    while (n > 0) {
        int64_t refused = 0, outer = 0, outside = 0;
        for (int64_t j = 0; j < n; j++) {
            int64_t i = left[j], of = layer[i];
            double height = curve->floor[of] + uniform(&words) * curve->rise[of];
            if (of == 0)
                beyond[outer++] = i;
            else if (height >= exponential(-0.5 * place[i] * place[i], curve->terms))
                left[refused++] = i;
        }
        throw_into_tail(&words, outer, beyond, place, drawn, curve);
        for (int64_t j = 0; j < refused; j++) {
            int64_t i = left[j], word = (int64_t)next_word(&words);
            layer[i] = word & LAYER_BITS;
            place[i] = curve->layers[2 * layer[i]] * (double)word;
            if (fabs(place[i]) >= curve->layers[2 * layer[i] + 1]) left[outside++] = i;
        }
        n = outside;
    }
    int64_t used = words.used;
    dpoptim_clear(&words, sizeof words);
    return used;
}
