// What the levels with AVX2 and with AVX-512 define in the same way for rows_template.h. The including file defines
// LANES, Floats, Bits (a vector of integers of any size) and MM(name), the intrinsic `name` on whole vectors.

typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

inline Ints ints(Bits v) { return reinterpret_cast<Ints>(v); }
inline Bits bits(Ints v) { return reinterpret_cast<Bits>(v); }

inline Floats zero() { return MM(setzero_ps)(); }
inline Floats broadcast(float f) { return MM(set1_ps)(f); }
inline Floats mul(Floats a, Floats b) { return MM(mul_ps)(a, b); }
inline Floats add_floats(Floats a, Floats b) { return MM(add_ps)(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return MM(fmadd_ps)(a, b, c); }
inline Floats fused(Floats a, Floats b, Floats c) { return MM(fmadd_ps)(a, b, c); }
inline Floats load_f32(const uint8_t* p) { return MM(loadu_ps)(reinterpret_cast<const float*>(p)); }
inline void store_f32(uint8_t* p, Floats v) { MM(storeu_ps)(reinterpret_cast<float*>(p), v); }

inline __m128i load_8_bytes(const uint8_t* p) {
    return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
}
inline __m128i load_16_bytes(const uint8_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
inline __m256i load_32_bytes(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

#ifdef LEVEL_AVX512
inline __m512i load_64_bytes(const void* p) { return _mm512_loadu_si512(p); }
inline Ints load_ints(const uint8_t* p) { return ints(load_64_bytes(p)); }
inline __m256i load_words(const uint8_t* p) { return load_32_bytes(p); }  // LANES of 16 bits
inline __m128i load_bytes(const uint8_t* p) { return load_16_bytes(p); }  // LANES of 8 bits

// 16 bytes of rows 0, 4, 8 and 12
inline Bits every_fourth(const uint8_t* const* row) {
    Bits all = _mm512_castsi128_si512(load_16_bytes(row[0]));
    all = _mm512_inserti32x4(all, load_16_bytes(row[4]), 1);
    all = _mm512_inserti32x4(all, load_16_bytes(row[8]), 2);
    return _mm512_inserti32x4(all, load_16_bytes(row[12]), 3);
}
#else
inline Ints load_ints(const uint8_t* p) { return ints(load_32_bytes(p)); }
inline __m128i load_words(const uint8_t* p) { return load_16_bytes(p); }
inline __m128i load_bytes(const uint8_t* p) { return load_8_bytes(p); }

inline Bits every_fourth(const uint8_t* const* row) {
    const Bits first = _mm256_castsi128_si256(load_16_bytes(row[0]));
    return _mm256_inserti128_si256(first, load_16_bytes(row[4]), 1);
}
#endif

inline Floats load_f16(const uint8_t* p) { return MM(cvtph_ps)(load_words(p)); }
inline Floats load_bf16(const uint8_t* p) {
    return reinterpret_cast<Floats>(MM(slli_epi32)(MM(cvtepu16_epi32)(load_words(p)), 16));
}
inline Floats load_i8(const uint8_t* p) { return MM(cvtepi32_ps)(MM(cvtepi8_epi32)(load_bytes(p))); }
inline Bits dwords_of(const uint8_t* p) { return MM(cvtepu8_epi32)(load_bytes(p)); }

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

inline Floats scale_f16(const uint8_t* p) { return MM(broadcastss_ps)(four_f16(p)); }

inline __m128 sum_halves(__m256 v) {
    return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
}
#ifdef LEVEL_AVX512
inline __m128 sum_quarters(Floats v) {
    return sum_halves(_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)));
}
#else
inline __m128 sum_quarters(Floats v) { return sum_halves(v); }
#endif

inline void store_sums(Floats a, Floats b, Floats c, Floats d, float* y) {
    const __m128 ab = _mm_hadd_ps(sum_quarters(a), sum_quarters(b));
    const __m128 cd = _mm_hadd_ps(sum_quarters(c), sum_quarters(d));
    _mm_storeu_ps(y, _mm_hadd_ps(ab, cd));
}

// The 32 bits at p in each lane. In assembly, because gcc 12 loads two adjacent ones into a general register at
// once, and spreads them by four instructions.
inline Ints broadcast_int(const void* p) {
    Bits v;
    asm("vpbroadcastd %1, %0" : "=v"(v) : "m"(*static_cast<const int32_t*>(p)));
    return ints(v);
}

inline Floats to_floats(Ints v) { return MM(cvtepi32_ps)(bits(v)); }
inline Ints to_ints(Floats v) { return ints(MM(cvtps_epi32)(v)); }
inline Ints interleave_low(Ints a, Ints b) { return ints(MM(unpacklo_epi16)(bits(a), bits(b))); }
inline Ints interleave_high(Ints a, Ints b) { return ints(MM(unpackhi_epi16)(bits(a), bits(b))); }
inline Ints shift_words(Ints v, int n) { return ints(MM(srli_epi16)(bits(v), n)); }
inline Ints high_bytes(Ints v) { return ints(MM(srai_epi16)(bits(v), 8)); }
inline Ints larger(Ints a, Ints b) { return ints(MM(max_epi32)(bits(a), bits(b))); }

inline Ints unpack_sums_32(Ints a, Ints b) {
    return ints(MM(unpacklo_epi32)(bits(a), bits(b))) + ints(MM(unpackhi_epi32)(bits(a), bits(b)));
}
inline Ints unpack_sums_64(Ints a, Ints b) {
    return ints(MM(unpacklo_epi64)(bits(a), bits(b))) + ints(MM(unpackhi_epi64)(bits(a), bits(b)));
}

// Transposes the first four 32-bit values of LANES rows: lane r of out[j] is value j of row r. Vector r is loaded
// from rows r, r + 4, ...
inline void transpose_16(const uint8_t* const* p, Ints* out) {
    Bits row[4];
    for (int r = 0; r < 4; ++r) row[r] = every_fourth(p + r);
    const Bits a = MM(unpacklo_epi32)(row[0], row[1]), b = MM(unpackhi_epi32)(row[0], row[1]);
    const Bits c = MM(unpacklo_epi32)(row[2], row[3]), d = MM(unpackhi_epi32)(row[2], row[3]);
    out[0] = ints(MM(unpacklo_epi64)(a, c)), out[1] = ints(MM(unpackhi_epi64)(a, c));
    out[2] = ints(MM(unpacklo_epi64)(b, d)), out[3] = ints(MM(unpackhi_epi64)(b, d));
}

inline Ints ints_of(Bits v) { return ints(v); }

// For coded_blocks.h and k_formats.h.
inline Ints look_up(const uint8_t* table, Ints bytes) {
#ifdef LEVEL_AVX512
    const Bits all = _mm512_broadcast_i32x4(load_16_bytes(table));
#else
    const Bits all = _mm256_broadcastsi128_si256(load_16_bytes(table));
#endif
    return ints(MM(shuffle_epi8)(all, bits(bytes)));
}

inline Ints add_to_bytes(Ints v, int n) {
    return ints(MM(add_epi8)(bits(v), MM(set1_epi8)(static_cast<char>(n))));
}

// 32 bytes and zeros.
inline Ints widened(__m256i bytes) {
#ifdef LEVEL_AVX512
    return ints(_mm512_zextsi256_si512(bytes));
#else
    return ints(bytes);
#endif
}

inline Ints nibbles_of_block(const uint8_t* p, int) {
    const __m128i low = load_16_bytes(p);
    const __m256i both =
        _mm256_inserti128_si256(_mm256_castsi128_si256(low), _mm_srli_epi16(low, 4), 1);
    return widened(_mm256_and_si256(both, _mm256_set1_epi8(15)));
}

inline Ints fifth_bits(Ints numbers, int v) {
    // Byte v / 2 of each number, four times; then the bit of its own in each of these.
    const int one = 0x01010101 * (v / 2), mask = 0x08040201 << 4 * (v % 2);
    const __m128i which = _mm_setr_epi32(one, one + 0x04040404, one + 0x08080808, one + 0x0c0c0c0c);
#ifdef LEVEL_AVX512
    const __m512i byte = _mm512_shuffle_epi8(bits(numbers), _mm512_broadcast_i32x4(which));
    return ints(_mm512_maskz_set1_epi8(_mm512_test_epi8_mask(byte, _mm512_set1_epi32(mask)), 16));
#else
    const __m256i byte = _mm256_shuffle_epi8(bits(numbers), _mm256_broadcastsi128_si256(which));
    const __m256i own = _mm256_set1_epi32(mask),
                  is_set = _mm256_cmpeq_epi8(_mm256_and_si256(byte, own), own);
    return ints(_mm256_and_si256(is_set, _mm256_set1_epi8(16)));
#endif
}

inline Ints fifths_of_block(const uint8_t* p, int) {
    int32_t number;
    __builtin_memcpy(&number, p, 4);
    const __m256i which =
        _mm256_setr_epi32(0, 0, 0x01010101, 0x01010101, 0x02020202, 0x02020202, 0x03030303, 0x03030303);
    const __m256i own = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    const __m256i byte = _mm256_shuffle_epi8(_mm256_set1_epi32(number), which);
    const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(byte, own), own);
    return widened(_mm256_and_si256(is_set, _mm256_set1_epi8(16)));
}

constexpr int FEW = LANES / 4;

#include "ahead.h"
#include "quantise.h"
