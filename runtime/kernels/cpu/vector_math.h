// Small loops over vectors in cache: norms, rotary embedding, half precision.
#pragma once
#include <stdint.h>

#include <cmath>
#include <cstring>

// Sixteen interleaved sums, so that the compiler can vectorise them.
template <class Term>
inline float sum_of(int64_t n, const Term& term) {
    float sums[16] = {};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int lane = 0; lane < 16; ++lane) sums[lane] += term(i + lane);
    for (; i < n; ++i) sums[0] += term(i);
    for (int lane = 1; lane < 16; ++lane) sums[0] += sums[lane];
    return sums[0];
}

// y may be x.
inline void rms_norm(const float* x, const float* weight, float epsilon, int64_t n, float* y) {
    const float squares = sum_of(n, [=](int64_t i) { return x[i] * x[i]; });
    const float factor = 1.0f / std::sqrt(squares / static_cast<float>(n) + epsilon);
    for (int64_t i = 0; i < n; ++i) y[i] = x[i] * factor * weight[i];
}

inline void layer_norm(const float* x, const float* weight, const float* bias, float epsilon,
                       int64_t n, float* y) {
    const float mean = sum_of(n, [=](int64_t i) { return x[i]; }) / static_cast<float>(n);
    const float squares = sum_of(n, [=](int64_t i) { return (x[i] - mean) * (x[i] - mean); });
    const float factor = 1.0f / std::sqrt(squares / static_cast<float>(n) + epsilon);
    for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - mean) * factor * weight[i] + bias[i];
}

// Rotates pairs of one head's values, which are adjacent or half a head apart.
inline void rotate(float* x, const float* cos, const float* sin, int64_t width, bool is_adjacent) {
    const int64_t half = width / 2, step = is_adjacent ? 2 : 1, far = is_adjacent ? 1 : half;
    for (int64_t i = 0; i < half; ++i) {
        const float a = x[i * step], b = x[i * step + far];
        x[i * step] = a * cos[i] - b * sin[i];
        x[i * step + far] = a * sin[i] + b * cos[i];
    }
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
