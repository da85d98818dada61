#include <immintrin.h>

#include "kernels.h"

#define LEVEL_AVX2
#ifndef __AVXVNNI__
#define HAS_PANELS
#endif

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

inline Floats load_f32(const uint8_t* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }

inline void store_f32(uint8_t* p, Floats v) { _mm256_storeu_ps(reinterpret_cast<float*>(p), v); }

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

inline Floats i8_to_floats(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)); }

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
    // Converts four values, of which callers may use fewer. In assembly, because gcc 12 would load
    // them into a register first, and converting from a register takes another shuffle.
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

inline void scale_many(const uint8_t* p, int64_t m, float c, float* y) {
    int64_t i = 0;
    for (; i + 8 <= m; i += 8) _mm256_storeu_ps(y + i, mul(load_f16(p + 2 * i), broadcast(c)));
    for (; i < m; ++i) y[i] = c * f16_to_float(p + 2 * i);
}

inline __m256i load_32_bytes(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

typedef int32_t Ints __attribute__((vector_size(32)));

inline Ints ints(__m256i v) { return reinterpret_cast<Ints>(v); }
inline __m256i bits(Ints v) { return reinterpret_cast<__m256i>(v); }
inline Ints load_ints(const uint8_t* p) { return ints(load_32_bytes(p)); }
inline Ints load_some_ints(const uint8_t* p, int64_t n) {
    return n == 32 ? load_ints(p) : ints(_mm256_zextsi128_si256(load_16_bytes(p)));
}
inline Floats to_floats(Ints v) { return _mm256_cvtepi32_ps(bits(v)); }
inline Ints to_ints(Floats v) { return ints(_mm256_cvtps_epi32(v)); }
inline Ints interleave_low(Ints a, Ints b) { return ints(_mm256_unpacklo_epi16(bits(a), bits(b))); }
inline Ints interleave_high(Ints a, Ints b) { return ints(_mm256_unpackhi_epi16(bits(a), bits(b))); }
inline Ints shift_words(Ints v, int n) { return ints(_mm256_srli_epi16(bits(v), n)); }
inline Ints low_bytes(Ints v) { return (v ^ 0x00800080) & 0x00ff00ff; }
inline Ints high_bytes(Ints v) { return ints(_mm256_srai_epi16(bits(v), 8)); }

inline __m256i add_pairs(__m256i sum, __m256i a, __m256i b) {
#ifdef __AVXVNNI__
    return _mm256_dpwssd_avx_epi32(sum, a, b);
#else
    return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
#endif
}

inline Ints add_pairs(Ints sum, Ints a, Ints b) { return ints(add_pairs(bits(sum), bits(a), bits(b))); }

inline Ints larger(Ints a, Ints b) { return ints(_mm256_max_epi32(bits(a), bits(b))); }

template <class Op>
inline Ints over_lanes(Ints v, const Op& op) {
    v = op(v, ints(_mm256_permute2x128_si256(bits(v), bits(v), 1)));
    v = op(v, ints(_mm256_shuffle_epi32(bits(v), 0x4e)));
    return op(v, ints(_mm256_shuffle_epi32(bits(v), 0xb1)));
}

template <int TIMES>
inline Ints spread(const int32_t* p, int64_t i) {
    if (TIMES == 8) return ints(_mm256_set1_epi32(p[i]));
    int64_t two;
    __builtin_memcpy(&two, p + i, 8);
    return ints(_mm256_castps_si256(_mm256_permutevar_ps(_mm256_castsi256_ps(_mm256_set1_epi64x(two)),
                                                         _mm256_set_epi32(1, 1, 1, 1, 0, 0, 0, 0))));
}

constexpr int FEW = LANES / 4;

#ifdef HAS_PANELS
// Bytes FIRST and FIRST + 1 of each lane as two words, times 256 if IS_RAISED.
template <int FIRST, bool IS_RAISED>
inline __m256i words_of(Ints bytes) {
    constexpr uint32_t step = IS_RAISED ? 0x01000100 : 0x00010001;
    constexpr uint32_t first = (IS_RAISED ? 0x01800080 : 0x80018000) + FIRST * step;
    constexpr int a = first, b = first + 4 * step, c = first + 8 * step, d = first + 12 * step;
    return _mm256_shuffle_epi8(bits(bytes), _mm256_setr_epi32(a, b, c, d, a, b, c, d));
}

inline void signed_words(Ints bytes, Ints* w) {
    w[0] = high_bytes(ints(words_of<0, true>(bytes)));
    w[1] = high_bytes(ints(words_of<2, true>(bytes)));
}

inline void unsigned_words(Ints bytes, Ints* w) {
    w[0] = ints(words_of<0, false>(bytes));
    w[1] = ints(words_of<2, false>(bytes));
}
#endif

inline Floats add_floats(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats fused(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }

// Loads 16 bytes of rows r and r + 4 into each vector, then transposes pieces of 32 bits.
inline void transpose_16(const uint8_t* const* p, Ints* out) {
    __m256i row[4];
    for (int r = 0; r < 4; ++r)
        row[r] = _mm256_inserti128_si256(_mm256_castsi128_si256(load_16_bytes(p[r])),
                                         load_16_bytes(p[r + 4]), 1);
    const __m256i a = _mm256_unpacklo_epi32(row[0], row[1]);
    const __m256i b = _mm256_unpackhi_epi32(row[0], row[1]);
    const __m256i c = _mm256_unpacklo_epi32(row[2], row[3]);
    const __m256i d = _mm256_unpackhi_epi32(row[2], row[3]);
    out[0] = ints(_mm256_unpacklo_epi64(a, c));
    out[1] = ints(_mm256_unpackhi_epi64(a, c));
    out[2] = ints(_mm256_unpacklo_epi64(b, d));
    out[3] = ints(_mm256_unpackhi_epi64(b, d));
}

inline Ints products(__m256i first, __m256i last, const int16_t* x) {
    return ints(add_pairs(_mm256_madd_epi16(first, load_32_bytes(x)), last, load_32_bytes(x + 16)));
}

inline Ints products_q8(const uint8_t* quants, const int16_t* x) {
    return products(_mm256_cvtepi8_epi16(load_16_bytes(quants)),
                    _mm256_cvtepi8_epi16(load_16_bytes(quants + 16)), x);
}

inline Ints products_q4(const uint8_t* nibbles, const int16_t* x) {
    const __m256i words = _mm256_cvtepu8_epi16(load_16_bytes(nibbles));
    return products(_mm256_and_si256(words, _mm256_set1_epi16(15)), _mm256_srli_epi16(words, 4), x);
}

inline Ints unpack_sums_32(Ints a, Ints b) {
    return ints(_mm256_add_epi32(_mm256_unpacklo_epi32(bits(a), bits(b)),
                                 _mm256_unpackhi_epi32(bits(a), bits(b))));
}

inline Ints unpack_sums_64(Ints a, Ints b) {
    return ints(_mm256_add_epi32(_mm256_unpacklo_epi64(bits(a), bits(b)),
                                 _mm256_unpackhi_epi64(bits(a), bits(b))));
}

inline Ints reduce(const Ints (*s)[4]) {
    Ints half[FEW];
    for (int r = 0; r < FEW; ++r)
        half[r] = unpack_sums_64(unpack_sums_32(s[r][0], s[r][1]), unpack_sums_32(s[r][2], s[r][3]));
    return ints(_mm256_add_epi32(_mm256_permute2x128_si256(bits(half[0]), bits(half[1]), 0x20),
                                 _mm256_permute2x128_si256(bits(half[0]), bits(half[1]), 0x31)));
}

inline Ints few_corrections(const int32_t* four) {
    return ints(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(four))));
}

inline Floats few_factors(const uint8_t* const* scale, int64_t m, const float* x_scale) {
    const __m128i there = _mm_set1_epi64x(m < 4 ? (1ll << 16 * m) - 1 : -1ll);
    const __m128i both =
        _mm_and_si128(there, _mm_unpacklo_epi64(load_8_bytes(scale[0]), load_8_bytes(scale[1])));
    return mul(_mm256_cvtph_ps(both), _mm256_broadcast_ps(reinterpret_cast<const __m128*>(x_scale)));
}

#ifdef __AVXVNNI__
#include "blocks_avxvnni.h"
#else
#include "blocks_madd.h"
#endif
#include "k_quants.h"
#include "k_quants_x86.h"
#include "k_quants_avx2.h"
#include "rows_template.h"

}  // namespace

#ifdef __AVXVNNI__
const Kernels kernels_avxvnni = ALL_KERNELS;
#else
const Kernels kernels_avx2 = ALL_KERNELS;
#endif
