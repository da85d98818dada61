// Also compiled as rows_avx512vnni.cpp.
#include <immintrin.h>

#include "kernels.h"

#define LEVEL_AVX512

namespace {

constexpr int LANES = 16;
typedef __m512 Floats;

inline Floats zero() { return _mm512_setzero_ps(); }
inline Floats broadcast(float f) { return _mm512_set1_ps(f); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline float sum(Floats v) { return _mm512_reduce_add_ps(v); }
inline Floats load_f32(const uint8_t* p) { return _mm512_loadu_ps(p); }
inline void store_f32(uint8_t* p, Floats v) { _mm512_storeu_ps(p, v); }

inline void store_bf16(uint8_t* p, Floats v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x00400000));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

inline __m128i load_16_bytes(const uint8_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}

inline __m256i load_32_bytes(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

inline Floats load_f16(const uint8_t* p) { return _mm512_cvtph_ps(load_32_bytes(p)); }

inline Floats load_bf16(const uint8_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_32_bytes(p)), 16));
}

inline Floats load_i8(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16_bytes(p)));
}

// A permutation of 16 floats looks at the low four bits of each lane only: it is the table from
// nibble to value, and needs no mask.
inline void unpack_q4(const uint8_t* p, Floats* w) {
    const __m512 values = _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
    __m512i bytes = _mm512_cvtepu8_epi32(load_16_bytes(p));
    w[0] = _mm512_permutexvar_ps(bytes, values);
    w[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), values);
}

inline float f16_to_float(const uint8_t* p) {
    uint16_t bits;
    __builtin_memcpy(&bits, p, 2);
    return _cvtsh_ss(bits);
}

inline __m128 four_f16(const uint8_t* p) {
    // Four are converted and one is used. In assembly because gcc 12 loads into a register first,
    // which takes a second shuffle.
    __m128 four;
    asm("vcvtph2ps %1, %0" : "=x"(four) : "m"(*reinterpret_cast<const uint64_t*>(p)));
    return four;
}

inline Floats scale_f16(const uint8_t* p) { return _mm512_broadcastss_ps(four_f16(p)); }

inline __m128 sum_quarters(Floats v) {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

inline void store_sums(Floats a, Floats b, Floats c, Floats d, float* y) {
    const __m128 ab = _mm_hadd_ps(sum_quarters(a), sum_quarters(b));
    const __m128 cd = _mm_hadd_ps(sum_quarters(c), sum_quarters(d));
    _mm_storeu_ps(y, _mm_hadd_ps(ab, cd));
}

#include "ahead.h"
#include "quantise.h"

inline __m512i load_64_bytes(const void* p) { return _mm512_loadu_si512(p); }

inline Floats add_products(Floats sum, __m512i products, Floats scale) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(products), scale, sum);
}

template <int ROWS>
inline void dot_q8(const uint8_t* const* rows, const uint8_t* const* next, int64_t n,
                   const uint8_t* packed, float* y) {
    const int16_t* x = values_of(packed);
    const float* x_scale = scales_of(packed, n);
    Floats sums[ROWS];
    for (Floats& sum : sums) sum = zero();
    Ahead<ROWS> ahead(next, n * 34, (n + 1) / 2);
    for (int64_t b = 0; b < n; ++b) {
        if (b % 2 == 0) ahead.ask();
        const __m512i x_values = load_64_bytes(x + b * BLOCK);
        const Floats scale = broadcast(x_scale[b]);
        for (int r = 0; r < ROWS; ++r) {
            const uint8_t* block = rows[r] + b * 34;
            const __m512i quants = _mm512_cvtepi8_epi16(load_32_bytes(block + 2));
            sums[r] = add_products(sums[r], _mm512_madd_epi16(quants, x_values),
                                   mul(scale_f16(block), scale));
        }
    }
    for (int r = 0; r < ROWS; ++r) y[r] = sum(sums[r]);
}

