/* What tensors hold, as 64-bit words to be compared with later ones: see values.py. */

#include "../vectors.h"

enum { WORDS, BYTES, TABLE };
enum { AT_ONCE = 4 }; /* rows of a table */

/* As values.py writes it: so many words, bytes, or rows of a table of `lanes` words. */
typedef struct {
    const void *from;
    int64_t kind, count;
} Source;

/* Sums of a table's columns, modulo 2^64. */
#define SUMS(NAME, TARGET)                                                                         \
    TARGET static void NAME(const uint64_t *restrict from, int64_t rows, int64_t lanes,            \
                            uint64_t *restrict out) {                                              \
        memset(out, 0, lanes * sizeof(uint64_t));                                                  \
        for (; rows >= AT_ONCE; rows -= AT_ONCE, from += AT_ONCE * lanes)                          \
            for (int64_t j = 0; j < lanes; j++)                                                    \
                out[j] += (from[j] + from[lanes + j]) +                                            \
                          (from[2 * lanes + j] + from[3 * lanes + j]);                             \
        for (; rows > 0; rows--, from += lanes)                                                    \
            for (int64_t j = 0; j < lanes; j++) out[j] += from[j];                                 \
    }
SUMS(wide_sums, WIDE)
SUMS(middle_sums, MIDDLE)

/* Writes the words, each byte as a word, and the sums of each table, one after the other. */
void dpoptim_read_values(int64_t count, const Source *sources, int64_t lanes, uint64_t *out,
                         int level) {
    for (const Source *of = sources; of < sources + count; of++) {
        if (of->kind == TABLE) {
            (level == WIDE_LEVEL ? wide_sums : middle_sums)(of->from, of->count, lanes, out);
            out += lanes;
            continue;
        }
        if (of->kind == WORDS)
            memcpy(out, of->from, of->count * sizeof(uint64_t));
        else
            for (int64_t i = 0; i < of->count; i++) out[i] = ((const uint8_t *)of->from)[i];
        out += of->count;
    }
}
