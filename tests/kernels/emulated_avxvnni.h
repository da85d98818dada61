// The instructions of AVX-VNNI that the kernels use, in AVX2, for a processor without them: compile a source with
// -include of this file and without -mavxvnni. If emulated_error is set, one sum of each instruction is wrong.
#pragma once
#include <immintrin.h>

#define __AVXVNNI__ 1

inline bool emulated_error = false;

inline __m256i emulated_sum(__m256i sum, __m256i products) {
    const __m256i wrong = _mm256_insert_epi32(_mm256_setzero_si256(), emulated_error, 3);
    return _mm256_add_epi32(_mm256_add_epi32(sum, products), wrong);
}

// Adds to each 32-bit sum the four products of its unsigned bytes of `a` and signed bytes of `b`, exactly.
inline __m256i emulated_dpbusd(__m256i sum, __m256i a, __m256i b) {
    const __m256i low_bytes = _mm256_set1_epi16(255);
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, low_bytes),
                                           _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
    return emulated_sum(sum, _mm256_add_epi32(even, odd));
}

// Adds the two products of its signed 16-bit numbers, modulo 2^32.
inline __m256i emulated_dpwssd(__m256i sum, __m256i a, __m256i b) {
    return emulated_sum(sum, _mm256_madd_epi16(a, b));
}

#define _mm256_dpbusd_avx_epi32 emulated_dpbusd
#define _mm256_dpwssd_avx_epi32 emulated_dpwssd
