// Integer products of four bytes at a time (AVX-VNNI), for blocks_template.h; see blocks_vnni.h.
// Packed x of a block: 32 high bytes, then 32 low ones.

#include "blocks_bytes.h"

template <class F>
constexpr int64_t unit() {
    return 1;
}

template <class F>
inline void quantise_unit(const int16_t* value, uint8_t* to) {
    for (int half = 0; half < 2; ++half) {
        const __m256i values = load_32_bytes(value + 16 * half);
        const __m256i high = _mm256_srai_epi16(_mm256_add_epi16(values, _mm256_set1_epi16(128)), 8);
        const __m256i low = _mm256_sub_epi16(values, _mm256_slli_epi16(high, 8));
        const __m256i bytes =  // packs gives high 0-7, low 0-7, high 8-15, low 8-15
            _mm256_permute4x64_epi64(_mm256_packs_epi16(high, low), 0xd8);
        __builtin_memcpy(to + 16 * half, &bytes, 16);
        __builtin_memcpy(to + 32 + 16 * half, reinterpret_cast<const uint8_t*>(&bytes) + 16, 16);
    }
}

// 256 * (w . high) + w . low, eight sums
inline __m256i both_planes(__m256i w, const uint8_t* x) {
    const __m256i upper = _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), w, load_32_bytes(x));
    return _mm256_dpbusd_avx_epi32(_mm256_slli_epi32(upper, 8), w, load_32_bytes(x + 32));
}

template <class F>
inline Ints products_of(const uint8_t* block, const uint8_t* x) {
    __m256i w;
    if constexpr (F::HAS_NIBBLES) {
        const __m256i nibbles = _mm256_broadcastsi128_si256(load_16_bytes(block));
        const __m256i places = _mm256_set_epi32(4, 4, 4, 4, 0, 0, 0, 0);
        w = _mm256_and_si256(_mm256_srlv_epi32(nibbles, places), _mm256_set1_epi8(15));
    } else {
        w = _mm256_xor_si256(load_32_bytes(block), _mm256_set1_epi8(-128));
    }
    return ints(both_planes(w, x));
}

#include "blocks_few.h"

inline __m256i four_bytes(const uint8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}

constexpr int TILES_AT_ONCE = 1;

template <class F, int FIRST = 0, int END = 8>
inline Ints tile_products(const Ints* w, const uint8_t* x, int64_t, Ints start) {
    __m256i high = _mm256_setzero_si256(), low = bits(start);
#pragma GCC unroll 8
    for (int v = FIRST; v < END; ++v) {
        high = _mm256_dpbusd_avx_epi32(high, bits(w[v]), four_bytes(x + 4 * v));
        low = _mm256_dpbusd_avx_epi32(low, bits(w[v]), four_bytes(x + 32 + 4 * v));
    }
    return ints(_mm256_add_epi32(_mm256_slli_epi32(high, 8), low));
}
