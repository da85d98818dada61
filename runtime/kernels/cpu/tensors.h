// The tensors of a step's structs: matrices, norms and rotary embeddings.
#pragma once
#include <stdint.h>

#include "dispatch.h"

struct HsMatrix {
    const uint8_t* data;                    // null: absent
    const float* bias;                      // num_rows, or null
    int64_t num_rows, num_columns, stride;  // bytes from row to row
    int32_t kind, unused;
};

struct HsNorm {
    const float* weight;  // null: absent
    const float* bias;    // null: an RMS norm, else a layer norm
    float epsilon;
    int32_t unused;
};

// A rotary embedding, which several layers may share. W: values of a head that rotate, its first.
struct HsRotary {
    const double* frequency;  // [W / 2]
    double magnitude;         // multiplies cos and sin: 1, or YaRN's
    int64_t head_width;
    int32_t is_adjacent;
    int32_t ahead;  // queries rotate as if they were so many positions later
};

// The norm of x [n]; y may be x.
inline void apply(const HsNorm& norm, const float* x, int64_t n, float* y) {
    if (norm.bias)
        kernels().layer_norm(x, norm.weight, norm.bias, norm.epsilon, n, y);
    else
        kernels().rms_norm(x, norm.weight, norm.epsilon, n, y);
}
