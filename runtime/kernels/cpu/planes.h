// The planes of a row's hidden state, [P, D]; model/planes.py has the formulas, ops/planes.py the reference.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "step.h"

constexpr int64_t MOST_PLANES = 8;
constexpr float LEAST_SQUARE = 1e-5f;  // the least mean square that a magnitude is divided by

// y = W x, of W [rows, columns].
inline void multiply_small(const float* weight, const float* x, int64_t rows, int64_t columns,
                           float* y) {
    for (int64_t r = 0; r < rows; ++r) {
        y[r] = 0.0f;
        for (int64_t c = 0; c < columns; ++c) y[r] += weight[r * columns + c] * x[c];
    }
}

// Estimates the planes in place, by the router's choice [P]; copies the first to `active`.
inline void predict_planes(const HsPlanes& l, int64_t P, int64_t D, const float* choice, float* x,
                           float* active) {
    float mix[MOST_PLANES * MOST_PLANES];
    multiply_small(l.predict, choice, P * P, P, mix);
    for (int64_t d = 0; d < D; ++d) {
        float old[MOST_PLANES];
        for (int64_t i = 0; i < P; ++i) old[i] = x[i * D + d];
        for (int64_t i = 0; i < P; ++i) {
            float sum = 0.0f;
            for (int64_t j = 0; j < P; ++j) sum += mix[i * P + j] * old[j];
            x[i * D + d] = old[i] + sum;
        }
    }
    std::memcpy(active, x, D * sizeof(float));
}

// Corrects the planes in place, by the router's choice; `active` is what the layer made of the first, and
// becomes the corrected one times the scale.
inline void correct_planes(const HsPlanes& l, int64_t P, int64_t D, const float* choice, float* x,
                           float* active) {
    float share[MOST_PLANES];
    multiply_small(l.correct, choice, P, P, share);
    for (int64_t d = 0; d < D; ++d) {
        const float change = active[d] - x[d];
        for (int64_t i = 0; i < P; ++i) x[i * D + d] += (1.0f + share[i]) * change;
        active[d] = x[d] * l.scale[d];
    }
}

inline float magnitude(const float* x, int64_t D, float least) {
    double sum = 0.0;
    for (int64_t d = 0; d < D; ++d) sum += static_cast<double>(x[d]) * x[d];
    const float mean = static_cast<float>(sum / static_cast<double>(D));
    return std::sqrt(mean < least ? least : mean);
}

// The factor that gives x the magnitude of `of`.
inline float like(const float* of, const float* x, int64_t D) {
    return magnitude(of, D, 0.0f) / magnitude(x, D, LEAST_SQUARE);
}
