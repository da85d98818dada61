#include <immintrin.h>

#include "kernels.h"

#define LEVEL_AVX2
#ifndef __AVXVNNI__
#define HAS_PANELS
#endif

namespace {

#define MM(name) _mm256_##name
constexpr int LANES = 8;
typedef __m256 Floats;
typedef __m256i Bits;

#include "x86.h"

inline float sum(Floats v) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline Floats i8_to_floats(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)); }

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

inline void scale_many(const uint8_t* p, int64_t m, float c, float* y) {
    int64_t i = 0;
    for (; i + 8 <= m; i += 8) _mm256_storeu_ps(y + i, mul(load_f16(p + 2 * i), broadcast(c)));
    for (; i < m; ++i) y[i] = c * f16_to_float(p + 2 * i);
}

inline Ints load_some_ints(const uint8_t* p, int64_t n) {
    return n == 32 ? load_ints(p) : ints(_mm256_zextsi128_si256(load_16_bytes(p)));
}
inline Ints low_bytes(Ints v) { return (v ^ 0x00800080) & 0x00ff00ff; }
inline __m256i add_pairs(__m256i sum, __m256i a, __m256i b) {
#ifdef __AVXVNNI__
    return _mm256_dpwssd_avx_epi32(sum, a, b);
#else
    return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
#endif
}

inline Ints add_pairs(Ints sum, Ints a, Ints b) { return ints(add_pairs(bits(sum), bits(a), bits(b))); }

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

inline Floats few_numbers(const float (*number)[4]) { return _mm256_loadu_ps(number[0]); }

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
#include "rows_template.h"

}  // namespace

#ifdef __AVXVNNI__
const Kernels kernels_avxvnni = ALL_KERNELS;
#else
const Kernels kernels_avx2 = ALL_KERNELS;
#endif
