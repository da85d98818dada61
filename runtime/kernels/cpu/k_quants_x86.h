// K-quant code shared by AVX2 and AVX-512; see k_quants_template.h.

inline __m256 floats_of_i8(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)); }

// The first sixteen numbers of a block (scales, then minima; see k_formats.h) as bytes. Of q2_K, sixteen bytes with
// a scale and a minimum each.
template <class F>
inline __m128i numbers_of(const uint8_t* block) {
    if constexpr (!F::HAS_NUMBERS) return _mm_set1_epi8(1);
    if constexpr (F::SHAPE.scale_bytes == 16) return load_16_bytes(block + F::SHAPE.scales_at);
    if constexpr (F::HAS_WORDS) {
        const __m128i head = load_8_bytes(block), nibbles = _mm_srli_si128(head, 4);
        const __m128i fifteen = _mm_set1_epi8(15);
        const __m128i low = _mm_unpacklo_epi8(_mm_and_si128(nibbles, fifteen),
                                              _mm_and_si128(_mm_srli_epi16(nibbles, 4), fifteen));
        const __m128i above = _mm_broadcastw_epi16(_mm_srli_si128(head, 2));
        // Lane i moves bits 2i and 2i+1 to the top.
        const __m128i up = _mm_set_epi16(1, 4, 16, 64, 256, 1024, 4096, 16384);
        const __m128i two = _mm_srli_epi16(_mm_mullo_epi16(above, up), 14);
        const __m128i upper = _mm_slli_epi16(_mm_packus_epi16(two, two), 4);
        return _mm_sub_epi8(_mm_or_si128(low, upper), _mm_set1_epi8(32));
    }
    if constexpr (F::RANGES == 2) {
        // The 12 bytes, and d.
        const __m128i bits = _mm_srli_si128(load_16_bytes(block + F::SHAPE.scales_at - 2), 2);
        const __m128i low =
            _mm_srlv_epi32(_mm_shuffle_epi32(bits, _MM_SHUFFLE(1, 0, 1, 0)), _mm_set_epi32(4, 4, 0, 0));
        const __m128i high =
            _mm_srlv_epi32(_mm_shuffle_epi32(bits, _MM_SHUFFLE(2, 2, 2, 2)), _mm_set_epi32(6, 4, 2, 0));
        const __m128i upper = _mm_slli_epi32(_mm_and_si128(high, _mm_set1_epi8(3)), 4);
        return _mm_sub_epi8(_mm_or_si128(_mm_and_si128(low, _mm_set1_epi8(15)), upper),
                            _mm_set1_epi8(32));
    }
    const __m128i bits = load_16_bytes(block + 4);  // the 12 bytes, and four more
    const __m128i low =
        _mm_srlv_epi32(_mm_shuffle_epi32(bits, _MM_SHUFFLE(2, 1, 2, 0)), _mm_set_epi32(4, 0, 0, 0));
    const __m128i high = _mm_srli_epi32(_mm_shuffle_epi32(bits, _MM_SHUFFLE(1, 1, 0, 0)), 2);
    const __m128i low_mask = _mm_set_epi32(0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f);
    const __m128i high_mask = _mm_set_epi32(0x30303030, 0, 0x30303030, 0);
    return _mm_or_si128(_mm_and_si128(low, low_mask), _mm_and_si128(high, high_mask));
}

// The scales of a block from numbers_of() as bytes, sixteen, or eight and then others; and its minima likewise.
template <class F>
inline __m128i scale_bytes(__m128i numbers) {
    constexpr bool ARE_NIBBLES = F::HAS_MINIMA && F::RANGES == 2;
    return ARE_NIBBLES ? _mm_and_si128(numbers, _mm_set1_epi8(15)) : numbers;
}
template <class F>
inline __m128i minimum_bytes(__m128i numbers) {
    return F::RANGES == 1 ? _mm_srli_si128(numbers, 8)
                          : _mm_and_si128(_mm_srli_epi16(numbers, 4), _mm_set1_epi8(15));
}

// Four numbers of 16 bits in a block, of which number D_LANE is d, times UNIT, and the next one m.
template <class F>
constexpr int64_t FOUR_HALVES_AT =
    F::SHAPE.halves_at + 8 <= F::BLOCK_BYTES ? F::SHAPE.halves_at : F::BLOCK_BYTES - 8;
template <class F>
constexpr int D_LANE = (F::SHAPE.halves_at - FOUR_HALVES_AT<F>) / 2;
template <class F>
inline __m128 four_halves(const uint8_t* block) {
    const __m128 four = four_f16(block + FOUR_HALVES_AT<F>);
    return F::UNIT == 1.0f ? four : _mm_mul_ps(four, _mm_set1_ps(F::UNIT));
}
// One of four floats, in every lane.
template <int LANE>
inline __m256 eight_of(__m128 four) {
    return _mm256_broadcastss_ps(LANE == 0 ? four : _mm_permute_ps(four, LANE * 0x55));
}

// to[i] = by * bytes[i], for 8 * RANGES bytes.
template <int RANGES>
inline void store_factors(__m128i bytes, __m256 by, float* to) {
    _mm256_storeu_ps(to, _mm256_mul_ps(floats_of_i8(bytes), by));
    if (RANGES == 2)
        _mm256_storeu_ps(to + 8, _mm256_mul_ps(floats_of_i8(_mm_srli_si128(bytes, 8)), by));
}

