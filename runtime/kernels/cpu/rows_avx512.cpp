// Also included by rows_avx512vnni.cpp, rows_avx512bf16.cpp, rows_amx.cpp and rows_grids.cpp, which are compiled with more
// instructions.
#include <immintrin.h>

#include "kernels.h"

#define LEVEL_AVX512

namespace {

#define MM(name) _mm512_##name
constexpr int LANES = 16;
typedef __m512 Floats;
typedef __m512i Bits;

#include "x86.h"

#ifdef HAS_BF16_PAIRS
typedef __m512bh Pairs;  // 16 pairs of bf16; see bf16_pairs.h
inline Floats multiply_add(Pairs a, Pairs b, Floats c) { return _mm512_dpbf16_ps(c, a, b); }
#endif
inline float sum(Floats v) { return _mm512_reduce_add_ps(v); }
// A permutation of 16 floats uses only the low four bits of each lane, so it serves as a table from
// nibble to value without a mask.
inline void unpack_q4(const uint8_t* p, Floats* w) {
    const __m512 values = _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
    __m512i bytes = _mm512_cvtepu8_epi32(load_16_bytes(p));
    w[0] = _mm512_permutexvar_ps(bytes, values);
    w[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), values);
}

// store_sums() for four times four vectors, with the same additions: y[q * stride + j] = sum(v[q][j]).
inline void store_sixteen_sums(const Floats (&v)[4][4], float* y, int64_t stride) {
    Floats column[4];  // four partial sums of each q
    for (int j = 0; j < 4; ++j) {
        const Floats ab = _mm512_add_ps(_mm512_shuffle_f32x4(v[0][j], v[1][j], 0x44),
                                        _mm512_shuffle_f32x4(v[0][j], v[1][j], 0xee));
        const Floats cd = _mm512_add_ps(_mm512_shuffle_f32x4(v[2][j], v[3][j], 0x44),
                                        _mm512_shuffle_f32x4(v[2][j], v[3][j], 0xee));
        column[j] =
            _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    }
    auto pairs = [](Floats a, Floats b) {
        return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
    };
    const Floats all = pairs(pairs(column[0], column[1]), pairs(column[2], column[3]));
    _mm_storeu_ps(y, _mm512_castps512_ps128(all));
    _mm_storeu_ps(y + stride, _mm512_extractf32x4_ps(all, 1));
    _mm_storeu_ps(y + 2 * stride, _mm512_extractf32x4_ps(all, 2));
    _mm_storeu_ps(y + 3 * stride, _mm512_extractf32x4_ps(all, 3));
}

inline Floats add_products(Floats sum, __m512i products, Floats scale) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(products), scale, sum);
}

inline __m512i add_pairs(__m512i sum, __m512i a, __m512i b) {
#ifdef __AVX512VNNI__
    return _mm512_dpwssd_epi32(sum, a, b);
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
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

inline Ints load_some_ints(const uint8_t* p, int64_t n) {
    return n == 64 ? load_ints(p) : ints(_mm512_maskz_loadu_epi32(first_of_16(n / 4), p));
}
inline Ints low_bytes(Ints v) {  // (v ^ 0x80) & 0xff
    return ints(
        _mm512_ternarylogic_epi32(bits(v), _mm512_set1_epi16(0x80), _mm512_set1_epi16(0xff), 0x28));
}

inline Ints add_pairs(Ints sum, Ints a, Ints b) { return ints(add_pairs(bits(sum), bits(a), bits(b))); }

template <class Op>
inline Ints over_lanes(Ints v, const Op& op) {
    v = op(v, ints(_mm512_shuffle_i32x4(bits(v), bits(v), 0x4e)));
    v = op(v, ints(_mm512_shuffle_i32x4(bits(v), bits(v), 0xb1)));
    v = op(v, ints(_mm512_shuffle_epi32(bits(v), static_cast<_MM_PERM_ENUM>(0x4e))));
    return op(v, ints(_mm512_shuffle_epi32(bits(v), static_cast<_MM_PERM_ENUM>(0xb1))));
}

template <int TIMES>
inline Ints spread(const int32_t* p, int64_t i) {
    const __m512i fours = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    const __m512i lanes = TIMES == 4 ? fours : _mm512_srli_epi32(fours, 1);
    const __m512i which = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(i)));
    return ints(_mm512_permutexvar_epi32(which, load_64_bytes(p)));
}

