/* Digests pieces of memory, where they lie or in the same pass as it copies them: the memory is read once then, and the
 * digest is of the copy, whoever writes the source meanwhile.
 *
 * The digest is XXH3-128 with a seed, as xxHash 0.8 has it (Yann Collet, BSD 2-Clause; https://xxhash.com), for lengths
 * that are whole stripes and above 240 bytes. Seeds are BLAKE3's, keyed, of eight bytes each (J. O'Connor, J.-P. Aumasson,
 * S. Neves, Z. Wilcox-O'Hearn; https://github.com/BLAKE3-team/BLAKE3-specs). Those libraries' digests of the same bytes
 * are the same to the bit. */
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

enum { KEY_BYTES = 32, KEYED_WHOLE = 1 | 2 | 8 | 16 }; /* the first and last block of the one chunk, with a key */

static uint32_t turned(uint32_t word, int count)
{
    return word >> count | word << (32 - count);
}

static inline __attribute__((always_inline)) void mix(uint32_t *v, int a, int b, int c, int d, uint32_t x, uint32_t y)
{
    v[a] += v[b] + x, v[d] = turned(v[d] ^ v[a], 16), v[c] += v[d], v[b] = turned(v[b] ^ v[c], 12);
    v[a] += v[b] + y, v[d] = turned(v[d] ^ v[a], 8), v[c] += v[d], v[b] = turned(v[b] ^ v[c], 7);
}

/* Write the first eight bytes of BLAKE3 of each message of eight bytes, keyed. */
void kvstore_keyed_words_1(const char *key, uint64_t count, const char *messages, uint64_t *words)
{
    static const uint8_t next[16] = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};
    for (uint64_t i = 0; i < count; i++) {
        uint32_t block[16] = {0}, moved[16];
        uint32_t v[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0, 0, 8, KEYED_WHOLE};
        memcpy(block, messages + 8 * i, 8);
        memcpy(v, key, KEY_BYTES);
        for (int round = 0; round < 7; round++) {
            mix(v, 0, 4, 8, 12, block[0], block[1]), mix(v, 1, 5, 9, 13, block[2], block[3]);
            mix(v, 2, 6, 10, 14, block[4], block[5]), mix(v, 3, 7, 11, 15, block[6], block[7]);
            mix(v, 0, 5, 10, 15, block[8], block[9]), mix(v, 1, 6, 11, 12, block[10], block[11]);
            mix(v, 2, 7, 8, 13, block[12], block[13]), mix(v, 3, 4, 9, 14, block[14], block[15]);
            for (int j = 0; j < 16; j++)
                moved[j] = block[next[j]];
            memcpy(block, moved, sizeof block);
        }
        words[i] = (uint64_t)(v[1] ^ v[9]) << 32 | (v[0] ^ v[8]);
    }
}

#define AVX2 __attribute__((target("avx2")))

enum { STRIPE = 64, STRIPES = 16, SECRET_WORDS = 24, AHEAD = 512 }; /* STRIPES: those between two mixings */

static const uint64_t SECRET[SECRET_WORDS] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072, 0x78e5c0cc4ee679cb,
    0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0, 0xcb00c391bb52283c, 0xa32e531b8b65d088,
    0x4ef90da297486471, 0xd8acdea946ef1938, 0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a,
    0x647378d9c97e9fc8, 0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
};
static const uint32_t PRIME32_1 = 0x9E3779B1, PRIME32_2 = 0x85EBCA77, PRIME32_3 = 0xC2B2AE3D;
static const uint64_t PRIME64_1 = 0x9E3779B185EBCA87, PRIME64_2 = 0xC2B2AE3D27D4EB4F, PRIME64_3 = 0x165667B19E3779F9;
static const uint64_t PRIME64_4 = 0x85EBCA77C2B2AE63, PRIME64_5 = 0x27D4EB2F165667C5, PRIME_MX1 = 0x165667919E3779F9;

static uint64_t word_at(const char *bytes)
{
    uint64_t word;
    memcpy(&word, bytes, 8);
    return word;
}

static uint64_t folded(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t merged(const uint64_t *sums, const char *secret, uint64_t start)
{
    for (int i = 0; i < 4; i++)
        start += folded(sums[2 * i] ^ word_at(secret + 16 * i), sums[2 * i + 1] ^ word_at(secret + 16 * i + 8));
    start = (start ^ start >> 37) * PRIME_MX1;
    return start ^ start >> 32;
}

AVX2 static inline __m256i added(__m256i sum, __m256i data, __m256i secret)
{
    __m256i key = _mm256_xor_si256(data, secret);
    __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
    return _mm256_add_epi64(sum, _mm256_add_epi64(product, _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2))));
}