// q4_0 takes two blocks at a time, the first one's numbers in the lower half of each vector.
struct Pair {
    int16_t low[32], high[32];  // the first 16 values of each block, the last 16
    int32_t correction[16];     // lanes 0 and 8; the others are 0
    float scale[16];
};
static_assert(sizeof(Pair) == 256, "packed_bytes counts four bytes a value");

void quantise_q4(const Input& x, int64_t D) {
    Pair* pairs = reinterpret_cast<Pair*>(x.packed);
    for (int64_t b = 0; b < D / BLOCK; ++b) {
        Pair& pair = pairs[b / 2];
        const int half = b % 2;
        if (half == 0) __builtin_memset(&pair, 0, sizeof pair);
        int16_t value[BLOCK];
        float scale;
        quantise_block(x.f32 + b * BLOCK, value, &scale, pair.correction + 8 * half);
        __builtin_memcpy(pair.low + 16 * half, value, 32);
        __builtin_memcpy(pair.high + 16 * half, value + 16, 32);
        for (int lane = 0; lane < 8; ++lane) pair.scale[8 * half + lane] = scale;
    }
}

inline __m512i add_pairs(__m512i sum, __m512i a, __m512i b) {
#ifdef __AVX512VNNI__
    return _mm512_dpwssd_epi32(sum, a, b);
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}

// Blocks b0 and b1 of a row of n.
template <class Layout>
inline Floats add_q4(Floats sum, const uint8_t* row, int64_t n, int64_t b0, int64_t b1,
                     const Pair& x) {
    const __m128i first = load_16_bytes(Layout::quants(row, n, b0));
    const __m128i second = load_16_bytes(Layout::quants(row, n, b1));
    const __m256i bytes = _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
    const __m512i words = _mm512_cvtepu8_epi16(bytes);
    __m512i products = load_64_bytes(x.correction);
    products = add_pairs(products, _mm512_and_si512(words, _mm512_set1_epi16(15)),
                         load_64_bytes(x.low));
    products = add_pairs(products, _mm512_srli_epi16(words, 4), load_64_bytes(x.high));
    const __m512 scale = _mm512_mask_broadcastss_ps(scale_f16(Layout::scale(row, n, b0)), 0xff00,
                                                    four_f16(Layout::scale(row, n, b1)));
    return add_products(sum, products, mul(scale, _mm512_loadu_ps(x.scale)));
}

template <class Layout, int ROWS>
inline void dot_q4(const uint8_t* const* rows, const uint8_t* const* next, int64_t n,
                   const uint8_t* packed, float* y) {
    const Pair* x = reinterpret_cast<const Pair*>(packed);
    Floats sums[ROWS];
    for (Floats& sum : sums) sum = zero();
    Ahead<ROWS> ahead(next, n * 18, (n + 3) / 4);
    for (int64_t b = 0; b < n; b += 2) {
        if (b % 4 == 0) ahead.ask();
        const int64_t second = b + 1 < n ? b + 1 : b;  // where there is none, its x is 0
        for (int r = 0; r < ROWS; ++r) {
            sums[r] = add_q4<Layout>(sums[r], rows[r], n, b, second, x[b / 2]);
        }
    }
    for (int r = 0; r < ROWS; ++r) y[r] = sum(sums[r]);
}

inline __mmask16 first_of_16(int64_t m) {
    return static_cast<__mmask16>(m >= 16 ? 0xffff : (1u << m) - 1);
}

inline Floats load_some_f16(const uint8_t* p, int64_t m) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_of_16(m), p));
}

inline void scale_many(const uint8_t* p, int64_t m, float c, float* y) {
    _mm512_store_ps(y, mul(load_some_f16(p, m), broadcast(c)));
}