// The scales of FEW rows, four of each.
inline __m256i sixteen_scales(const uint8_t* const* scale) {
    __m128i half[2];
    for (int i = 0; i < 2; ++i)
        half[i] = _mm_unpacklo_epi64(load_8_bytes(scale[2 * i]), load_8_bytes(scale[2 * i + 1]));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(half[0]), half[1], 1);
}

#ifdef __AVX512VNNI__
// The lanes for FEW rows are ordered by block, then by row.
inline Ints few_corrections(const int32_t* four) {
    const __m512i lanes = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    return ints(_mm512_permutexvar_epi32(
        lanes, _mm512_castsi128_si512(load_16_bytes(reinterpret_cast<const uint8_t*>(four)))));
}

inline __m512i lanes_of_rows() {
    return _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
}

inline Floats few_numbers(const float (*number)[4]) {
    return _mm512_permutexvar_ps(lanes_of_rows(), _mm512_loadu_ps(number[0]));
}

inline Floats few_scales(const uint8_t* const* scale, int64_t m) {
    return _mm512_maskz_permutexvar_ps(first_of_16(4 * m), lanes_of_rows(),
                                       _mm512_cvtph_ps(sixteen_scales(scale)));
}

inline Floats few_factors(const uint8_t* const* scale, int64_t m, const float* x_scale) {
    const Ints spread = few_corrections(reinterpret_cast<const int32_t*>(x_scale));
    return mul(few_scales(scale, m), reinterpret_cast<Floats>(spread));
}

#include "blocks_vnni.h"
#else
inline Ints products_q8(const uint8_t* quants, const int16_t* x) {
    return ints(_mm512_madd_epi16(_mm512_cvtepi8_epi16(load_32_bytes(quants)), load_64_bytes(x)));
}

inline Ints products_q4(const uint8_t* nibbles, const int16_t* x) {
    const __m256i words = _mm256_cvtepu8_epi16(load_16_bytes(nibbles));
    const __m256i low = _mm256_and_si256(words, _mm256_set1_epi16(15));
    const __m512i both =
        _mm512_inserti64x4(_mm512_castsi256_si512(low), _mm256_srli_epi16(words, 4), 1);
    return ints(_mm512_madd_epi16(both, load_64_bytes(x)));
}

template <int FIRST, int SECOND>
inline Ints quarter_sums(Ints a, Ints b) {
    return ints(_mm512_add_epi32(_mm512_shuffle_i32x4(bits(a), bits(b), FIRST),
                                 _mm512_shuffle_i32x4(bits(a), bits(b), SECOND)));
}

inline Ints reduce(const Ints (*s)[4]) {
    Ints quarters[FEW];
    for (int r = 0; r < FEW; ++r)
        quarters[r] =
            unpack_sums_64(unpack_sums_32(s[r][0], s[r][1]), unpack_sums_32(s[r][2], s[r][3]));
    return quarter_sums<0x88, 0xdd>(quarter_sums<0x44, 0xee>(quarters[0], quarters[1]),
                                    quarter_sums<0x44, 0xee>(quarters[2], quarters[3]));
}

inline Ints few_corrections(const int32_t* four) {
    return ints(_mm512_broadcast_i32x4(load_16_bytes(reinterpret_cast<const uint8_t*>(four))));
}

inline Floats few_numbers(const float (*number)[4]) { return _mm512_loadu_ps(number[0]); }

inline Floats few_factors(const uint8_t* const* scale, int64_t m, const float* x_scale) {
    const __mmask16 there = static_cast<__mmask16>(0x1111 * ((1 << m) - 1));
    return mul(_mm512_maskz_cvtph_ps(there, sixteen_scales(scale)),
               _mm512_broadcast_f32x4(_mm_loadu_ps(x_scale)));
}

#include "blocks_madd.h"
#endif

#include "k_quants.h"
#include "k_quants_x86.h"
#include "rows_template.h"

}  // namespace

#if defined(LEVEL_GRIDS)  // has some kernels only
#elif defined(LEVEL_AMX)
const Kernels kernels_amx = ALL_KERNELS;
#elif defined(LEVEL_AVX512BF16)
const Kernels kernels_avx512bf16 = ALL_KERNELS;
#elif defined(__AVX512VNNI__)
const Kernels kernels_avx512vnni = ALL_KERNELS;
#else
const Kernels kernels_avx512 = ALL_KERNELS;
#endif
