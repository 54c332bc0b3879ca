/* By the processor's own instructions, whose time depends on neither key nor data. */

#include "keystream.h"

#include <string.h>

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>

#define NARROW __attribute__((target("aes,ssse3,sse4.1")))
#define MIDDLE __attribute__((target("aes,vaes,avx2")))
#define WIDE __attribute__((target("aes,vaes,avx512f,avx512bw")))

enum { ROUNDS = 14, AT_ONCE = 8, MANY = 16, BLOCK = 16 }; /* blocks at once, by wide vectors too */
enum { NO_AES, NARROW_LEVEL, MIDDLE_LEVEL, WIDE_LEVEL };

static int has(unsigned leaf, int of_ecx) {
    unsigned a, b, c = 0, d;
    return __get_cpuid_count(leaf, 0, &a, &b, &c, &d) && (c >> of_ecx & 1);
}

static int level = -1; /* asking the processor takes long in a virtual machine */

int dpoptim_aes(void) {
    if (level < 0) {
        __builtin_cpu_init();
        int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
        int middle = __builtin_cpu_supports("avx2"), vaes = has(7, 9);
        level = !has(1, 25) || !has(1, 9) || !has(1, 19) ? NO_AES
                : vaes && wide                           ? WIDE_LEVEL
                : vaes && middle                         ? MIDDLE_LEVEL
                                                         : NARROW_LEVEL;
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

/* As many whole blocks as are MANY together. */
#define BLOCKS(NAME, TARGET, VECTOR, XOR, SHUFFLE, ADD, ROUND, LAST, STORE, TO_ALL, FIRST, STEP)    \
    TARGET static int64_t NAME(const __m128i *keys, uint64_t number, uint64_t block, uint8_t *out, \
                               int64_t n) {                                                        \
        enum { EACH = sizeof(VECTOR) / BLOCK, VECTORS = MANY / EACH };                             \
        const VECTOR turn = TO_ALL(                                                                \
            _mm_set_epi8(8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));                   \
        const VECTOR step = STEP;                                                                  \
        int64_t done = 0, of = (int64_t)number;                                                    \
        for (; done + MANY <= n; done += MANY) {                                                   \
            int64_t first = (int64_t)(block + done);                                               \
            VECTOR counter = FIRST, state[VECTORS], key = TO_ALL(keys[0]);                         \
            for (int i = 0; i < VECTORS; i++) {                                                    \
                state[i] = XOR(SHUFFLE(counter, turn), key);                                       \
                counter = ADD(counter, step);                                                      \
            }                                                                                      \
            for (int round = 1; round < ROUNDS; round++) {                                         \
                key = TO_ALL(keys[round]);                                                         \
                for (int i = 0; i < VECTORS; i++) state[i] = ROUND(state[i], key);                 \
            }                                                                                      \
            key = TO_ALL(keys[ROUNDS]);                                                            \
            for (int i = 0; i < VECTORS; i++)                                                      \
                STORE((void *)(out + BLOCK * (done + EACH * i)), LAST(state[i], key));             \
        }                                                                                          \
        return done;                                                                               \
    }
BLOCKS(wide_blocks, WIDE, __m512i, _mm512_xor_si512, _mm512_shuffle_epi8, _mm512_add_epi64,
       _mm512_aesenc_epi128, _mm512_aesenclast_epi128, _mm512_storeu_si512, _mm512_broadcast_i32x4,
       _mm512_set_epi64(first + 3, of, first + 2, of, first + 1, of, first, of),
       _mm512_set_epi64(4, 0, 4, 0, 4, 0, 4, 0))
BLOCKS(middle_blocks, MIDDLE, __m256i, _mm256_xor_si256, _mm256_shuffle_epi8, _mm256_add_epi64,
       _mm256_aesenc_epi128, _mm256_aesenclast_epi128, _mm256_storeu_si256,
       _mm256_broadcastsi128_si256, _mm256_set_epi64x(first + 1, of, first, of),
       _mm256_set_epi64x(2, 0, 2, 0))

static int64_t many_blocks(const __m128i *keys, uint64_t number, uint64_t block, uint8_t *out,
                           int64_t n) {
    int most = dpoptim_aes();
    if (most == WIDE_LEVEL) return wide_blocks(keys, number, block, out, n);
    return most == MIDDLE_LEVEL ? middle_blocks(keys, number, block, out, n) : 0;
}

void dpoptim_expand(const uint8_t *key, Keys *keys) { expand(key, (__m128i *)keys->rounds); }

void dpoptim_put_out(const Keys *expanded, uint64_t number, uint64_t place, uint8_t *out,
                     int64_t bytes) {
    const __m128i *keys = (const __m128i *)expanded->rounds;
    uint8_t part[BLOCK];
    uint64_t block = place / BLOCK, skipped = place % BLOCK;
    if (skipped && bytes) {
        int64_t taken = BLOCK - (int64_t)skipped < bytes ? BLOCK - (int64_t)skipped : bytes;
        few_blocks(keys, number, block++, part, 1);
        memcpy(out, part + skipped, taken);
        out += taken, bytes -= taken;
    }
    int64_t whole = bytes / BLOCK, done = many_blocks(keys, number, block, out, whole);
    while (done < whole) {
        int n = whole - done < AT_ONCE ? (int)(whole - done) : AT_ONCE;
        few_blocks(keys, number, block + done, out + BLOCK * done, n);
        done += n;
    }
    if (bytes % BLOCK) {
        few_blocks(keys, number, block + whole, part, 1);
        memcpy(out + BLOCK * whole, part, bytes % BLOCK);
    }
    dpoptim_clear(part, sizeof part);
}

#else

int dpoptim_aes(void) { return 0; }

void dpoptim_expand(const uint8_t *key, Keys *keys) { (void)key, (void)keys; }

void dpoptim_put_out(const Keys *keys, uint64_t number, uint64_t place, uint8_t *out,
                     int64_t bytes) {
    (void)keys, (void)number, (void)place, (void)out, (void)bytes;
}

#endif

void dpoptim_clear(void *memory, int64_t bytes) {
    memset(memory, 0, bytes);
    __asm__ volatile("" : : "r"(memory) : "memory"); /* or it would be left out */
}

void dpoptim_keystream(const uint8_t *key, uint64_t number, uint64_t place, uint8_t *out,
                       int64_t bytes) {
    Keys keys;
    dpoptim_expand(key, &keys);
    dpoptim_put_out(&keys, number, place, out, bytes);
    dpoptim_clear(&keys, sizeof keys);
}
