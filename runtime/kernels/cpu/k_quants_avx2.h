// The K-quants for rows_avx2.cpp; see k_quants_template.h.

inline __m256i dwords_of(const uint8_t* p) { return _mm256_cvtepu8_epi32(load_8_bytes(p)); }

inline __m256i or_masked(__m256i a, __m256i b, __m256i mask) {
    return _mm256_or_si256(a, _mm256_and_si256(b, mask));
}

// Shifts non-negative numbers left, or right if `left` is negative. Lanes have 16 or 32 bits;
// numbers and results must fit into 16 bits.
inline __m256i shifted(__m256i numbers, int left) {
    return left < 0 ? _mm256_srli_epi16(numbers, -left) : _mm256_slli_epi16(numbers, left);
}

inline void unpack_q4_k(const uint8_t* quants, Floats* w) {
    const __m256i fifteen = _mm256_set1_epi32(15);
    for (int v = 0; v < 4; ++v) {
        const __m256i bytes = dwords_of(quants + 8 * v);
        w[v] = _mm256_cvtepi32_ps(_mm256_and_si256(bytes, fifteen));
        w[v + 4] = _mm256_cvtepi32_ps(_mm256_srli_epi32(bytes, 4));
    }
}

inline void unpack_q5_k(const uint8_t* quants, const uint8_t* bits, int part, Floats* w) {
    const __m256i fifteen = _mm256_set1_epi32(15), fifth = _mm256_set1_epi32(16);
    for (int v = 0; v < 4; ++v) {
        const __m256i bytes = dwords_of(quants + 8 * v), above = dwords_of(bits + 8 * v);
        w[v] = _mm256_cvtepi32_ps(
            or_masked(_mm256_and_si256(bytes, fifteen), shifted(above, 4 - part), fifth));
        w[v + 4] =
            _mm256_cvtepi32_ps(or_masked(_mm256_srli_epi32(bytes, 4), shifted(above, 3 - part), fifth));
    }
}

inline void unpack_q6_k(const uint8_t* quants, const uint8_t* bits, int part, Floats* w) {
    const __m256i fifteen = _mm256_set1_epi32(15), mask = _mm256_set1_epi32(0x30);
    const __m256i middle = _mm256_set1_epi32(32);
    for (int v = 0; v < 4; ++v) {
        const __m256i bytes = dwords_of(quants + 8 * v), above = dwords_of(bits + 8 * v);
        const __m256i low =
            or_masked(_mm256_and_si256(bytes, fifteen), shifted(above, 4 - 2 * part), mask);
        const __m256i high = or_masked(_mm256_srli_epi32(bytes, 4), shifted(above, -2 * part), mask);
        w[v] = _mm256_cvtepi32_ps(_mm256_sub_epi32(low, middle));
        w[v + 4] = _mm256_cvtepi32_ps(_mm256_sub_epi32(high, middle));
    }
}

#include "k_products_256.h"
