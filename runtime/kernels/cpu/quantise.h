// Quantises blocks of a vector, see Input in kernels.h. Included inside the anonymous namespace of
// each rows_<level>.cpp, as rows_template.h is.

// Plain loops that the compiler vectorises: the bits of non-negative floats, read as integers, have the
// same order as the floats, and adding 1.5 * 2^23 rounds to the nearest integer.
inline void quantise_block(const float* x, int16_t* value, float* scale) {
    constexpr float LARGEST = 32639.0f;
    uint32_t largest_bits = 0;
    for (int i = 0; i < BLOCK; ++i) {
        uint32_t bits;
        __builtin_memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        largest_bits = largest_bits > bits ? largest_bits : bits;
    }
    float largest;
    __builtin_memcpy(&largest, &largest_bits, 4);
    const bool is_finite = largest_bits < 0x7f800000, is_zero = largest < 1e-30f;
    *scale = !is_finite ? __builtin_nanf("") : is_zero ? 0.0f : largest / LARGEST;
    const float factor = !is_finite || is_zero ? 0.0f : LARGEST / largest;
    for (int i = 0; i < BLOCK; ++i) {
        const float shifted = (is_finite ? x[i] * factor : 0.0f) + 12582912.0f;
        int32_t bits;
        __builtin_memcpy(&bits, &shifted, 4);
        value[i] = static_cast<int16_t>(bits - 0x4b400000);
    }
}

inline int32_t total_of(const int16_t* value, int64_t n) {
    int32_t total = 0;
    for (int64_t i = 0; i < n; ++i) total += value[i];
    return total;
}
