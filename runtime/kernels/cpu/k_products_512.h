// Products of two rows of a K-quant with one vector (AVX-512 VNNI). See k_products.h.

constexpr int SUPER_ROWS = 2;
typedef __m512 SuperSums;  // part[p] of the first row, then of the second

inline __m512i masked(__m512i v, char mask) { return _mm512_and_si512(v, _mm512_set1_epi8(mask)); }
inline __m512i twice(const uint8_t* p) { return _mm512_broadcast_i64x4(load_32_bytes(p)); }

// 16-bit lanes, of which the first half are shifted right by `first`, the others by `last`.
inline __m512i shifted_halves(__m512i v, short first, short last) {
    const __m512i by = _mm512_inserti64x4(_mm512_set1_epi16(first), _mm256_set1_epi16(last), 1);
    return _mm512_srlv_epi16(v, by);
}

constexpr int64_t NIBBLE = 0x0004000400040004;  // a shift of each 16 bits

// Parts 2 * u and 2 * u + 1 of a block as bytes, without an offset.
template <class F>
inline __m512i two_parts(const uint8_t* block, int u) {
    const uint8_t* quants = block + F::QUANTS_AT;
    __m512i low, above;
    if constexpr (F::SHARES_HALVES) {
        const __m512i twice_16 =
            _mm512_permutexvar_epi64(_mm512_set_epi64(3, 2, 3, 2, 1, 0, 1, 0),
                                     _mm512_castsi256_si512(load_32_bytes(quants + 32 * u)));
        const __m512i by = _mm512_set_epi64(NIBBLE, NIBBLE, 0, 0, NIBBLE, NIBBLE, 0, 0);
        const __m512i codes = masked(_mm512_srlv_epi16(twice_16, by), 15);
        return bits(look_up(F::TABLE, ints(codes)));
    } else if constexpr (F::BITS_BYTES == 64) {
        const __m512i bytes = load_64_bytes(quants + u / 2 * 64);
        low = masked(u % 2 ? _mm512_srli_epi16(bytes, 4) : bytes, 15);
        above = shifted_halves(twice(block + F::BITS_AT + u / 2 * 32), u % 2 * 4, u % 2 * 4 + 2);
    } else if constexpr (F::SHAPE.quant_bytes == 64) {
        low = masked(shifted_halves(twice(quants + u / 2 * 32), u % 2 * 4, u % 2 * 4 + 2), 3);
    } else {
        low = masked(shifted_halves(twice(quants + 32 * u), 0, 4), 15);
    }
    if constexpr (F::BITS_BYTES == 0) return low;
    if constexpr (F::BITS_BYTES == 32)
        above = shifted_halves(twice(block + F::BITS_AT), 2 * u, 2 * u + 1);
    constexpr int PLACE = F::SHAPE.quant_bytes == 64 ? 2 : 4;
    constexpr int MASK = F::BITS_BYTES == 64 ? 3 << PLACE : 1 << PLACE;
    const __m512i codes = or_masked(low, _mm512_slli_epi16(above, PLACE), _mm512_set1_epi8(MASK));
    if constexpr (F::TABLE != nullptr) return bits(look_up(F::TABLE, ints(codes)));
    return codes;
}

// Two blocks' numbers of eight bits for each range of each part, times the blocks' d.
template <int RANGES>
inline void factors_of_two(__m128i first, __m128i second, __m512 d, __m512* by) {
    if constexpr (RANGES == 1) {
        by[0] = mul(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_unpacklo_epi64(first, second))), d);
    } else {
        const __m512i pairs = _mm512_cvtepi8_epi16(
            _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1));  // the two of a part
        by[0] = mul(_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(pairs, 16), 16)), d);
        by[1] = mul(_mm512_cvtepi32_ps(_mm512_srai_epi32(pairs, 16)), d);
    }
}

