#include "encode.h"

namespace {

constexpr int BLOCK = 32;

inline float f16_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
    const uint32_t rest = static_cast<uint32_t>(half & 0x7FFF) << 13;  // exponent biased by 15
    uint32_t bits;
    float f;
    if (rest >= 0x0F800000) {  // infinity and NaN
        bits = rest + 0x70000000;
        __builtin_memcpy(&f, &bits, 4);
    } else {  // 2^112 converts the bias, for denormals too
        __builtin_memcpy(&f, &rest, 4);
        f *= 0x1p112f;
    }
    __builtin_memcpy(&bits, &f, 4);
    bits |= sign;
    __builtin_memcpy(&f, &bits, 4);
    return f;
}

// Rounds to nearest even, for magnitudes below 65520.
inline uint16_t float_to_f16(float f) {
    uint32_t bits;
    __builtin_memcpy(&bits, &f, 4);
    const uint32_t sign = (bits >> 16) & 0x8000;
    bits &= 0x7FFFFFFF;
    if (bits < 0x38800000) {  // below 2^-14: adding 0.5 leaves the denormal in the last ten bits
        float magnitude;
        __builtin_memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;
        __builtin_memcpy(&bits, &magnitude, 4);
        return static_cast<uint16_t>(sign | (bits - 0x3F000000));
    }
    bits += 0xC8000FFF + ((bits >> 13) & 1);  // the bias from 127 to 15, and rounding
    return static_cast<uint16_t>(sign | (bits >> 13));
}

inline void f16_to_floats(const uint8_t* p, float* x) {
    uint16_t half[BLOCK];
    __builtin_memcpy(half, p, sizeof half);
    for (int i = 0; i < BLOCK; ++i) x[i] = f16_to_float(half[i]);
}

inline void floats_to_f16(const float* x, uint8_t* p) {
    uint16_t half[BLOCK];
    for (int i = 0; i < BLOCK; ++i) half[i] = float_to_f16(x[i]);
    __builtin_memcpy(p, half, sizeof half);
}

inline void turn(const float* from, float* to, int64_t size) {
    for (int64_t r = 0; r < size; ++r)
        for (int64_t c = 0; c < size; ++c) to[r * size + c] = from[c * size + r];
}

#include "encode_template.h"

}  // namespace

const Encoders encoders_generic = ENCODERS;
