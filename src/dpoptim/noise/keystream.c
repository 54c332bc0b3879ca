/* By the processor's own instructions, whose time depends on neither key nor data. */

#include "keystream.h"

#include <string.h>

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>

#define NARROW __attribute__((target("aes,ssse3,sse4.1")))
#define WIDE __attribute__((target("aes,vaes,avx512f,avx512bw")))

enum { ROUNDS = 14, AT_ONCE = 8, WIDE_AT_ONCE = 16, BLOCK = 16 };

typedef __m128i Keys[ROUNDS + 1];

static int has(unsigned leaf, int of_ecx) {
    unsigned a, b, c = 0, d;
    return __get_cpuid_count(leaf, 0, &a, &b, &c, &d) && (c >> of_ecx & 1);
}

static int level = -1; /* asking the processor takes long in a virtual machine */

int dpoptim_aes(void) {
    if (level < 0) {
        __builtin_cpu_init();
        int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
        level = has(1, 25) && has(1, 9) && has(1, 19) ? 1 + (wide && has(7, 9)) : 0;
    }
    return level;
}

/* FIPS 197, 5.2: each round key from the two before it. */
NARROW static __m128i next_key(__m128i before, __m128i word) {
    before = _mm_xor_si128(before, _mm_slli_si128(before, 4));
    before = _mm_xor_si128(before, _mm_slli_si128(before, 8));
    return _mm_xor_si128(before, word);
}

#define EVEN(i, constant)                                                                          \
    keys[i] = next_key(                                                                            \
        keys[(i)-2], _mm_shuffle_epi32(_mm_aeskeygenassist_si128(keys[(i)-1], constant), 0xff))
#define ODD(i)                                                                                     \
    keys[i] = next_key(keys[(i)-2],                                                                \
                       _mm_shuffle_epi32(_mm_aeskeygenassist_si128(keys[(i)-1], 0), 0xaa))

NARROW static void expand(const uint8_t *key, __m128i *keys) {
    keys[0] = _mm_loadu_si128((const __m128i *)key);
    keys[1] = _mm_loadu_si128((const __m128i *)(key + BLOCK));
    EVEN(2, 0x01), ODD(3), EVEN(4, 0x02), ODD(5), EVEN(6, 0x04), ODD(7), EVEN(8, 0x08);
    ODD(9), EVEN(10, 0x10), ODD(11), EVEN(12, 0x20), ODD(13), EVEN(14, 0x40);
}

/* Both halves of a counter are read from their highest byte on. */
NARROW static void few_blocks(const __m128i *keys, uint64_t number, uint64_t block, uint8_t *out,
                              int n) {
    const __m128i turn = _mm_set_epi8(8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    const __m128i one = _mm_set_epi64x(1, 0);
    __m128i counter = _mm_set_epi64x((int64_t)block, (int64_t)number), state[AT_ONCE];
    for (int i = 0; i < AT_ONCE; i++) {
        state[i] = _mm_xor_si128(_mm_shuffle_epi8(counter, turn), keys[0]);
        counter = _mm_add_epi64(counter, one);
    }
#pragma GCC unroll 13
    for (int round = 1; round < ROUNDS; round++)
        for (int i = 0; i < AT_ONCE; i++) state[i] = _mm_aesenc_si128(state[i], keys[round]);
    for (int i = 0; i < AT_ONCE; i++) state[i] = _mm_aesenclast_si128(state[i], keys[ROUNDS]);
    if (n == AT_ONCE)
        for (int i = 0; i < AT_ONCE; i++) _mm_storeu_si128((__m128i *)out + i, state[i]);
    else
        memcpy(out, state, BLOCK * n);
}

WIDE static int64_t wide_blocks(const __m128i *keys, uint64_t number, uint64_t block, uint8_t *out,
                                int64_t n) {
    const __m512i turn = _mm512_broadcast_i32x4(
        _mm_set_epi8(8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    const __m512i four = _mm512_set_epi64(4, 0, 4, 0, 4, 0, 4, 0);
    int64_t done = 0;
    for (; done + WIDE_AT_ONCE <= n; done += WIDE_AT_ONCE) {
        int64_t first = (int64_t)(block + done), of = (int64_t)number;
        __m512i counter =
            _mm512_set_epi64(first + 3, of, first + 2, of, first + 1, of, first, of);
        __m512i state[4];
        for (int i = 0; i < 4; i++) {
            state[i] = _mm512_xor_si512(_mm512_shuffle_epi8(counter, turn),
                                        _mm512_broadcast_i32x4(keys[0]));
            counter = _mm512_add_epi64(counter, four);
        }
        for (int round = 1; round < ROUNDS; round++) {
            __m512i key = _mm512_broadcast_i32x4(keys[round]);
            for (int i = 0; i < 4; i++) state[i] = _mm512_aesenc_epi128(state[i], key);
        }
        __m512i last = _mm512_broadcast_i32x4(keys[ROUNDS]);
        for (int i = 0; i < 4; i++)
            _mm512_storeu_si512(out + BLOCK * (done + 4 * i),
                                _mm512_aesenclast_epi128(state[i], last));
    }
    return done;
}

void dpoptim_keystream(const uint8_t *key, uint64_t number, uint64_t place, uint8_t *out,
                       int64_t bytes) {
    Keys keys;
    uint8_t part[BLOCK];
    uint64_t block = place / BLOCK, skipped = place % BLOCK;
    expand(key, keys);
    if (skipped && bytes) {
        int64_t taken = BLOCK - (int64_t)skipped < bytes ? BLOCK - (int64_t)skipped : bytes;
        few_blocks(keys, number, block++, part, 1);
        memcpy(out, part + skipped, taken);
        out += taken, bytes -= taken;
    }
    int64_t whole = bytes / BLOCK, done = dpoptim_aes() > 1 ? wide_blocks(keys, number, block, out, whole) : 0;
    while (done < whole) {
        int n = whole - done < AT_ONCE ? (int)(whole - done) : AT_ONCE;
        few_blocks(keys, number, block + done, out + BLOCK * done, n);
        done += n;
    }
    if (bytes % BLOCK) {
        few_blocks(keys, number, block + whole, part, 1);
        memcpy(out + BLOCK * whole, part, bytes % BLOCK);
    }
    memset(keys, 0, sizeof keys);
    memset(part, 0, sizeof part);
    __asm__ volatile("" : : "r"(keys), "r"(part) : "memory"); /* so that they are cleared */
}

#else

int dpoptim_aes(void) { return 0; }

void dpoptim_keystream(const uint8_t *key, uint64_t number, uint64_t place, uint8_t *out,
                       int64_t bytes) {
    (void)key, (void)number, (void)place, (void)out, (void)bytes;
}

#endif
