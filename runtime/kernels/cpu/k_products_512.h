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

// Parts 2 * u and 2 * u + 1 of a block as bytes, without an offset.
template <class F>
inline __m512i two_parts(const uint8_t* block, int u) {
    if constexpr (F::BITS_BYTES == 64) {
        const __m512i quants = load_64_bytes(block + u / 2 * 64);
        const __m512i nibbles = masked(u % 2 ? _mm512_srli_epi16(quants, 4) : quants, 15);
        const __m512i above =
            shifted_halves(twice(block + F::BITS_AT + u / 2 * 32), u % 2 * 4, u % 2 * 4 + 2);
        return or_masked(nibbles, _mm512_slli_epi16(above, 4), _mm512_set1_epi8(0x30));
    } else {
        const __m512i nibbles = masked(shifted_halves(twice(block + F::QUANTS_AT + 32 * u), 0, 4), 15);
        if constexpr (F::BITS_BYTES == 0) return nibbles;
        const __m512i above = shifted_halves(twice(block + F::BITS_AT), 2 * u, 2 * u + 1);
        return or_masked(nibbles, _mm512_slli_epi16(above, 4), _mm512_set1_epi8(0x10));
    }
}

// Eight numbers of the first of two vectors of 16 bytes and eight of the second, from byte 0 or 8 on.
inline __m512 floats_of_both(__m256i numbers, int half) {
    const __m256i ordered = _mm256_permute4x64_epi64(numbers, 0xd8);
    const __m128i bytes = half ? _mm256_extracti128_si256(ordered, 1) : _mm256_castsi256_si128(ordered);
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
}

// six_bit_numbers() of two blocks.
inline __m256i six_bit_numbers_of_two(const uint8_t* const* block) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(six_bit_numbers(block[0])),
                                   six_bit_numbers(block[1]), 1);
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
    const __m512i sum = _mm512_broadcast_i64x4(load_32_bytes(x.sum));
    const __m512i rows = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    __m512 term;
    if constexpr (F::HAS_MINIMA) {
        const __m256i numbers = six_bit_numbers_of_two(block);
        const __m512 scales =  // d, d, m, m of both rows
            _mm512_castps128_ps512(_mm_unpacklo_ps(four_f16(block[0]), four_f16(block[1])));
        const __m512 factor = mul(floats_of_both(numbers, 0), _mm512_permutexvar_ps(rows, scales));
        const __m512 minimum =
            mul(floats_of_both(numbers, 1),
                _mm512_permutexvar_ps(_mm512_add_epi32(rows, _mm512_set1_epi32(2)), scales));
        const __m512i products = _mm512_permutexvar_epi32(order, _mm512_add_epi32(first, last));
        term = _mm512_fmsub_ps(factor, _mm512_cvtepi32_ps(products),
                               mul(minimum, _mm512_cvtepi32_ps(sum)));
    } else {
        const __m512i of_first = _mm512_broadcast_i64x4(load_32_bytes(x.first_sum));
        const __m512i products[2] = {
            _mm512_sub_epi32(_mm512_permutexvar_epi32(order, first), _mm512_slli_epi32(of_first, 5)),
            _mm512_sub_epi32(_mm512_permutexvar_epi32(order, last),
                             _mm512_slli_epi32(_mm512_sub_epi32(sum, of_first), 5))};
        const __m256i numbers = _mm256_inserti128_si256(
            _mm256_castsi128_si256(load_16_bytes(block[0] + 192)), load_16_bytes(block[1] + 192), 1);
        const __m512 d = _mm512_permutexvar_ps(
            rows,
            _mm512_castps128_ps512(_mm_unpacklo_ps(scale_of_q6_k(block[0]), scale_of_q6_k(block[1]))));
        const __m512i halves = _mm512_cvtepi8_epi16(numbers);  // the two of a part in each 32 bits
        const __m512 factor[2] = {
            mul(_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(halves, 16), 16)), d),
            mul(_mm512_cvtepi32_ps(_mm512_srai_epi32(halves, 16)), d)};
        term = _mm512_fmadd_ps(factor[1], _mm512_cvtepi32_ps(products[1]),
                               mul(factor[0], _mm512_cvtepi32_ps(products[0])));
    }
    const __m512 scale = _mm512_broadcast_f32x8(_mm256_loadu_ps(x.scale));
    sums = _mm512_fmadd_ps(scale, term, sums);
}

inline void store_super(SuperSums sums, float* to) { _mm512_storeu_ps(to, sums); }
