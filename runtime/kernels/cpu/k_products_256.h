// Products of one K-quant row with one input, in 32-byte vectors (level avx512 multiplies in 64-byte
// ones). For the levels avx2, avxvnni and avx512; see k_products.h.

constexpr int SUPER_ROWS = 1;
typedef __m256 SuperSums;

inline __m256i lower_lanes(__m256i a, __m256i b) { return _mm256_permute2x128_si256(a, b, 0x20); }
inline __m256i upper_lanes(__m256i a, __m256i b) { return _mm256_permute2x128_si256(a, b, 0x31); }

// part[p] = the 32 unsigned quants of part p; LESS is not yet subtracted.
template <class F>
inline void parts_of(const uint8_t* block, __m256i* part) {
#pragma GCC unroll 4
    for (int pair = 0; pair < 4; ++pair) {
        auto load = [&](int64_t at) { return reinterpret_cast<EightInts>(load_32_bytes(block + at)); };
        const EightInts quants = load(F::QUANTS_AT + 4 * F::quants_at(pair, 0));
        EightInts above = {}, low, high;
        if constexpr (F::BITS_BYTES > 0) above = load(F::BITS_AT + 4 * F::above_at(pair, 0));
        F::four(quants, above, pair, low, high);
        const __m256i of[2] = {reinterpret_cast<__m256i>(low), reinterpret_cast<__m256i>(high)};
        part[F::parts(pair).first] = F::SHARES_HALVES ? lower_lanes(of[0], of[1]) : of[0];
        part[F::parts(pair).second] = F::SHARES_HALVES ? upper_lanes(of[0], of[1]) : of[1];
    }
}

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

// One number of 8 bits for each range of each part: by[r] = d times number r of the parts.
template <int RANGES>
inline void factors_of_parts(__m128i bytes, __m256 d, __m256* by) {
    if constexpr (RANGES == 1) {
        by[0] = _mm256_mul_ps(floats_of_i8(bytes), d);
    } else {
        const __m256i pairs = _mm256_cvtepi8_epi16(bytes);
        const __m256i even = _mm256_srai_epi32(_mm256_slli_epi32(pairs, 16), 16);
        by[0] = _mm256_mul_ps(_mm256_cvtepi32_ps(even), d);
        by[1] = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_srai_epi32(pairs, 16)), d);
    }
}

template <class F>
__attribute__((always_inline)) inline void add_super(const uint8_t* const* block, const SuperX& x,
                                                     SuperSums& sums) {
    __m256i part[8], products[2];
    parts_of<F>(block[0], part);
    if constexpr (F::RANGES == 1)
        products[0] = products_of_parts(part, x);
    else
        products_of_halves(part, x, &products[0], &products[1]);
    const EightInts sum = reinterpret_cast<EightInts>(load_32_bytes(x.sum)),
                    first_sum = reinterpret_cast<EightInts>(load_32_bytes(x.first_sum));
    const __m128i numbers = numbers_of<F>(block[0]);
    const __m128 halves = four_halves<F>(block[0]);
    __m256 of[2], by[2], least[2], less[2];
    factors_of_parts<F::RANGES>(scale_bytes<F>(numbers), eight_of<D_LANE<F>>(halves), by);
    if constexpr (F::HAS_MINIMA)
        factors_of_parts<F::RANGES>(minimum_bytes<F>(numbers), eight_of<D_LANE<F> + 1>(halves), least);
    for (int r = 0; r < F::RANGES; ++r) {
        const EightInts range = sum_of_range<F>(r, sum, first_sum);
        const EightInts exact = reinterpret_cast<EightInts>(products[r]) - F::LESS * range;
        of[r] = _mm256_cvtepi32_ps(reinterpret_cast<__m256i>(exact));
        if constexpr (F::HAS_MINIMA)
            less[r] = _mm256_cvtepi32_ps(reinterpret_cast<__m256i>(EightInts{} - range));
    }
    sums = _mm256_fmadd_ps(_mm256_loadu_ps(x.scale), term_of<F>(by, of, least, less), sums);
}

inline void store_super(SuperSums sums, float* to) { _mm256_storeu_ps(to, sums); }
