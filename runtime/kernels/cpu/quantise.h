// Quantises blocks of a vector, see Input in kernels.h. Included inside the anonymous namespace of
// each rows_<level>.cpp, as rows_template.h is.

constexpr float LARGEST = 32639.0f;  // of a block's quantised values

// Plain loops that the compiler vectorises: the bits of non-negative floats, read as integers, have the
// same order as the floats, and adding 1.5 * 2^23 rounds to the nearest integer.
inline void quantise_block(const float* x, int16_t* value, float* scale) {
    uint32_t largest_bits = 0;
    for (int i = 0; i < BLOCK; ++i) {
        uint32_t bits;
        __builtin_memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        largest_bits = largest_bits > bits ? largest_bits : bits;
    }
    float largest;
    __builtin_memcpy(&largest, &largest_bits, 4);
    const bool is_finite = largest_bits < 0x7f800000, is_zero = largest < 1e-30f;
    *scale = !is_finite ? __builtin_nanf("") : is_zero ? 0.0f : largest / LARGEST;
    const float factor = !is_finite || is_zero ? 0.0f : LARGEST / largest;
    for (int i = 0; i < BLOCK; ++i) {
        const float shifted = (is_finite ? x[i] * factor : 0.0f) + 12582912.0f;
        int32_t bits;
        __builtin_memcpy(&bits, &shifted, 4);
        value[i] = static_cast<int16_t>(bits - 0x4b400000);
    }
}

inline int32_t total_of(const int16_t* value, int64_t n) {
    int32_t total = 0;
    for (int64_t i = 0; i < n; ++i) total += value[i];
    return total;
}

// Quantises four blocks: their values, scales, sums of values, and sums of the first half of them.
#ifdef LEVEL_AVX512
// Lane i is op over the lanes of v[i].
template <class Op>
inline __m128i over_each(const __m128i* v, const Op& op) {
    const __m128i ab = op(_mm_unpacklo_epi32(v[0], v[1]), _mm_unpackhi_epi32(v[0], v[1]));
    const __m128i cd = op(_mm_unpacklo_epi32(v[2], v[3]), _mm_unpackhi_epi32(v[2], v[3]));
    return op(_mm_unpacklo_epi64(ab, cd), _mm_unpackhi_epi64(ab, cd));
}

inline __m128i largest_of_quarters(__m512i v) {
    const __m256i half = _mm256_max_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
    return _mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

inline __m128i sum_of_quarters(__m512i v) {
    const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

inline void quantise_four(const float* x, int16_t* value, float* scale, int32_t* sum,
                          int32_t* first_sum) {
    const __m512i without_sign = _mm512_set1_epi32(0x7fffffff);
    __m128i quarters[4], last[4];
    for (int b = 0; b < 4; ++b) {
        const __m512i first = _mm512_and_si512(_mm512_loadu_si512(x + b * BLOCK), without_sign);
        const __m512i second = _mm512_and_si512(_mm512_loadu_si512(x + b * BLOCK + 16), without_sign);
        quarters[b] = largest_of_quarters(_mm512_max_epi32(first, second));
    }
    const __m128i bits = over_each(quarters, [](__m128i a, __m128i b) { return _mm_max_epi32(a, b); });
    const __m128 largest = _mm_castsi128_ps(bits), most = _mm_set1_ps(LARGEST);
    const __mmask8 is_finite = _mm_cmplt_epi32_mask(bits, _mm_set1_epi32(0x7f800000));
    const __mmask8 is_used = is_finite & ~_mm_cmp_ps_mask(largest, _mm_set1_ps(1e-30f), _CMP_LT_OQ);
    _mm_storeu_ps(scale, _mm_mask_blend_ps(is_finite, _mm_set1_ps(__builtin_nanf("")),
                                           _mm_maskz_div_ps(is_used, largest, most)));
    const __m512 factor = _mm512_broadcast_f32x4(_mm_maskz_div_ps(is_used, most, largest));
    for (int b = 0; b < 4; ++b) {
        const __m512 by = _mm512_permutexvar_ps(_mm512_set1_epi32(b), factor);
        const __mmask16 valid = is_finite >> b & 1 ? 0xffff : 0;
        __m512i half[2];
        for (int i = 0; i < 2; ++i) {
            const __m512 scaled =
                _mm512_maskz_mul_ps(valid, _mm512_loadu_ps(x + b * BLOCK + 16 * i), by);
            const __m512i shifted =
                _mm512_castps_si512(_mm512_add_ps(scaled, _mm512_set1_ps(12582912.0f)));
            half[i] = _mm512_sub_epi32(shifted, _mm512_set1_epi32(0x4b400000));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(value + b * BLOCK + 16 * i),
                                _mm512_cvtepi32_epi16(half[i]));
        }
        quarters[b] = sum_of_quarters(half[0]), last[b] = sum_of_quarters(half[1]);
    }
    auto add = [](__m128i a, __m128i b) { return _mm_add_epi32(a, b); };
    const __m128i firsts = over_each(quarters, add);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(first_sum), firsts);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(sum), _mm_add_epi32(firsts, over_each(last, add)));
}
#else
inline void quantise_four(const float* x, int16_t* value, float* scale, int32_t* sum,
                          int32_t* first_sum) {
    for (int b = 0; b < 4; ++b, x += BLOCK, value += BLOCK) {
        quantise_block(x, value, scale + b);
        sum[b] = total_of(value, BLOCK);
        first_sum[b] = total_of(value, BLOCK / 2);
    }
}
#endif
