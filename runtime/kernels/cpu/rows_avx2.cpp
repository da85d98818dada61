#include <immintrin.h>

#include "kernels.h"

#define LEVEL_AVX2

namespace {

constexpr int LANES = 8;
typedef __m256 Floats;

inline Floats zero() { return _mm256_setzero_ps(); }
inline Floats broadcast(float f) { return _mm256_set1_ps(f); }
inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }

inline float sum(Floats v) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline Floats load_f32(const uint8_t* p) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
}

inline void store_f32(uint8_t* p, Floats v) { _mm256_storeu_ps(reinterpret_cast<float*>(p), v); }

inline void store_bf16(uint8_t* p, Floats v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
    const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(high),
                                            _mm256_extracti128_si256(high, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), halves);
}

inline __m128i load_16_bytes(const uint8_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}

inline __m128i load_8_bytes(const uint8_t* p) {
    return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
}

inline Floats load_f16(const uint8_t* p) { return _mm256_cvtph_ps(load_16_bytes(p)); }

inline Floats load_bf16(const uint8_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_16_bytes(p)), 16));
}

inline Floats i8_to_floats(__m128i bytes) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}

inline Floats load_i8(const uint8_t* p) { return i8_to_floats(load_8_bytes(p)); }

inline void unpack_q4(const uint8_t* p, Floats* w) {
    const __m128i fifteen = _mm_set1_epi8(15), eight = _mm_set1_epi8(8);
    __m128i bytes = load_16_bytes(p);
    __m128i low = _mm_sub_epi8(_mm_and_si128(bytes, fifteen), eight);
    __m128i high = _mm_sub_epi8(_mm_and_si128(_mm_srli_epi16(bytes, 4), fifteen), eight);
    w[0] = i8_to_floats(low);
    w[1] = i8_to_floats(_mm_srli_si128(low, 8));
    w[2] = i8_to_floats(high);
    w[3] = i8_to_floats(_mm_srli_si128(high, 8));
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

inline Floats scale_f16(const uint8_t* p) { return _mm256_broadcastss_ps(four_f16(p)); }

inline __m128 sum_halves(Floats v) {
    return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
}

inline void store_sums(Floats a, Floats b, Floats c, Floats d, float* y) {
    const __m128 ab = _mm_hadd_ps(sum_halves(a), sum_halves(b));
    const __m128 cd = _mm_hadd_ps(sum_halves(c), sum_halves(d));
    _mm_storeu_ps(y, _mm_hadd_ps(ab, cd));
}

#include "ahead.h"
#include "quantise.h"

constexpr Quantise* quantise_q4 = quantise;
constexpr Quantise* quantise_q4_planar = quantise;

inline void scale_many(const uint8_t* p, int64_t m, float c, float* y) {
    int64_t i = 0;
    for (; i + 8 <= m; i += 8) _mm256_storeu_ps(y + i, mul(load_f16(p + 2 * i), broadcast(c)));
    for (; i < m; ++i) y[i] = c * f16_to_float(p + 2 * i);
}

inline __m256i load_32_bytes(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

// start + first . x[0..15] + second . x[16..31], times the scales
inline Floats add_products(Floats sum, __m256i first, __m256i second, const int16_t* x,
                           __m256i start, const uint8_t* scale, const float* x_scale) {
    const __m256i products = _mm256_add_epi32(_mm256_madd_epi16(first, load_32_bytes(x)),
                                              _mm256_madd_epi16(second, load_32_bytes(x + 16)));
    const __m256 factor = _mm256_mul_ps(scale_f16(scale), _mm256_broadcast_ss(x_scale));
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_add_epi32(products, start)), factor, sum);
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
        for (int r = 0; r < ROWS; ++r) {
            const uint8_t* block = rows[r] + b * 34;
            sums[r] = add_products(sums[r], _mm256_cvtepi8_epi16(load_16_bytes(block + 2)),
                                   _mm256_cvtepi8_epi16(load_16_bytes(block + 18)), x + b * BLOCK,
                                   _mm256_setzero_si256(), block, x_scale + b);
        }
    }
    for (int r = 0; r < ROWS; ++r) y[r] = sum(sums[r]);
}

