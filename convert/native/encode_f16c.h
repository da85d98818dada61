// The functions that encode_template.h needs, for processors with AVX2 and F16C. Included inside
// the anonymous namespace of encode_avx2.cpp and encode_avx512.cpp.

constexpr int BLOCK = 32;

inline void f16_to_floats(const uint8_t* p, float* x) {
    for (int i = 0; i < BLOCK; i += 8) {
        __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i * 2));
        _mm256_storeu_ps(x + i, _mm256_cvtph_ps(half));
    }
}

inline void floats_to_f16(const float* x, uint8_t* p) {
    for (int i = 0; i < BLOCK; i += 8) {
        __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p + i * 2), half);
    }
}

// Transposes 8 x 8 values: interleaves pairs of rows, then pairs of pairs, then exchanges 128-bit
// halves.
inline void turn_8x8(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
    __m256 row[8], pair[8];
    for (int i = 0; i < 8; ++i) row[i] = _mm256_loadu_ps(from + i * from_stride);
    for (int i = 0; i < 4; ++i) {
        pair[2 * i] = _mm256_unpacklo_ps(row[2 * i], row[2 * i + 1]);
        pair[2 * i + 1] = _mm256_unpackhi_ps(row[2 * i], row[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
        row[4 * i] = _mm256_shuffle_ps(pair[4 * i], pair[4 * i + 2], 0x44);
        row[4 * i + 1] = _mm256_shuffle_ps(pair[4 * i], pair[4 * i + 2], 0xEE);
        row[4 * i + 2] = _mm256_shuffle_ps(pair[4 * i + 1], pair[4 * i + 3], 0x44);
        row[4 * i + 3] = _mm256_shuffle_ps(pair[4 * i + 1], pair[4 * i + 3], 0xEE);
    }
    for (int i = 0; i < 4; ++i) {
        _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(row[i], row[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * to_stride, _mm256_permute2f128_ps(row[i], row[i + 4], 0x31));
    }
}

inline void turn(const float* from, float* to, int64_t size) {
    for (int64_t r = 0; r < size; r += 8)
        for (int64_t c = 0; c < size; c += 8)
            turn_8x8(from + c * size + r, size, to + r * size + c, size);
}
