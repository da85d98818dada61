// Products of one K-quant row with one input, in 32-byte vectors (level avx512 multiplies in 64-byte
// ones). For the levels avx2, avxvnni and avx512; see k_products.h.

constexpr int SUPER_ROWS = 1;
typedef __m256 SuperSums;

inline __m256i masked(__m256i v, char mask) { return _mm256_and_si256(v, _mm256_set1_epi8(mask)); }

// part[p] = the 32 unsigned quants of part p; q6_K's 32 is not yet subtracted.
template <class F>
inline void parts_of(const uint8_t* block, __m256i* part) {
#pragma GCC unroll 4
    for (int pair = 0; pair < 4; ++pair) {
        const __m256i quants = load_32_bytes(block + F::QUANTS_AT + 32 * pair);
        __m256i low = masked(quants, 15), high = masked(_mm256_srli_epi16(quants, 4), 15);
        if constexpr (F::BITS_BYTES == 32) {
            const __m256i above = _mm256_srli_epi16(load_32_bytes(block + F::BITS_AT), 2 * pair);
            low = _mm256_or_si256(low, _mm256_slli_epi16(masked(above, 1), 4));
            high = _mm256_or_si256(high, _mm256_slli_epi16(masked(above, 2), 3));
        } else if constexpr (F::BITS_BYTES == 64) {
            const __m256i above =
                _mm256_srli_epi16(load_32_bytes(block + F::BITS_AT + pair / 2 * 32), pair % 2 * 2);
            low = _mm256_or_si256(low, _mm256_slli_epi16(masked(above, 3), 4));
            high = _mm256_or_si256(high, masked(above, 0x30));
        }
        part[F::parts(pair).first] = low, part[F::parts(pair).second] = high;
    }
}

inline __m256i lower_lanes(__m256i a, __m256i b) { return _mm256_permute2x128_si256(a, b, 0x20); }
inline __m256i upper_lanes(__m256i a, __m256i b) { return _mm256_permute2x128_si256(a, b, 0x31); }

// Sums the four 32-bit values in each half of v[i]: out[0] has the sums of v[0 .. 3], out[1] those of
// v[4 .. 7], in each the four of the lower halves first.
inline void sums_in_lanes(const __m256i* v, __m256i* out) {
    for (int i = 0; i < 2; ++i)
        out[i] = _mm256_hadd_epi32(_mm256_hadd_epi32(v[4 * i], v[4 * i + 1]),
                                   _mm256_hadd_epi32(v[4 * i + 2], v[4 * i + 3]));
}

// Eight integer products with x each: `first` of the parts' first sixteen values, `last` of their last
// sixteen.
inline void products_of_halves(const __m256i* part, const SuperX& x, __m256i* first, __m256i* last) {
    __m256i sums[2];
#if defined(__AVXVNNI__)
    __m256i each[8];
    for (int p = 0; p < 8; ++p) each[p] = both_planes(part[p], x.values + p * x.stride);
    sums_in_lanes(each, sums);
    *first = lower_lanes(sums[0], sums[1]), *last = upper_lanes(sums[0], sums[1]);
#elif defined(LEVEL_AVX512)
    __m256i half[2][2];
    for (int four = 0; four < 2; ++four) {
        Ints each[4];
        for (int i = 0; i < 4; ++i) {
            const int p = 4 * four + i;
            each[i] = ints(_mm512_madd_epi16(_mm512_cvtepu8_epi16(part[p]),
                                             load_64_bytes(x.values + p * x.stride)));
        }
        const __m512i all =
            bits(unpack_sums_64(unpack_sums_32(each[0], each[1]), unpack_sums_32(each[2], each[3])));
        half[four][0] = _mm512_castsi512_si256(all), half[four][1] = _mm512_extracti64x4_epi64(all, 1);
    }
    for (int i = 0; i < 2; ++i)
        sums[i] =
            _mm256_add_epi32(lower_lanes(half[0][i], half[1][i]), upper_lanes(half[0][i], half[1][i]));
    *first = sums[0], *last = sums[1];
#else
    for (int half = 0; half < 2; ++half) {
        __m256i each[8];
        for (int p = 0; p < 8; ++p) {
            const __m128i bytes =
                half ? _mm256_extracti128_si256(part[p], 1) : _mm256_castsi256_si128(part[p]);
            each[p] = _mm256_madd_epi16(_mm256_cvtepu8_epi16(bytes),
                                        load_32_bytes(x.values + p * x.stride + 32 * half));
        }
        sums_in_lanes(each, sums);
        *(half ? last : first) =
            _mm256_add_epi32(lower_lanes(sums[0], sums[1]), upper_lanes(sums[0], sums[1]));
    }
#endif
}

