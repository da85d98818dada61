// Integer products of four bytes at a time (AVX-512 VNNI), for blocks_template.h. A value of x is
// 256 * high + low, two signed bytes; weights are made unsigned (q8_0: + 128, nibbles: + 8).

#include "blocks_bytes.h"

// For q8_0, a unit of packed x has two blocks: 64 high bytes, then 64 low ones. For nibbles, it has
// four: the high bytes of the first 16 values of each, then of the last 16; then the low bytes
// likewise.
template <class F>
constexpr int64_t unit() {
    return F::HAS_NIBBLES ? 4 : 2;
}

template <class F>
constexpr int64_t PLANE = 32 * unit<F>();

template <class F>
inline void quantise_unit(const int16_t* value, uint8_t* to) {
    for (int64_t i = 0; i < unit<F>(); ++i) {
        const __m512i values = load_64_bytes(value + i * BLOCK);
        const __m512i high = _mm512_srai_epi16(_mm512_add_epi16(values, _mm512_set1_epi16(128)), 8);
        const __m512i low = _mm512_sub_epi16(values, _mm512_slli_epi16(high, 8));
        const __m256i bytes[2] = {_mm512_cvtepi16_epi8(high), _mm512_cvtepi16_epi8(low)};
        for (int plane = 0; plane < 2; ++plane) {
            uint8_t* at = to + plane * PLANE<F>;
            if constexpr (F::HAS_NIBBLES) {
                __builtin_memcpy(at + 16 * i, &bytes[plane], 16);
                __builtin_memcpy(at + 64 + 16 * i, reinterpret_cast<const uint8_t*>(&bytes[plane]) + 16,
                                 16);
            } else {
                __builtin_memcpy(at + 32 * i, &bytes[plane], 32);
            }
        }
    }
}

// a, b, c and d each hold four sums for each of four blocks of one row. Lane 4 * block + row of the
// result is the sum of the four.
inline __m512i few_sums(__m512i a, __m512i b, __m512i c, __m512i d) {
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

constexpr int few_lane(int r, int p) { return 4 * p + r; }

// sum + 256 * (w . high) + w . low
inline __m512i both_planes(__m512i sum, __m512i w, __m512i high, __m512i low) {
    const __m512i upper = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w, high);
    return _mm512_dpbusd_epi32(_mm512_add_epi32(sum, _mm512_slli_epi32(upper, 8)), w, low);
}

template <class F>
__attribute__((always_inline)) inline Ints few_products(const uint8_t* const* quants, int64_t m,
                                                        const uint8_t* x, int64_t stride) {
    const uint64_t there =
        m < 4 ? (1ull << 16 * m) - 1 : ~0ull;  // one bit per byte, 16 bytes per block
    __m512i sum[4];
    if constexpr (F::HAS_NIBBLES) {
        const __m512i high[2] = {load_64_bytes(x), load_64_bytes(x + 64)};
        const __m512i low[2] = {load_64_bytes(x + 128), load_64_bytes(x + 192)};
        const __m512i fifteen = _mm512_set1_epi8(15);
        for (int r = 0; r < 4; ++r) {
            const __m512i nibbles = _mm512_maskz_loadu_epi8(there, quants[r]);
            const __m512i first = _mm512_and_si512(nibbles, fifteen);
            const __m512i last = _mm512_and_si512(_mm512_srli_epi16(nibbles, 4), fifteen);
            __m512i upper = _mm512_dpbusd_epi32(_mm512_setzero_si512(), first, high[0]);
            __m512i lower = _mm512_dpbusd_epi32(_mm512_setzero_si512(), first, low[0]);
            upper = _mm512_dpbusd_epi32(upper, last, high[1]);
            lower = _mm512_dpbusd_epi32(lower, last, low[1]);
            sum[r] = _mm512_add_epi32(_mm512_slli_epi32(upper, 8), lower);
        }
    } else {
        const __m512i high[2] = {load_64_bytes(x), load_64_bytes(x + stride)};
        const __m512i low[2] = {load_64_bytes(x + 64), load_64_bytes(x + stride + 64)};
        const __m512i sign = _mm512_set1_epi8(-128);
        const uint64_t half[2] = {m < 2 ? 0xffffffffull : ~0ull, m < 3   ? 0
                                                                 : m < 4 ? 0xffffffffull
                                                                         : ~0ull};
        for (int r = 0; r < 4; ++r) {
            __m512i pair[2];  // eight sums per block, two blocks
            for (int i = 0; i < 2; ++i) {
                const __m512i quant = _mm512_maskz_loadu_epi8(half[i], quants[r] + 64 * i);
                const __m512i w = _mm512_xor_si512(quant, sign);
                pair[i] = both_planes(_mm512_setzero_si512(), w, high[i], low[i]);
            }
            sum[r] = _mm512_add_epi32(_mm512_shuffle_i32x4(pair[0], pair[1], 0x88),
                                      _mm512_shuffle_i32x4(pair[0], pair[1], 0xdd));
        }
    }
    return ints(few_sums(sum[0], sum[1], sum[2], sum[3]));
}

inline __m512i four_bytes(const uint8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
}

constexpr int TILES_AT_ONCE = 2;

// tile_products() of N tiles, which share what is read of x. Sums of eight products have two halves, because a chain
// of eight would still be running when the next vector's products could begin.
template <class F, int N, int FIRST = 0, int END = 8>
inline void products_of_tiles(const Ints (*w)[TILE_WEIGHTS<F>], const uint8_t* x, int64_t b, Ints start,
                              Ints* out) {
    constexpr int HALVES = (END - FIRST) / 4;
    const uint8_t* at = x + b % unit<F>() * (F::HAS_NIBBLES ? 16 : 32);
    __m512i high[N][HALVES] = {}, low[N][HALVES] = {};
    for (int i = 0; i < N; ++i) low[i][0] = bits(start);
#pragma GCC unroll 8
    for (int v = FIRST; v < END; ++v) {
        const int64_t place = F::HAS_NIBBLES ? v / 4 * 64 + v % 4 * 4 : 4 * v;
        const __m512i upper = four_bytes(at + place), lower = four_bytes(at + PLANE<F> + place);
        const int half = v % HALVES;
        for (int i = 0; i < N; ++i) {
            high[i][half] = _mm512_dpbusd_epi32(high[i][half], bits(w[i][v]), upper);
            low[i][half] = _mm512_dpbusd_epi32(low[i][half], bits(w[i][v]), lower);
        }
    }
    for (int i = 0; i < N; ++i) {
        Ints upper = ints(high[i][0]), lower = ints(low[i][0]);
        for (int half = 1; half < HALVES; ++half)
            upper += ints(high[i][half]), lower += ints(low[i][half]);
        out[i] = (upper << 8) + lower;
    }
}

template <class F, int FIRST = 0, int END = 8>
inline Ints tile_products(const Ints* w, const uint8_t* x, int64_t b, Ints start) {
    Ints out;
    products_of_tiles<F, 1, FIRST, END>(reinterpret_cast<const Ints(*)[TILE_WEIGHTS<F>]>(w), x, b,
                                        start, &out);
    return out;
}
