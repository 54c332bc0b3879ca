/* AES-256 in counter mode, as `stream.py` puts it out. */

#ifndef DPOPTIM_KEYSTREAM_H
#define DPOPTIM_KEYSTREAM_H

#include <stdint.h>

/* A key as its rounds use it, to be cleared after use. */
typedef struct {
    _Alignas(16) uint8_t rounds[15][16];
} Keys;

void dpoptim_expand(const uint8_t *key, Keys *keys);

/* Writes `bytes` of the keystream from its byte `place` on: that of the 128-bit counters whose
   upper half is `number` and whose lower half counts blocks from 0. Only where `dpoptim_aes`. */
void dpoptim_put_out(const Keys *keys, uint64_t number, uint64_t place, uint8_t *out,
                     int64_t bytes);

/* The same of a key as it is. */
void dpoptim_keystream(const uint8_t *key, uint64_t number, uint64_t place, uint8_t *out,
                       int64_t bytes);

/* Overwrites what was secret. */
void dpoptim_clear(void *memory, int64_t bytes);

/* Whether this processor has instructions for it. */
int dpoptim_aes(void);

#endif
