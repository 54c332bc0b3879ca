/* Means of what was released: see totals.py. */

#include <stdint.h>

/* As totals.py writes it: `doubles` says what numbers the total has. */
typedef struct {
    const void *total;
    int64_t entries, doubles;
    float *mean;
} Mean;

/* Rounds each total to float32 and divides it, as PyTorch does. */
void dpoptim_means(int64_t count, const Mean *means, double divisor) {
    float by = (float)divisor;
    for (const Mean *of = means; of < means + count; of++) {
        const double *many = of->total;
        const float *some = of->total;
        for (int64_t i = 0; i < of->entries; i++)
            of->mean[i] = (of->doubles ? (float)many[i] : some[i]) / by;
    }
}