// One of four floats of two rows: eight lanes of the first, eight of the second.
template <int LANE>
inline __m512 eight_of_both(__m128 first, __m128 second) {
    const __m128 two = LANE / 2 ? _mm_unpackhi_ps(first, second) : _mm_unpacklo_ps(first, second);
    constexpr int A = LANE % 2 * 2, B = A + 1;
    return _mm512_permutexvar_ps(_mm512_set_epi32(B, B, B, B, B, B, B, B, A, A, A, A, A, A, A, A),
                                 _mm512_castps128_ps512(two));
}

// x of parts 2u and 2u + 1: the high bytes, and the low ones.
struct Planes {
    __m512i high[4], low[4];

    explicit Planes(const SuperX& x) {
#pragma GCC unroll 4
        for (int u = 0; u < 4; ++u) {
            high[u] = load_64_bytes(x.values + u * x.stride);
            low[u] = load_64_bytes(x.values + u * x.stride + 64);
        }
    }
};

// A block's products with x, in four lanes of 16 bytes: those of the first sixteen values of parts
// 0, 2, 4 and 6, of their last sixteen, of the first sixteen of parts 1, 3, 5 and 7, and of their
// last sixteen.
template <class F>
inline __m512i products_of_block(const uint8_t* block, const Planes& x) {
    __m512i each[4];
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u)
        each[u] = both_planes(_mm512_setzero_si512(), two_parts<F>(block, u), x.high[u], x.low[u]);
    return few_sums(each[0], each[1], each[2], each[3]);
}

template <class F>
__attribute__((always_inline)) inline void add_super(const uint8_t* const* block, const SuperX& x,
                                                     SuperSums& sums) {
    const Planes planes(x);
    const __m512i of_row[2] = {products_of_block<F>(block[0], planes),
                               products_of_block<F>(block[1], planes)};
    // For parts 0, 2, 4, 6, 1, 3, 5, 7 of both rows: their first sixteen values, and their last.
    const __m512i first = _mm512_shuffle_i32x4(of_row[0], of_row[1], 0x88);
    const __m512i last = _mm512_shuffle_i32x4(of_row[0], of_row[1], 0xdd);
    const __m512i order = _mm512_set_epi32(15, 11, 14, 10, 13, 9, 12, 8, 7, 3, 6, 2, 5, 1, 4, 0);
    const Ints sum = ints(_mm512_broadcast_i64x4(load_32_bytes(x.sum))),
               first_sum = ints(_mm512_broadcast_i64x4(load_32_bytes(x.first_sum)));
    Ints products[2];
    if constexpr (F::RANGES == 1)
        products[0] = ints(_mm512_permutexvar_epi32(order, _mm512_add_epi32(first, last)));
    else
        products[0] = ints(_mm512_permutexvar_epi32(order, first)),
        products[1] = ints(_mm512_permutexvar_epi32(order, last));
    const __m128i numbers[2] = {numbers_of<F>(block[0]), numbers_of<F>(block[1])};
    const __m128 halves[2] = {four_halves<F>(block[0]), four_halves<F>(block[1])};
    __m512 of[2], by[2], least[2], less[2];
    factors_of_two<F::RANGES>(scale_bytes<F>(numbers[0]), scale_bytes<F>(numbers[1]),
                              eight_of_both<D_LANE<F>>(halves[0], halves[1]), by);
    if constexpr (F::HAS_MINIMA)
        factors_of_two<F::RANGES>(minimum_bytes<F>(numbers[0]), minimum_bytes<F>(numbers[1]),
                                  eight_of_both<D_LANE<F> + 1>(halves[0], halves[1]), least);
    for (int r = 0; r < F::RANGES; ++r) {
        const Ints range = sum_of_range<F>(r, sum, first_sum);
        of[r] = to_floats(products[r] - F::LESS * range);
        if constexpr (F::HAS_MINIMA) less[r] = to_floats(Ints{} - range);
    }
    const __m512 term = term_of<F>(by, of, least, less);
    const __m512 scale = _mm512_broadcast_f32x8(_mm256_loadu_ps(x.scale));
    sums = _mm512_fmadd_ps(scale, term, sums);
}

inline void store_super(SuperSums sums, float* to) { _mm512_storeu_ps(to, sums); }
