/* Clip factors, in one pass over the squared norms: `Clipping.factors` in clipping.py says what holds
   of them. */

#include <stdint.h>

/* bound / (norm + gamma), `most` at most, of norms whose squares are raised by a factor; zero where
   that is no more than `least`, or not a number. */
void dpoptim_clip_factors(int64_t records, const double *squared, double raised, double bound,
                          double gamma, double most, double least, double *factors) {
    for (int64_t i = 0; i < records; i++) {
        double factor = bound / (__builtin_sqrt(squared[i] * raised) + gamma);
        factors[i] = factor > most ? most : factor > least ? factor : 0.0;
    }
}
