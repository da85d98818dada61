// The K-quants for rows_avx2.cpp; see k_quants_template.h.

inline __m256i dwords_of(const uint8_t* p) { return _mm256_cvtepu8_epi32(load_8_bytes(p)); }
inline __m256i words_of(const uint8_t* p) { return _mm256_cvtepu8_epi16(load_16_bytes(p)); }

inline __m256i or_masked(__m256i a, __m256i b, __m256i mask) {
    return _mm256_or_si256(a, _mm256_and_si256(b, mask));
}

// Shifts non-negative numbers in lanes of 16 or 32 bits; numbers and results must fit into 16 bits.
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
        w[v + 4] = _mm256_cvtepi32_ps(
            or_masked(_mm256_srli_epi32(bytes, 4), shifted(above, 3 - part), fifth));
    }
}

inline void unpack_q6_k(const uint8_t* quants, const uint8_t* bits, int part, Floats* w) {
    const __m256i fifteen = _mm256_set1_epi32(15), mask = _mm256_set1_epi32(0x30);
    const __m256i middle = _mm256_set1_epi32(32);
    for (int v = 0; v < 4; ++v) {
        const __m256i bytes = dwords_of(quants + 8 * v), above = dwords_of(bits + 8 * v);
        const __m256i low =
            or_masked(_mm256_and_si256(bytes, fifteen), shifted(above, 4 - 2 * part), mask);
        const __m256i high =
            or_masked(_mm256_srli_epi32(bytes, 4), shifted(above, -2 * part), mask);
        w[v] = _mm256_cvtepi32_ps(_mm256_sub_epi32(low, middle));
        w[v + 4] = _mm256_cvtepi32_ps(_mm256_sub_epi32(high, middle));
    }
}

// Writes d*s times the scale of x to `factor`, and adds m*t times the sum of x to `minima`.
inline __m256 factors_with_x(const uint8_t* block, const SuperScales& x, float* factor,
                             __m256 minima) {
    const __m128i numbers = six_bit_numbers(block);
    const __m128 scales = four_f16(block);
    const __m256 d = _mm256_broadcastss_ps(scales);
    const __m256 m = _mm256_broadcastss_ps(_mm_movehdup_ps(scales));
    const __m256 s = floats_of_u8(numbers), t = floats_of_u8(_mm_srli_si128(numbers, 8));
    _mm256_store_ps(factor, mul(mul(s, d), _mm256_loadu_ps(x.scale)));
    return multiply_add(mul(t, m), _mm256_loadu_ps(x.sum), minima);
}

inline Floats add_part(Floats sum, __m256i first, __m256i second, const int16_t* x,
                       float factor) {
    const __m256i products =
        add_pairs(_mm256_madd_epi16(first, load_32_bytes(x)), second, load_32_bytes(x + 16));
    return multiply_add(_mm256_cvtepi32_ps(products), broadcast(factor), sum);
}

// For q4_K and q5_K. unpack(block, pair, half, low, high) gives 16 words each.
template <class Unpack>
inline float dot_with_minima(const uint8_t* row, int64_t block_bytes, int64_t n,
                             const uint8_t* packed, const uint8_t* next, const Unpack& unpack) {
    const int16_t* x = values_of(packed);
    const SuperScales* scales = super_scales_of(packed, n);
    Floats sum0 = zero(), sum1 = zero(), minima = zero();
    for (int64_t b = 0; b < n / 8; ++b, x += SUPER_BLOCK) {
        const uint8_t* block = row + b * block_bytes;
        for (int64_t line = 0; line < block_bytes; line += 64)
            __builtin_prefetch(next + b * block_bytes + line);
        alignas(32) float factor[8];
        minima = factors_with_x(block, scales[b], factor, minima);
#pragma GCC unroll 4
        for (int pair = 0; pair < 4; ++pair) {
            __m256i low[2], high[2];
            for (int half = 0; half < 2; ++half)
                unpack(block, pair, half, low[half], high[half]);
            sum0 = add_part(sum0, low[0], low[1], x + 64 * pair, factor[2 * pair]);
            sum1 = add_part(sum1, high[0], high[1], x + 64 * pair + 32, factor[2 * pair + 1]);
        }
    }
    return sum(_mm256_sub_ps(_mm256_add_ps(sum0, sum1), minima));
}