template <class Layout, int ROWS>
inline void dot_q4(const uint8_t* const* rows, const uint8_t* const* next, int64_t n,
                   const uint8_t* packed, float* y) {
    const int16_t* x = values_of(packed);
    const float* x_scale = scales_of(packed, n);
    const int32_t* correction = corrections_of(packed, n);
    const __m256i fifteen = _mm256_set1_epi16(15);
    Floats sums[ROWS];
    for (Floats& sum : sums) sum = zero();
    Ahead<ROWS> ahead(next, n * 18, (n + 3) / 4);
    for (int64_t b = 0; b < n; ++b) {
        if (b % 4 == 0) ahead.ask();
        const __m256i start = _mm256_inserti128_si256(_mm256_setzero_si256(),
                                                      _mm_cvtsi32_si128(correction[b]), 0);
        for (int r = 0; r < ROWS; ++r) {
            const uint8_t* nibbles = Layout::quants(rows[r], n, b);
            const __m256i words = _mm256_cvtepu8_epi16(load_16_bytes(nibbles));
            sums[r] = add_products(sums[r], _mm256_and_si256(words, fifteen),
                                   _mm256_srli_epi16(words, 4), x + b * BLOCK, start,
                                   Layout::scale(rows[r], n, b), x_scale + b);
        }
    }
    for (int r = 0; r < ROWS; ++r) y[r] = sum(sums[r]);
}

template <int64_t BYTES>
struct Planar;

template <int ROWS>
inline void dot_q4_planar(const uint8_t* const* rows, const uint8_t* const* next, int64_t n,
                          const uint8_t* x, float* y) {
    dot_q4<Planar<16>, ROWS>(rows, next, n, x, y);
}

typedef int32_t Ints __attribute__((vector_size(32)));

inline Ints ints(__m256i v) { return reinterpret_cast<Ints>(v); }
inline __m256i bits(Ints v) { return reinterpret_cast<__m256i>(v); }
inline Ints load_ints(const uint8_t* p) { return ints(load_32_bytes(p)); }
inline Floats to_floats(Ints v) { return _mm256_cvtepi32_ps(bits(v)); }
inline Ints to_ints(Floats v) { return ints(_mm256_cvtps_epi32(v)); }
inline Ints interleave_low(Ints a, Ints b) { return ints(_mm256_unpacklo_epi16(bits(a), bits(b))); }
inline Ints interleave_high(Ints a, Ints b) {
    return ints(_mm256_unpackhi_epi16(bits(a), bits(b)));
}
inline Ints shift_words(Ints v, int n) { return ints(_mm256_srli_epi16(bits(v), n)); }
inline Ints low_bytes(Ints v) { return (v ^ 0x00800080) & 0x00ff00ff; }
inline Ints high_bytes(Ints v) { return ints(_mm256_srai_epi16(bits(v), 8)); }

inline Ints add_pairs(Ints sum, Ints a, Ints b) {
    return sum + ints(_mm256_madd_epi16(bits(a), bits(b)));
}

template <int TIMES>
inline Ints spread(const int32_t* p, int64_t i) {
    if (TIMES == 8) return ints(_mm256_set1_epi32(p[i]));
    const __m256i lanes = _mm256_set_epi32(1, 1, 1, 1, 0, 0, 0, 0);
    const __m256i which = _mm256_add_epi32(lanes, _mm256_set1_epi32(static_cast<int>(i % 8)));
    return ints(_mm256_permutevar8x32_epi32(load_32_bytes(p + i / 8 * 8), which));
}

inline Ints block_products(const uint8_t* quants, const int16_t* x) {
    const __m256i first = _mm256_cvtepi8_epi16(load_16_bytes(quants));
    const __m256i second = _mm256_cvtepi8_epi16(load_16_bytes(quants + 16));
    return ints(_mm256_add_epi32(_mm256_madd_epi16(first, load_32_bytes(x)),
                                 _mm256_madd_epi16(second, load_32_bytes(x + 16))));
}

#include "k_quants.h"
#include "k_quants_x86.h"
#include "k_quants_avx2.h"
#include "rows_template.h"

}  // namespace

const Kernels kernels_avx2 = ALL_KERNELS;
