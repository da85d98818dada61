// The K-quants for rows_generic.cpp; see k_quants_template.h.

// Eight 6-bit scales and minima from the 12 bytes of a q4_K or q5_K block: the first four of each
// are in the low six bits of bytes 0-3 and 4-7, the others in the nibbles of bytes 8-11 with their
// upper two bits at the top of bytes 0-3 and 4-7.
inline void factors_with_minima(const uint8_t* block, float c, float* factor, float* minimum) {
    const float d = c * f16_to_float(block), m = c * f16_to_float(block + 2);
    const uint8_t* p = block + 4;
    for (int i = 0; i < 4; ++i) {
        factor[i] = d * static_cast<float>(p[i] & 63);
        factor[i + 4] = d * static_cast<float>((p[i + 8] & 15) | (p[i] >> 6 << 4));
        minimum[i] = m * static_cast<float>(p[i + 4] & 63);
        minimum[i + 4] = m * static_cast<float>((p[i + 8] >> 4) | (p[i + 4] >> 6 << 4));
    }
}

inline void factors_of_q6_k(const uint8_t* block, float c, float* factor) {
    const int8_t* scales = reinterpret_cast<const int8_t*>(block + 192);
    const float d = c * f16_to_float(block + 208);
    for (int i = 0; i < 16; ++i) factor[i] = d * static_cast<float>(scales[i]);
}

inline Floats four(const int32_t* q) {
    return __builtin_convertvector((Ints{q[0], q[1], q[2], q[3]}), Floats);
}

// 64 nibbles of a block with the bits above them, as integers.
template <class Above>
inline void unpack_nibbles(const uint8_t* quants, const Above& above, int32_t* q) {
    for (int i = 0; i < 32; ++i) {
        q[i] = (quants[i] & 15) + above(i, 0);
        q[i + 32] = (quants[i] >> 4) + above(i, 1);
    }
}

inline void ints_of_q5_k(const uint8_t* quants, const uint8_t* bits, int part, int32_t* q) {
    unpack_nibbles(
        quants, [=](int i, int high) { return (bits[i] >> (part + high) & 1) << 4; }, q);
}

inline void ints_of_q6_k(const uint8_t* quants, const uint8_t* bits, int part, int32_t* q) {
    unpack_nibbles(
        quants, [=](int i, int high) { return ((bits[i] >> (2 * part + 4 * high) & 3) << 4) - 32; },
        q);
}

inline void unpack_q4_k(const uint8_t* quants, Floats* w) {
    int32_t q[64];
    unpack_nibbles(quants, [](int, int) { return 0; }, q);
    for (int v = 0; v < 16; ++v) w[v] = four(q + 4 * v);
}

inline void unpack_q5_k(const uint8_t* quants, const uint8_t* bits, int part, Floats* w) {
    int32_t q[64];
    ints_of_q5_k(quants, bits, part, q);
    for (int v = 0; v < 16; ++v) w[v] = four(q + 4 * v);
}

inline void unpack_q6_k(const uint8_t* quants, const uint8_t* bits, int part, Floats* w) {
    int32_t q[64];
    ints_of_q6_k(quants, bits, part, q);
    for (int v = 0; v < 16; ++v) w[v] = four(q + 4 * v);
}

inline int32_t product_of(const int32_t* q, const int16_t* x, int count) {
    int32_t product = 0;
    for (int i = 0; i < count; ++i) product += q[i] * x[i];
    return product;
}

// For q4_K and q5_K; unpack(block, pair, q) gives 64 integers.
template <class Unpack>
inline float dot_with_minima(const uint8_t* row, int64_t block_bytes, int64_t n,
                             const uint8_t* packed, const uint8_t* next, const Unpack& unpack) {
    const int16_t* x = values_of(packed);
    const SuperScales* scales = super_scales_of(packed, n);
    float sum = 0;
    for (int64_t b = 0; b < n / 8; ++b, x += SUPER_BLOCK) {
        const uint8_t* block = row + b * block_bytes;
        for (int64_t line = 0; line < block_bytes; line += 64)
            __builtin_prefetch(next + b * block_bytes + line);
        float factor[8], minimum[8];
        factors_with_minima(block, 1.0f, factor, minimum);
        for (int pair = 0; pair < 4; ++pair) {
            int32_t q[64];
            unpack(block, pair, q);
            for (int part = 2 * pair; part < 2 * pair + 2; ++part) {
                const int32_t product = product_of(q + part % 2 * 32, x + part * BLOCK, 32);
                sum += static_cast<float>(product) * (factor[part] * scales[b].scale[part]);
                sum -= minimum[part] * scales[b].sum[part];
            }
        }
    }
    return sum;
}

inline float dot_q4_k(const uint8_t* row, int64_t n, const uint8_t* x, const uint8_t* next) {
    return dot_with_minima(row, 144, n, x, next, [](const uint8_t* block, int pair, int32_t* q) {
        unpack_nibbles(block + 16 + 32 * pair, [](int, int) { return 0; }, q);
    });
}

inline float dot_q5_k(const uint8_t* row, int64_t n, const uint8_t* x, const uint8_t* next) {
    return dot_with_minima(row, 176, n, x, next, [](const uint8_t* block, int pair, int32_t* q) {
        ints_of_q5_k(block + 48 + 32 * pair, block + 16, 2 * pair, q);
    });
}

inline float dot_q6_k(const uint8_t* row, int64_t n, const uint8_t* packed, const uint8_t* next) {
    const int16_t* x = values_of(packed);
    const SuperScales* scales = super_scales_of(packed, n);
    float sum = 0;
    for (int64_t b = 0; b < n / 8; ++b, x += SUPER_BLOCK) {
        const uint8_t* block = row + b * 210;
        for (int64_t line = 0; line < 210; line += 64) __builtin_prefetch(next + b * 210 + line);
        float factor[16];
        factors_of_q6_k(block, 1.0f, factor);
        for (int pair = 0; pair < 4; ++pair) {
            int32_t q[64];
            ints_of_q6_k(block + 32 * pair, block + 128 + pair / 2 * 32, pair % 2, q);
            for (int i = 0; i < 4; ++i) {  // 16 values with one scale
                const int part = pair / 2 * 4 + pair % 2 + i / 2 * 2, at = i % 2;
                const int32_t product = product_of(q + 16 * i, x + part * BLOCK + 16 * at, 16);
                sum += static_cast<float>(product) *
                       (factor[2 * part + at] * scales[b].scale[part]);
            }
        }
    }
    return sum;
}
