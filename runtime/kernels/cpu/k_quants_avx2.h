// The K-quants for rows_avx2.cpp; see k_quants_template.h.

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

#include "k_products_256.h"