// Eight integer products, of the parts with x.
inline __m256i products_of_parts(const __m256i* part, const SuperX& x) {
#if defined(__AVXVNNI__) || defined(LEVEL_AVX512)
    __m256i first, last;
    products_of_halves(part, x, &first, &last);
    return _mm256_add_epi32(first, last);
#else
    __m256i each[8], sums[2];
    for (int p = 0; p < 8; ++p) {
        const uint8_t* values = x.values + p * x.stride;
        each[p] = _mm256_add_epi32(
            _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm256_castsi256_si128(part[p])),
                              load_32_bytes(values)),
            _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm256_extracti128_si256(part[p], 1)),
                              load_32_bytes(values + 32)));
    }
    sums_in_lanes(each, sums);
    return _mm256_add_epi32(lower_lanes(sums[0], sums[1]), upper_lanes(sums[0], sums[1]));
#endif
}

template <class F>
__attribute__((always_inline)) inline void add_super(const uint8_t* const* block, const SuperX& x,
                                                     SuperSums& sums) {
    __m256i part[8];
    parts_of<F>(block[0], part);
    const __m256i sum = load_32_bytes(x.sum);
    __m256 term;
    if constexpr (F::HAS_MINIMA) {
        const __m128i numbers = six_bit_numbers(block[0]);
        const __m128 scales = four_f16(block[0]);
        const __m256 factor = _mm256_mul_ps(floats_of_u8(numbers), _mm256_broadcastss_ps(scales));
        const __m256 minimum = _mm256_mul_ps(floats_of_u8(_mm_srli_si128(numbers, 8)),
                                             _mm256_broadcastss_ps(_mm_movehdup_ps(scales)));
        term = _mm256_fmsub_ps(factor, _mm256_cvtepi32_ps(products_of_parts(part, x)),
                               _mm256_mul_ps(minimum, _mm256_cvtepi32_ps(sum)));
    } else {
        const __m256i of_first = load_32_bytes(x.first_sum);
        __m256i first, last;
        products_of_halves(part, x, &first, &last);
        first = _mm256_sub_epi32(first, _mm256_slli_epi32(of_first, 5));
        last = _mm256_sub_epi32(last, _mm256_slli_epi32(_mm256_sub_epi32(sum, of_first), 5));
        const __m256i pairs = _mm256_cvtepi8_epi16(load_16_bytes(block[0] + 192));
        const __m256 d = _mm256_broadcastss_ps(scale_of_q6_k(block[0]));
        const __m256i even = _mm256_srai_epi32(_mm256_slli_epi32(pairs, 16), 16);
        const __m256 factor[2] = {_mm256_mul_ps(_mm256_cvtepi32_ps(even), d),
                                  _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_srai_epi32(pairs, 16)), d)};
        term = _mm256_fmadd_ps(factor[1], _mm256_cvtepi32_ps(last),
                               _mm256_mul_ps(factor[0], _mm256_cvtepi32_ps(first)));
    }
    sums = _mm256_fmadd_ps(_mm256_loadu_ps(x.scale), term, sums);
}

inline void store_super(SuperSums sums, float* to) { _mm256_storeu_ps(to, sums); }
