// Quantises a vector, see Input in kernels.h. Included inside the anonymous namespace of each
// rows_<level>.cpp, as rows_template.h is.

// The plain layout: int16 value[D], then float scale[D / 32], then int32 correction[D / 32], which is -8
// times the sum of a block's values; then SuperScales[D / 256]. The K-quants use it.
inline int16_t* values_of(uint8_t* packed) { return reinterpret_cast<int16_t*>(packed); }

inline const int16_t* values_of(const uint8_t* packed) {
    return reinterpret_cast<const int16_t*>(packed);
}

inline const float* scales_of(const uint8_t* packed, int64_t num_blocks) {
    return reinterpret_cast<const float*>(packed + num_blocks * BLOCK * 2);
}

inline const int32_t* corrections_of(const uint8_t* packed, int64_t num_blocks) {
    return reinterpret_cast<const int32_t*>(packed + num_blocks * BLOCK * 2 + num_blocks * 4);
}

// For eight blocks of 32 values: their scales, and scale times sum of values.
struct SuperScales {
    float scale[8], sum[8];
};

inline const SuperScales* super_scales_of(const uint8_t* packed, int64_t num_blocks) {
    return reinterpret_cast<const SuperScales*>(packed + num_blocks * (BLOCK * 2 + 8));
}

// Plain loops that the compiler vectorises: the bits of non-negative floats, read as integers, have the
// same order as the floats, and adding 1.5 * 2^23 rounds to the nearest integer.
inline void quantise_block(const float* x, int16_t* value, float* scale, int32_t* correction,
                           float limit = 32767.0f) {
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
    *scale = !is_finite ? __builtin_nanf("") : is_zero ? 0.0f : largest / limit;
    const float factor = !is_finite || is_zero ? 0.0f : limit / largest;
    int32_t total = 0;
    for (int i = 0; i < BLOCK; ++i) {
        const float shifted = (is_finite ? x[i] * factor : 0.0f) + 12582912.0f;
        int32_t bits;
        __builtin_memcpy(&bits, &shifted, 4);
        value[i] = static_cast<int16_t>(bits - 0x4b400000);
        total += bits - 0x4b400000;
    }
    *correction = -8 * total;
}

inline void quantise_vector(const float* x, int64_t D, uint8_t* packed) {
    const int64_t num_blocks = D / BLOCK;
    float* scale = const_cast<float*>(scales_of(packed, num_blocks));
    int32_t* correction = const_cast<int32_t*>(corrections_of(packed, num_blocks));
    for (int64_t b = 0; b < num_blocks; ++b)
        quantise_block(x + b * BLOCK, values_of(packed) + b * BLOCK, scale + b, correction + b);
    if (D % SUPER_BLOCK != 0) return;
    SuperScales* super = const_cast<SuperScales*>(super_scales_of(packed, num_blocks));
    for (int64_t b = 0; b < num_blocks; ++b) {
        super[b / 8].scale[b % 8] = scale[b];
        super[b / 8].sum[b % 8] = scale[b] * (-0.125f * static_cast<float>(correction[b]));
    }
}

// For the K-quants.
void quantise(const Input& x, int64_t D) {
    for (int64_t t = 0; t < x.count; ++t)
        quantise_vector(x.vector(t), D, x.packed + (x.first + t) * packed_bytes(D));
}