AVX2 static inline __m256i mixed(__m256i sum, __m256i secret)
{
    __m256i value = _mm256_xor_si256(_mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47)), secret);
    __m256i prime = _mm256_set1_epi32((int)PRIME32_1), high = _mm256_mul_epu32(_mm256_srli_epi64(value, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(value, prime), _mm256_slli_epi64(high, 32));
}

enum { STORES, STREAMS, DIGESTS }; /* ways to write a copy: into the caches, past them, or not at all */

AVX2 static inline void copy_stripe(
    char *target, const char *source, const char *secret, __m256i *low, __m256i *high, int way)
{
    __m256i first = _mm256_loadu_si256((const __m256i *)source), second = _mm256_loadu_si256((const __m256i *)source + 1);
    __asm__ volatile("" : "+x"(first), "+x"(second)); /* no compiler may read the source again: it may be another's */
    if (way == STREAMS) { /* see copy_row in copies.c */
        _mm_prefetch(source + AHEAD, _MM_HINT_NTA);
        _mm256_stream_si256((__m256i *)target, first);
        _mm256_stream_si256((__m256i *)target + 1, second);
    } else if (way == STORES) {
        _mm256_storeu_si256((__m256i *)target, first);
        _mm256_storeu_si256((__m256i *)target + 1, second);
    }
    *low = added(*low, first, _mm256_loadu_si256((const __m256i *)secret));
    *high = added(*high, second, _mm256_loadu_si256((const __m256i *)secret + 1));
}

AVX2 static inline __attribute__((always_inline)) void copy_piece(
    char *target, const char *source, uint64_t count, uint64_t seed, unsigned char *digest, int way)
{
    uint64_t words[SECRET_WORDS];
    uint64_t sums[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    const char *secret = (const char *)words, *last = secret + sizeof words - STRIPE;
    for (int i = 0; i < SECRET_WORDS; i += 2)
        words[i] = SECRET[i] + seed, words[i + 1] = SECRET[i + 1] - seed;
    __m256i low = _mm256_loadu_si256((const __m256i *)sums), high = _mm256_loadu_si256((const __m256i *)sums + 1);
    uint64_t left = count / STRIPE;
    for (; left > STRIPES; left -= STRIPES) {
        for (int i = 0; i < STRIPES; i++, target += STRIPE, source += STRIPE)
            copy_stripe(target, source, secret + 8 * i, &low, &high, way);
        low = mixed(low, _mm256_loadu_si256((const __m256i *)last));
        high = mixed(high, _mm256_loadu_si256((const __m256i *)last + 1));
    }
    for (; left > 1; left--, target += STRIPE, source += STRIPE, secret += 8)
        copy_stripe(target, source, secret, &low, &high, way);
    copy_stripe(target, source, last - 7, &low, &high, way);
    _mm256_storeu_si256((__m256i *)sums, low);
    _mm256_storeu_si256((__m256i *)sums + 1, high);
    secret = (const char *)words;
    uint64_t low_half = __builtin_bswap64(merged(sums, secret + 11, count * PRIME64_1));
    uint64_t high_half = __builtin_bswap64(merged(sums, last - 11, ~(count * PRIME64_2)));
    memcpy(digest, &high_half, 8);
    memcpy(digest + 8, &low_half, 8);
}

/* Return 1 where this processor can do it. */
int kvstore_checks_1(void)
{
    return __builtin_cpu_supports("avx2") != 0;
}

/* Copy ``piece_count`` pieces from ``starts[i]`` to ``stops[i]`` of the source to the same place of the target, and write
 * their digests, 16 bytes each. All lengths are whole stripes above 240 bytes. Where all targets are at addresses of
 * whole stripes, ``streams`` may be 1. */
AVX2 void kvstore_copy_checked_1(
    char *target, const char *source, uint64_t piece_count, const int64_t *starts, const int64_t *stops,
    const uint64_t *seeds, unsigned char *digests, uint64_t streams)
{
    for (uint64_t i = 0; i < piece_count; i++) {
        char *to = target + starts[i];
        const char *from = source + starts[i];
        uint64_t count = (uint64_t)(stops[i] - starts[i]);
        if (streams)
            copy_piece(to, from, count, seeds[i], digests + 16 * i, STREAMS);
        else
            copy_piece(to, from, count, seeds[i], digests + 16 * i, STORES);
    }
    _mm_sfence(); /* streaming stores are not ordered with what this thread does next */
}

/* Write the digests of ``piece_count`` pieces where they lie. Lengths are as for a copy. */
AVX2 void kvstore_digest_1(
    char *data, uint64_t piece_count, const int64_t *starts, const int64_t *stops, const uint64_t *seeds,
    unsigned char *digests)
{
    for (uint64_t i = 0; i < piece_count; i++) {
        char *piece = data + starts[i];
        copy_piece(piece, piece, (uint64_t)(stops[i] - starts[i]), seeds[i], digests + 16 * i, DIGESTS);
    }
}

#else

int kvstore_checks_1(void)
{
    return 0;
}

#endif
