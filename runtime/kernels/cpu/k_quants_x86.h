// K-quant code shared by AVX2 and AVX-512; see k_quants_template.h.

inline __m256 floats_of_u8(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)); }

inline __m256 floats_of_i8(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)); }

// The 6-bit numbers of a q4_K or q5_K block as bytes: eight scales, then eight minima. The first
// four of each are the low six bits of bytes 0-3 and 4-7 of the twelve; the others are in the
// nibbles of bytes 8-11, with their upper two bits at the top of bytes 0-3 and 4-7.
inline __m128i six_bit_numbers(const uint8_t* block) {
    const __m128i bits = load_16_bytes(block + 4);  // the 12 bytes, and four more
    const __m128i low =
        _mm_srlv_epi32(_mm_shuffle_epi32(bits, _MM_SHUFFLE(2, 1, 2, 0)), _mm_set_epi32(4, 0, 0, 0));
    const __m128i high = _mm_srli_epi32(_mm_shuffle_epi32(bits, _MM_SHUFFLE(1, 1, 0, 0)), 2);
    const __m128i low_mask = _mm_set_epi32(0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f);
    const __m128i high_mask = _mm_set_epi32(0x30303030, 0, 0x30303030, 0);
    return _mm_or_si128(_mm_and_si128(low, low_mask), _mm_and_si128(high, high_mask));
}

inline void factors_with_minima(const uint8_t* block, float c, float* factor, float* minimum) {
    const __m128i numbers = six_bit_numbers(block);
    const __m128 scales = _mm_mul_ps(four_f16(block), _mm_set1_ps(c));  // d*c, m*c
    _mm256_storeu_ps(factor, _mm256_mul_ps(floats_of_u8(numbers), _mm256_broadcastss_ps(scales)));
    _mm256_storeu_ps(minimum, _mm256_mul_ps(floats_of_u8(_mm_srli_si128(numbers, 8)),
                                            _mm256_broadcastss_ps(_mm_movehdup_ps(scales))));
}

// The scale of a q6_K block in every lane; loads the eight bytes that end with it.
inline __m128 scale_of_q6_k(const uint8_t* block) {
    return _mm_permute_ps(four_f16(block + 202), 0xff);
}

inline void factors_of_q6_k(const uint8_t* block, float c, float* factor) {
    const __m128i scales = load_16_bytes(block + 192);
    const __m256 d = _mm256_broadcastss_ps(_mm_mul_ps(scale_of_q6_k(block), _mm_set1_ps(c)));
    _mm256_storeu_ps(factor, _mm256_mul_ps(floats_of_i8(scales), d));
    _mm256_storeu_ps(factor + 8, _mm256_mul_ps(floats_of_i8(_mm_srli_si128(scales, 8)), d));
}

// a | (b & mask)
inline Bits or_masked(Bits a, Bits b, Bits mask) {
#ifdef LEVEL_AVX512
    return _mm512_ternarylogic_epi32(a, b, mask, 0xf8);
#else
    return _mm256_or_si256(a, _mm256_and_si256(b, mask));
#endif
}

// Shifts non-negative 32-bit numbers left, or right if `left` is negative.
inline Bits shifted(Bits dwords, int left) {
    return left < 0 ? MM(srli_epi32)(dwords, -left) : MM(slli_epi32)(dwords, left);
}

#ifdef LEVEL_AVX512
// Permutations use only the low four bits of each lane (five for q5_K), so they serve as tables from number to float
// without a mask.
inline __m512 first_floats() {
    return _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
}
#endif

template <class F>
inline void unpack_pair(const uint8_t* block, int pair, Floats* w) {
    const uint8_t* quants = block + F::QUANTS_AT + 32 * pair;
    const uint8_t* upper = block + F::BITS_AT + (F::BITS_BYTES == 64 ? pair / 2 * 32 : 0);
    const int place = F::BITS_BYTES == 64 ? pair % 2 * 2 : pair * 2;  // of the first part's bits
    const Bits fifteen = MM(set1_epi32)(15), mask = MM(set1_epi32)(F::BITS_BYTES == 64 ? 0x30 : 0x10);
    for (int v = 0; v < BLOCK / LANES; ++v) {
        const Bits bytes = dwords_of(quants + LANES * v), nibbles = MM(srli_epi32)(bytes, 4);
        Floats &low = w[v], &high = w[v + BLOCK / LANES];
#ifdef LEVEL_AVX512
        if constexpr (F::BITS_BYTES == 0) {
            low = _mm512_permutexvar_ps(bytes, first_floats());
            high = _mm512_permutexvar_ps(nibbles, first_floats());
            continue;
        } else if constexpr (F::BITS_BYTES == 32) {
            const Bits above = dwords_of(upper + LANES * v);
            const __m512 more = _mm512_add_ps(first_floats(), _mm512_set1_ps(16));
            // fifteen ? nibbles : shifted bits
            const Bits both[2] = {
                _mm512_ternarylogic_epi32(fifteen, bytes, shifted(above, 4 - place), 0xca),
                _mm512_ternarylogic_epi32(fifteen, nibbles, shifted(above, 3 - place), 0xca)};
            low = _mm512_permutex2var_ps(first_floats(), both[0], more);
            high = _mm512_permutex2var_ps(first_floats(), both[1], more);
            continue;
        }
#endif
        Ints first = ints(bytes) & ints(fifteen), second = ints(nibbles);
        if constexpr (F::BITS_BYTES > 0) {
            const Bits above = dwords_of(upper + LANES * v);
            const int left = F::BITS_BYTES == 64 ? -place : 3 - place;
            first = ints(or_masked(bits(first), shifted(above, 4 - place), mask));
            second = ints(or_masked(nibbles, shifted(above, left), mask));
        }
        constexpr int32_t MIDDLE = F::BITS_BYTES == 64 ? 32 : 0;
        low = to_floats(first - MIDDLE), high = to_floats(second - MIDDLE);
    }
}

#if defined(LEVEL_AVX512) && defined(__AVX512VNNI__)
#include "k_products_512.h"
#else
#include "k_products_256.h"
#endif
