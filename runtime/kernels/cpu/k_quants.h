// Included inside the anonymous namespace of each rows_<level>.cpp, before the level's K-quants.

// Makes the compiler store the numbers, so that it later broadcasts them from memory: such a
// broadcast is part of the load, one from a register uses the shuffle port.
template <class T>
inline void keep_in_memory(T& numbers) {
    asm("" : "+m"(numbers));
}

// Packed x of eight blocks of 32 values, as for q8_0 (PackedBlocks in blocks_template.h).
struct SuperX {
    const uint8_t* values;  // units are `stride` bytes apart
    int64_t stride;
    const float* scale;              // [8]
    const int32_t *sum, *first_sum;  // [8] of each block's values, and of its first 16
};

// A pair of parts that share bytes. A block has four pairs.
struct Parts {
    int first, second;
};

// The factors of the parts, or of their halves, and the minima, which are subtracted from the values.
struct Factors {
    float factor[16], minimum[16];
};

inline float mul(float a, float b) { return a * b; }
inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#ifdef LEVEL_AVX512
inline __m256 mul(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
inline __m256 fused(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
#endif

inline int32_t look_up(const uint8_t* table, int32_t bytes) {
    uint8_t four[4];
    __builtin_memcpy(four, &bytes, 4);
    for (uint8_t& byte : four) byte = table[byte];
    __builtin_memcpy(&bytes, four, 4);
    return bytes;
}
#ifdef LEVEL_AVX512
typedef int32_t EightInts __attribute__((vector_size(32)));
inline EightInts look_up(const uint8_t* table, EightInts bytes) {
    const __m256i all = _mm256_broadcastsi128_si256(load_16_bytes(table));
    return reinterpret_cast<EightInts>(_mm256_shuffle_epi8(all, reinterpret_cast<__m256i>(bytes)));
}
#elif defined(LEVEL_AVX2)
typedef Ints EightInts;
#endif

#include "k_tiles.h"

#include "k_formats.h"
