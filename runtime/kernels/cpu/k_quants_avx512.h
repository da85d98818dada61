// The K-quants for rows_avx512.cpp; see k_quants_template.h.

// Permutations use only the low four bits of each lane (five in unpack_q5_k), so they serve as
// tables from number to float without a mask.
inline __m512 first_floats() {
    return _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
}

inline void unpack_q4_k(const uint8_t* quants, Floats* w) {
    const __m512 table = first_floats();
    for (int v = 0; v < 2; ++v) {
        const __m512i bytes = dwords_of(quants + 16 * v);
        w[v] = _mm512_permutexvar_ps(bytes, table);
        w[v + 2] = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table);
    }
}

inline void unpack_q5_k(const uint8_t* quants, const uint8_t* bits, int part, Floats* w) {
    const __m512 table = first_floats(), upper = _mm512_add_ps(table, _mm512_set1_ps(16));
    const __m512i fifteen = _mm512_set1_epi32(15);
    for (int v = 0; v < 2; ++v) {
        const __m512i bytes = dwords_of(quants + 16 * v), above = dwords_of(bits + 16 * v);
        // fifteen ? bytes : shifted bits
        const __m512i low = _mm512_ternarylogic_epi32(fifteen, bytes, shifted(above, 4 - part), 0xca);
        const __m512i high = _mm512_ternarylogic_epi32(fifteen, _mm512_srli_epi32(bytes, 4),
                                                       shifted(above, 3 - part), 0xca);
        w[v] = _mm512_permutex2var_ps(table, low, upper);
        w[v + 2] = _mm512_permutex2var_ps(table, high, upper);
    }
}

#ifdef __AVX512VNNI__
#include "k_products_512.h"
#else
#include "k_products_256.h"
#endif