template <class F>
inline void factors_of(const uint8_t* block, float c, Factors& to) {
    const __m128i numbers = numbers_of<F>(block);
    const __m128 halves = _mm_mul_ps(four_halves<F>(block), _mm_set1_ps(c));  // d*c, m*c
    store_factors<F::RANGES>(scale_bytes<F>(numbers), eight_of<D_LANE<F>>(halves), to.factor);
    if constexpr (F::HAS_MINIMA)
        store_factors<F::RANGES>(minimum_bytes<F>(numbers), eight_of<D_LANE<F> + 1>(halves),
                                 to.minimum);
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
template <class F>
inline __m512 values_of_table() {
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(dwords_of(F::TABLE), _mm512_set1_epi32(F::LESS)));
}

// The quants less LESS of both parts, 16 each. A permutation uses only the low four bits of each lane (of two vectors
// five), so it serves as a table from number to float without a mask.
template <class F>
inline void unpack_by_table(Bits bytes, const uint8_t* upper, int pair, Floats& low, Floats& high) {
    const __m512 first_floats = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const Bits nibbles = _mm512_srli_epi32(bytes, 4);
    if constexpr (F::HAS_WORDS) {
        const __m512 values = values_of_table<F>();
        low = _mm512_permutexvar_ps(bytes, values);
        high = _mm512_permutexvar_ps(nibbles, values);
    } else if constexpr (F::BITS_BYTES == 0 && F::SHAPE.quant_bytes == 128) {
        low = _mm512_permutexvar_ps(bytes, first_floats);
        high = _mm512_permutexvar_ps(nibbles, first_floats);
    } else if constexpr (F::BITS_BYTES == 0) {
        const __m512 twos = _mm512_sub_ps(_mm512_set_ps(3, 2, 1, 0, 3, 2, 1, 0, 3, 2, 1, 0, 3, 2, 1, 0),
                                          _mm512_set1_ps(F::LESS));
        low = _mm512_permutexvar_ps(shifted(bytes, -2 * (pair % 2)), twos);
        high = _mm512_permutexvar_ps(shifted(nibbles, -2 * (pair % 2)), twos);
    } else if constexpr (F::SHAPE.quant_bytes == 128) {
        const Bits above = dwords_of(upper), fifteen = _mm512_set1_epi32(15);
        const __m512 more = _mm512_add_ps(first_floats, _mm512_set1_ps(16));
        // fifteen ? nibbles : shifted bits
        const Bits both[2] = {
            _mm512_ternarylogic_epi32(fifteen, bytes, shifted(above, 4 - 2 * pair), 0xca),
            _mm512_ternarylogic_epi32(fifteen, nibbles, shifted(above, 3 - 2 * pair), 0xca)};
        low = _mm512_permutex2var_ps(first_floats, both[0], more);
        high = _mm512_permutex2var_ps(first_floats, both[1], more);
    } else {
        __m512 threes = _mm512_set_ps(3, 2, 1, 0, -1, -2, -3, -4, 3, 2, 1, 0, -1, -2, -3, -4);
        if constexpr (F::TABLE != nullptr) threes = values_of_table<F>();
        const Bits above = dwords_of(upper), three = _mm512_set1_epi32(3);
        const int part = F::parts(pair).first, place = 2 * (pair % 2);
        low = _mm512_permutexvar_ps(
            _mm512_ternarylogic_epi32(three, shifted(bytes, -place), shifted(above, 2 - part), 0xca),
            threes);
        high = _mm512_permutexvar_ps(
            _mm512_ternarylogic_epi32(three, shifted(nibbles, -place), shifted(above, -part), 0xca),
            threes);
    }
}
#endif

template <class F>
inline void unpack_pair(const uint8_t* block, int pair, Floats* w) {
    const uint8_t* quants = block + F::QUANTS_AT + 4 * F::quants_at(pair, 0);
    const uint8_t* upper = block + F::BITS_AT + 4 * F::above_at(pair, 0);
    for (int v = 0; v < BLOCK / LANES; ++v) {
        const Bits bytes = dwords_of(quants + LANES * v);
        constexpr int HALF = 16 / LANES;  // vectors of half a part
        const int at = F::SHARES_HALVES ? v / HALF * 2 * HALF + v % HALF : v;
        Floats &low = w[at], &high = w[at + (F::SHARES_HALVES ? HALF : BLOCK / LANES)];
#ifdef LEVEL_AVX512
        if constexpr (F::KIND != KIND_Q6_K) {
            unpack_by_table<F>(bytes, upper + LANES * v, pair, low, high);
            continue;
        }
#endif
        Ints above = {}, first, second;
        if constexpr (F::BITS_BYTES > 0) above = ints(dwords_of(upper + LANES * v));
        F::four(ints(bytes), above, pair, first, second);
        if constexpr (F::TABLE != nullptr) first &= 255, second &= 255;  // zeros were looked up too
        low = to_floats(first - F::LESS), high = to_floats(second - F::LESS);
    }
}

#if defined(LEVEL_AVX512) && defined(__AVX512VNNI__)
#include "k_products_512.h"
#else
#include "k_products_256.h"
#endif