#ifdef __AVX512VNNI__
// Four blocks of x for planar rows: each value is 256 * high + low, so that 8-bit products of
// nibbles with both give the 16-bit one in half the instructions. [0] are the first 16 values of
// each block, [1] the last 16.
struct Quad {
    int8_t high[2][64], low[2][64];
    int32_t correction[16];  // of each block in its first lane of four; the others are 0
};
static_assert(sizeof(Quad) == 320, "packed_bytes counts 2.5 bytes a value, and scales");

inline int64_t quads_of(int64_t n) { return (n + 15) / 16 * 4; }

// Quads first, then a scale a block; both are filled up with zeros to whole 16 blocks.
inline const float* planar_scales(const uint8_t* packed, int64_t n) {
    return reinterpret_cast<const float*>(packed + quads_of(n) * sizeof(Quad));
}

// 32 numbers of 8 bits, 16 to each place.
inline void store_halves(int8_t* first, int8_t* last, __m512i numbers) {
    const __m256i bytes = _mm512_cvtepi16_epi8(numbers);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(first), _mm256_castsi256_si128(bytes));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(last), _mm256_extracti128_si256(bytes, 1));
}

void quantise_q4_planar(const Input& x, int64_t D) {
    const int64_t n = D / BLOCK;
    Quad* quads = reinterpret_cast<Quad*>(x.packed);
    float* scale = const_cast<float*>(planar_scales(x.packed, n));
    __builtin_memset(quads, 0, quads_of(n) * sizeof(Quad));
    for (int64_t b = n; b < 4 * quads_of(n); ++b) scale[b] = 0.0f;
    for (int64_t b = 0; b < n; ++b) {
        int16_t value[BLOCK];
        Quad& quad = quads[b / 4];
        const int64_t at = b % 4;
        quantise_block(x.f32 + b * BLOCK, value, scale + b, quad.correction + 4 * at, 32639.0f);
        const __m512i values = load_64_bytes(value);
        const __m512i high =
            _mm512_srai_epi16(_mm512_add_epi16(values, _mm512_set1_epi16(128)), 8);
        const __m512i low = _mm512_sub_epi16(values, _mm512_slli_epi16(high, 8));
        store_halves(quad.high[0] + 16 * at, quad.high[1] + 16 * at, high);
        store_halves(quad.low[0] + 16 * at, quad.low[1] + 16 * at, low);
    }
}

// 64 bytes of nibbles, four blocks; `scale` has those of 16 blocks, of which these are 4k .. 4k+3.
inline Floats add_quad(Floats sum, __m512i nibbles, const Quad& x, Floats scale, int k) {
    const __m512i fifteen = _mm512_set1_epi8(15);
    const __m512i first = _mm512_and_si512(nibbles, fifteen);
    const __m512i last = _mm512_and_si512(_mm512_srli_epi16(nibbles, 4), fifteen);
    __m512i high = _mm512_dpbusd_epi32(_mm512_setzero_si512(), first, load_64_bytes(x.high[0]));
    __m512i low = _mm512_dpbusd_epi32(load_64_bytes(x.correction), first, load_64_bytes(x.low[0]));
    high = _mm512_dpbusd_epi32(high, last, load_64_bytes(x.high[1]));
    low = _mm512_dpbusd_epi32(low, last, load_64_bytes(x.low[1]));
    const __m512i products = _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
    const __m512i lanes = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    const __m512i which = _mm512_add_epi32(lanes, _mm512_set1_epi32(4 * k));
    return add_products(sum, products, _mm512_permutexvar_ps(which, scale));
}

