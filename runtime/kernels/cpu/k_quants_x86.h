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

inline void unpack_q6_k(const uint8_t* quants, const uint8_t* upper, int part, Floats* w) {
    const Bits mask = MM(set1_epi32)(0x30);
    for (int v = 0; v < BLOCK / LANES; ++v) {
        const Bits bytes = dwords_of(quants + LANES * v), above = dwords_of(upper + LANES * v);
        const Bits nibbles = bits(ints(bytes) & 15);
        const Bits low = or_masked(nibbles, shifted(above, 4 - 2 * part), mask);
        const Bits high = or_masked(MM(srli_epi32)(bytes, 4), shifted(above, -2 * part), mask);
        w[v] = to_floats(ints(low) - 32);
        w[v + BLOCK / LANES] = to_floats(ints(high) - 32);
    }
}