inline float dot_q4_k(const uint8_t* row, int64_t n, const uint8_t* x, const uint8_t* next) {
    auto unpack = [](const uint8_t* block, int pair, int half, __m256i& low, __m256i& high) {
        const __m256i words = words_of(block + 16 + 32 * pair + 16 * half);
        low = _mm256_and_si256(words, _mm256_set1_epi16(15));
        high = _mm256_srli_epi16(words, 4);
    };
    return dot_with_minima(row, 144, n, x, next, unpack);
}

inline float dot_q5_k(const uint8_t* row, int64_t n, const uint8_t* x, const uint8_t* next) {
    auto unpack = [](const uint8_t* block, int pair, int half, __m256i& low, __m256i& high) {
        const __m256i words = words_of(block + 48 + 32 * pair + 16 * half);
        const __m256i above = words_of(block + 16 + 16 * half), fifth = _mm256_set1_epi16(16);
        low = or_masked(_mm256_and_si256(words, _mm256_set1_epi16(15)),
                        shifted(above, 4 - 2 * pair), fifth);
        high = or_masked(_mm256_srli_epi16(words, 4), shifted(above, 3 - 2 * pair), fifth);
    };
    return dot_with_minima(row, 176, n, x, next, unpack);
}

inline float dot_q6_k(const uint8_t* row, int64_t n, const uint8_t* packed, const uint8_t* next) {
    const int16_t* x = values_of(packed);
    const SuperScales* scales = super_scales_of(packed, n);
    const __m256i fifteen = _mm256_set1_epi16(15), mask = _mm256_set1_epi16(0x30);
    const __m256i middle = _mm256_set1_epi16(32);
    Floats sum0 = zero(), sum1 = zero();
    for (int64_t b = 0; b < n / 8; ++b, x += SUPER_BLOCK) {
        const uint8_t* block = row + b * 210;
        for (int64_t line = 0; line < 210; line += 64) __builtin_prefetch(next + b * 210 + line);
        const __m256 d = _mm256_broadcastss_ps(scale_of_q6_k(block));
        const __m256 x_scale = _mm256_loadu_ps(scales[b].scale);
        alignas(32) float factor[16];  // of each half of a part: 0 2 4 ... and 1 3 5 ...
        const __m128i bytes = load_16_bytes(block + 192);
        const __m256i pairs = _mm256_cvtepi8_epi16(bytes);
        const __m256i even = _mm256_srai_epi32(_mm256_slli_epi32(pairs, 16), 16);
        _mm256_store_ps(factor, mul(mul(_mm256_cvtepi32_ps(even), d), x_scale));
        _mm256_store_ps(
            factor + 8,
            mul(mul(_mm256_cvtepi32_ps(_mm256_srai_epi32(pairs, 16)), d), x_scale));
#pragma GCC unroll 4
        for (int pair = 0; pair < 4; ++pair) {
            const int first = pair / 2 * 4 + pair % 2, second = first + 2;
            for (int half = 0; half < 2; ++half) {
                const __m256i words = words_of(block + 32 * pair + 16 * half);
                const __m256i above = words_of(block + 128 + pair / 2 * 32 + 16 * half);
                const __m256i low = or_masked(_mm256_and_si256(words, fifteen),
                                              shifted(above, 4 - pair % 2 * 2), mask);
                const __m256i high = or_masked(_mm256_srli_epi16(words, 4),
                                               shifted(above, -(pair % 2 * 2)), mask);
                const int16_t* at = x + 16 * half;
                const __m256i of_low = _mm256_madd_epi16(_mm256_sub_epi16(low, middle),
                                                         load_32_bytes(at + first * BLOCK));
                const __m256i of_high = _mm256_madd_epi16(_mm256_sub_epi16(high, middle),
                                                          load_32_bytes(at + second * BLOCK));
                sum0 = multiply_add(_mm256_cvtepi32_ps(of_low),
                                    broadcast(factor[8 * half + first]), sum0);
                sum1 = multiply_add(_mm256_cvtepi32_ps(of_high),
                                    broadcast(factor[8 * half + second]), sum1);
            }
        }
    }
    return sum(_mm256_add_ps(sum0, sum1));
}