template <int ROWS>
inline void dot_q4_planar(const uint8_t* const* rows, const uint8_t* const* next, int64_t n,
                          const uint8_t* packed, float* y) {
    const Quad* x = reinterpret_cast<const Quad*>(packed);
    const float* x_scale = planar_scales(packed, n);
    Floats sums[ROWS], scale[ROWS];
    for (Floats& sum : sums) sum = zero();
    Ahead<ROWS> ahead(next, n * 18, n / 16 * 4);
    int64_t b = 0;
    for (; b + 16 <= n; b += 16) {
        for (int r = 0; r < ROWS; ++r)
            scale[r] = mul(load_f16(rows[r] + 2 * b), _mm512_loadu_ps(x_scale + b));
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
            ahead.ask();
            for (int r = 0; r < ROWS; ++r) {
                const __m512i quad = load_64_bytes(rows[r] + 2 * n + (b + 4 * k) * 16);
                sums[r] = add_quad(sums[r], quad, x[b / 4 + k], scale[r], k);
            }
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        scale[r] = mul(load_some_f16(rows[r] + 2 * b, n - b), _mm512_loadu_ps(x_scale + b));
        for (int k = 0; b + 4 * k < n; ++k) {
            const int64_t bytes = 16 * (n - b - 4 * k);
            const __mmask64 mask = bytes >= 64 ? ~0ull : (1ull << bytes) - 1;
            const uint8_t* nibbles = rows[r] + 2 * n + (b + 4 * k) * 16;
            const __m512i quad = _mm512_maskz_loadu_epi8(mask, nibbles);
            sums[r] = add_quad(sums[r], quad, x[b / 4 + k], scale[r], k);
        }
        y[r] = sum(sums[r]);
    }
}
#else
constexpr Quantise* quantise_q4_planar = quantise_q4;

template <int64_t BYTES>
struct Planar;

template <int ROWS>
inline void dot_q4_planar(const uint8_t* const* rows, const uint8_t* const* next, int64_t n,
                          const uint8_t* x, float* y) {
    dot_q4<Planar<16>, ROWS>(rows, next, n, x, y);
}
#endif

typedef int32_t Ints __attribute__((vector_size(64)));

inline Ints ints(__m512i v) { return reinterpret_cast<Ints>(v); }
inline __m512i bits(Ints v) { return reinterpret_cast<__m512i>(v); }
inline Ints load_ints(const uint8_t* p) { return ints(load_64_bytes(p)); }
inline Floats to_floats(Ints v) { return _mm512_cvtepi32_ps(bits(v)); }
inline Ints to_ints(Floats v) { return ints(_mm512_cvtps_epi32(v)); }
inline Ints interleave_low(Ints a, Ints b) { return ints(_mm512_unpacklo_epi16(bits(a), bits(b))); }
inline Ints interleave_high(Ints a, Ints b) {
    return ints(_mm512_unpackhi_epi16(bits(a), bits(b)));
}
inline Ints shift_words(Ints v, int n) { return ints(_mm512_srli_epi16(bits(v), n)); }
inline Ints high_bytes(Ints v) { return ints(_mm512_srai_epi16(bits(v), 8)); }

inline Ints low_bytes(Ints v) {  // (v ^ 0x80) & 0xff
    return ints(_mm512_ternarylogic_epi32(bits(v), _mm512_set1_epi16(0x80),
                                          _mm512_set1_epi16(0xff), 0x28));
}

inline Ints add_pairs(Ints sum, Ints a, Ints b) {
    return ints(add_pairs(bits(sum), bits(a), bits(b)));
}

template <int TIMES>
inline Ints spread(const int32_t* p, int64_t i) {
    const __m512i fours = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    const __m512i lanes = TIMES == 4 ? fours : _mm512_srli_epi32(fours, 1);
    const __m512i which = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(i)));
    return ints(_mm512_permutexvar_epi32(which, load_64_bytes(p)));
}

inline Ints block_products(const uint8_t* quants, const int16_t* x) {
    return ints(_mm512_madd_epi16(_mm512_cvtepi8_epi16(load_32_bytes(quants)), load_64_bytes(x)));
}

#include "k_quants.h"
#include "k_quants_x86.h"
#include "k_quants_avx512.h"
#include "rows_template.h"

}  // namespace

#ifdef __AVX512VNNI__
const Kernels kernels_avx512vnni = ALL_KERNELS;
#else
const Kernels kernels_avx512 = ALL_KERNELS;
#endif
