// Storage of keys and values in the cache: a row of W values per head and position, in one of the
// first five kinds. stored_rows.py is the bit-identical reference in torch.
//
// A rotated cache stores H x for x, where H is the orthonormal Hadamard matrix over the largest
// power of two that divides W (and the place of values that are a part of keys). Dot products of rotated keys and queries are unchanged, and weighted
// sums of values are rotated back by the same product (H H = 1). Rotation spreads outliers, which
// would otherwise determine the scale of their block (QuaRot, Ashkboos et al. 2024).
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "dispatch.h"

inline int64_t cache_row_bytes(int32_t kind, int64_t W) {
    return W / block_values(kind) * KINDS[kind].block_bytes;
}

// Rounded to the nearest, ties to even, as torch does.
inline uint16_t to_f16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint32_t sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
    if (bits >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // 65520 and more
    if (bits < 0x38800000) {  // subnormal in f16: adding 0.5 rounds to a multiple of 2^-24
        float magnitude;
        std::memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;
        std::memcpy(&bits, &magnitude, 4);
        return static_cast<uint16_t>(sign | (bits - 0x3f000000));
    }
    const uint32_t rounded = bits + 0xfff + (bits >> 13 & 1);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13));
}

// Likewise; NaN stays NaN.
inline uint16_t to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// 1 / scale; 0 where that is not finite in f32, because such a scale is 0 in f16.
inline float inverse_of(float scale) {
    const float inverse = 1.0f / scale;
    return std::isfinite(inverse) ? inverse : 0.0f;
}

// Quantises 32 values like ggml's quantize_row_q8_0_ref; all become NaN if one is not finite.
inline void store_q8_0(const float* x, uint8_t* to) {
    float largest = 0.0f;
    bool is_finite = true;
    for (int i = 0; i < BLOCK; ++i) {
        largest = std::max(largest, std::fabs(x[i]));
        is_finite &= std::isfinite(x[i]);
    }
    const float scale = largest / 127.0f, factor = inverse_of(scale);
    const uint16_t half = to_f16(is_finite ? scale : NAN);
    std::memcpy(to, &half, 2);
    for (int i = 0; i < BLOCK; ++i) {
        const float rounded = is_finite ? std::round(x[i] * factor) : 0.0f;
        to[2 + i] = static_cast<uint8_t>(static_cast<int8_t>(std::clamp(rounded, -127.0f, 127.0f)));
    }
}

// The same for q4_0, like quantize_row_q4_0_ref.
inline void store_q4_0(const float* x, uint8_t* to) {
    float largest = 0.0f;  // largest magnitude, with its sign
    bool is_finite = true;
    for (int i = 0; i < BLOCK; ++i) {
        if (std::fabs(x[i]) > std::fabs(largest)) largest = x[i];
        is_finite &= std::isfinite(x[i]);
    }
    const float scale = largest / -8.0f, factor = inverse_of(scale);
    const uint16_t half = to_f16(is_finite ? scale : NAN);
    std::memcpy(to, &half, 2);
    auto nibble = [&](float value) {
        const float shifted = is_finite ? value * factor + 8.5f : 8.5f;
        return static_cast<uint8_t>(std::clamp(shifted, 0.0f, 15.0f));
    };
    for (int i = 0; i < BLOCK / 2; ++i)
        to[2 + i] = static_cast<uint8_t>(nibble(x[i]) | nibble(x[i + BLOCK / 2]) << 4);
}

inline void store_cache_row(int32_t kind, const float* x, int64_t W, uint8_t* to) {
    uint16_t* half = reinterpret_cast<uint16_t*>(to);
    switch (kind) {
        case KIND_F32:
            std::memcpy(to, x, W * sizeof(float));
            break;
        case KIND_F16:
            kernels().store_f16(x, W, half);
            break;
        case KIND_BF16:
            for (int64_t i = 0; i < W; ++i) half[i] = to_bf16(x[i]);
            break;
        case KIND_Q8_0:
            for (int64_t b = 0; b < W / BLOCK; ++b) store_q8_0(x + b * BLOCK, to + b * 34);
            break;
        default:
            for (int64_t b = 0; b < W / BLOCK; ++b) store_q4_0(x + b * BLOCK, to + b * 18);
    }
}

// x [W] = H x in place: a fast Walsh-Hadamard transform per block, a power of two that divides W.
inline void turn_by_hadamard(float* x, int64_t W, int64_t block) {
    const float scale = 1.0f / std::sqrt(static_cast<float>(block));
    for (int64_t half = 1; half < block; half *= 2)
        for (int64_t i = 0; i < W; i += 2 * half)
            for (int64_t j = i; j < i + half; ++j) {
                const float a = x[j], b = x[j + half];
                x[j] = a + b, x[j + half] = a - b;
            }
    for (int64_t i = 0; i < W; ++i) x[i] *= scale;
}
