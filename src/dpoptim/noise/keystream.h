/* AES-256 in counter mode, as `stream.py` puts it out. */

#ifndef DPOPTIM_KEYSTREAM_H
#define DPOPTIM_KEYSTREAM_H

#include <stdint.h>

/* Writes `bytes` of the keystream from its byte `place` on: that of the 128-bit counters whose
   upper half is `number` and whose lower half counts blocks from 0. Only where `dpoptim_aes`. */
void dpoptim_keystream(const uint8_t *key, uint64_t number, uint64_t place, uint8_t *out,
                       int64_t bytes);

/* Whether this processor has instructions for it. */
int dpoptim_aes(void);

#endif
