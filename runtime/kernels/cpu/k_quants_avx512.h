// The K-quants for rows_avx512.cpp; see k_quants_template.h.

inline __m512i dwords_of(const uint8_t* p) { return _mm512_cvtepu8_epi32(load_16_bytes(p)); }
inline __m512i words_of(const uint8_t* p) { return _mm512_cvtepu8_epi16(load_32_bytes(p)); }

// a | (b & mask)
inline __m512i or_masked(__m512i a, __m512i b, __m512i mask) {
    return _mm512_ternarylogic_epi32(a, b, mask, 0xf8);
}

inline __m512i shifted_words(__m512i words, int left) {
    return left < 0 ? _mm512_srli_epi16(words, -left) : _mm512_slli_epi16(words, left);
}

inline __m512i shifted_dwords(__m512i dwords, int left) {
    return left < 0 ? _mm512_srli_epi32(dwords, -left) : _mm512_slli_epi32(dwords, left);
}

// Permutations use only the low four bits of each lane (five in unpack_q5_k), so they serve as tables
// from number to float without a mask.
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
        const __m512i low = _mm512_ternarylogic_epi32(fifteen, bytes,
                                                      shifted_dwords(above, 4 - part), 0xca);
        const __m512i high = _mm512_ternarylogic_epi32(fifteen, _mm512_srli_epi32(bytes, 4),
                                                       shifted_dwords(above, 3 - part), 0xca);
        w[v] = _mm512_permutex2var_ps(table, low, upper);
        w[v + 2] = _mm512_permutex2var_ps(table, high, upper);
    }
}

inline void unpack_q6_k(const uint8_t* quants, const uint8_t* bits, int part, Floats* w) {
    const __m512i fifteen = _mm512_set1_epi32(15), mask = _mm512_set1_epi32(0x30);
    const __m512i middle = _mm512_set1_epi32(32);
    for (int v = 0; v < 2; ++v) {
        const __m512i bytes = dwords_of(quants + 16 * v), above = dwords_of(bits + 16 * v);
        const __m512i low = or_masked(_mm512_and_si512(bytes, fifteen),
                                      shifted_dwords(above, 4 - 2 * part), mask);
        const __m512i high =
            or_masked(_mm512_srli_epi32(bytes, 4), shifted_dwords(above, -2 * part), mask);
        w[v] = _mm512_cvtepi32_ps(_mm512_sub_epi32(low, middle));
        w[v + 2] = _mm512_cvtepi32_ps(_mm512_sub_epi32(high, middle));
    }
}

// Factors and offsets of a block's products: d*s times the scale of x in the lower half of the
// vector, m*t times the sum of x in the upper half.
inline __m512 factors_with_x(const uint8_t* block, const SuperScales& x) {
    const __m512i halves = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m512 scales =
        _mm512_permutexvar_ps(halves, _mm512_castps128_ps512(four_f16(block)));
    const __m512 floats = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(six_bit_numbers(block)));
    return mul(mul(floats, scales), _mm512_loadu_ps(x.scale));
}
static_assert(sizeof(SuperScales) == 64, "scales and sums are loaded as one vector");

inline Floats add_part(Floats sum, __m512i words, const int16_t* x, __m512 factor) {
    return add_products(sum, _mm512_madd_epi16(words, load_64_bytes(x)), factor);
}

// For q4_K and q5_K. unpack(block, pair, low, high) gives 32 words each.
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
        alignas(64) float factor[16];
        const __m512 factors = factors_with_x(block, scales[b]);
        _mm512_store_ps(factor, factors);
        keep_in_memory(factor);
        minima = _mm512_add_ps(minima, factors);
#pragma GCC unroll 4
        for (int pair = 0; pair < 4; ++pair) {
            __m512i low, high;
            unpack(block, pair, low, high);
            sum0 = add_part(sum0, low, x + 64 * pair, broadcast(factor[2 * pair]));
            sum1 = add_part(sum1, high, x + 64 * pair + 32, broadcast(factor[2 * pair + 1]));
        }
    }
    return sum(_mm512_add_ps(sum0, sum1)) - _mm512_mask_reduce_add_ps(0xff00, minima);
}

inline float dot_q4_k(const uint8_t* row, int64_t n, const uint8_t* x, const uint8_t* next) {
    auto unpack = [](const uint8_t* block, int pair, __m512i& low, __m512i& high) {
        const __m512i words = words_of(block + 16 + 32 * pair);
        low = _mm512_and_si512(words, _mm512_set1_epi16(15));
        high = _mm512_srli_epi16(words, 4);
    };
    return dot_with_minima(row, 144, n, x, next, unpack);
}

inline float dot_q5_k(const uint8_t* row, int64_t n, const uint8_t* x, const uint8_t* next) {
    auto unpack = [](const uint8_t* block, int pair, __m512i& low, __m512i& high) {
        const __m512i words = words_of(block + 48 + 32 * pair), above = words_of(block + 16);
        const __m512i fifth = _mm512_set1_epi16(16);
        low = or_masked(_mm512_and_si512(words, _mm512_set1_epi16(15)),
                        shifted_words(above, 4 - 2 * pair), fifth);
        high = or_masked(_mm512_srli_epi16(words, 4), shifted_words(above, 3 - 2 * pair), fifth);
    };
    return dot_with_minima(row, 176, n, x, next, unpack);
}

inline float dot_q6_k(const uint8_t* row, int64_t n, const uint8_t* packed, const uint8_t* next) {
    const int16_t* x = values_of(packed);
    const SuperScales* scales = super_scales_of(packed, n);
    const __m512i fifteen = _mm512_set1_epi16(15), mask = _mm512_set1_epi16(0x30);
    const __m512i middle = _mm512_set1_epi16(32);
    const __m512i twice = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    const __m512i halves = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    Floats sum0 = zero(), sum1 = zero();
    for (int64_t b = 0; b < n / 8; ++b, x += SUPER_BLOCK) {
        const uint8_t* block = row + b * 210;
        for (int64_t line = 0; line < 210; line += 64) __builtin_prefetch(next + b * 210 + line);
        const __m512 d = _mm512_broadcastss_ps(scale_of_q6_k(block));
        const __m512 x_scale =
            _mm512_permutexvar_ps(twice, _mm512_loadu_ps(scales[b].scale));
        const __m512 factors =
            mul(mul(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16_bytes(block + 192))), d),
                x_scale);
#pragma GCC unroll 4
        for (int pair = 0; pair < 4; ++pair) {
            const int first = pair / 2 * 4 + pair % 2, second = first + 2;
            const __m512i words = words_of(block + 32 * pair);
            const __m512i above = words_of(block + 128 + pair / 2 * 32);
            const __m512i low = or_masked(_mm512_and_si512(words, fifteen),
                                          shifted_words(above, 4 - pair % 2 * 2), mask);
            const __m512i high = or_masked(_mm512_srli_epi16(words, 4),
                                           shifted_words(above, -(pair % 2 * 2)), mask);
            const __m512i at = _mm512_add_epi32(halves, _mm512_set1_epi32(2 * first));
            sum0 = add_part(sum0, _mm512_sub_epi16(low, middle), x + first * BLOCK,
                            _mm512_permutexvar_ps(at, factors));
            sum1 = add_part(sum1, _mm512_sub_epi16(high, middle), x + second * BLOCK,
                            _mm512_permutexvar_ps(_mm512_add_epi32(at, _mm512_set1_epi32(4)),
                                                  factors));
        }
    }
    return sum(_mm512_add_ps(sum0, sum1));
}
