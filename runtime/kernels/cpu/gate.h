// What decides whether a neuron fires, and the lists and bits that say which do. The reference is
// feed_forward.py.
#pragma once
#include <cmath>

#include "row_sums.h"

// The activation of a gate, as Gate in feed_forward.py.
struct Gate {
    int32_t activation, mode;
    float threshold;

    bool is_smooth() const { return activation >= ACTIVATION_SILU; }

    // SiLU or GELU of n gates; comes before act().
    void smooth(float* gate, int64_t n) const {
        if (is_smooth()) kernels().smooth(gate, n, activation);
    }

    // Applies the threshold, for SiLU and GELU `limit`, in place; true if the neuron fires, as NaN does.
    bool act(float& gate, float limit) const {
        if (is_smooth()) return mode == MODE_DENSE || !(std::fabs(gate) <= limit);
        const bool fires = !(gate <= (activation == ACTIVATION_FATRELU ? threshold : 0.0f));
        if (!fires) gate = 0.0f;
        return fires || mode == MODE_DENSE;
    }
};

// Limits of a block's neurons, by place.
struct NeuronLimits {
    NeuronLimits(const SparkBlock& block, const Gate& gate)
        : threshold(gate.threshold), gate(block.gate_limit),
          hidden(gate.mode == MODE_DENSE ? nullptr : block.hidden_limit) {}

    float of_gate(int64_t p) const { return gate ? gate[p] : threshold; }
    bool has_hidden() const { return hidden != nullptr; }
    // True if a hidden value is silenced; NaN is not.
    bool is_silent(float value, int64_t p) const { return std::fabs(value) <= hidden[p]; }

    const float threshold;
    const float *const gate, *const hidden;  // or null
};

// Predicted neurons of a layer: one bit each, or a score that is above a threshold or NaN.
struct Named {
    const uint32_t* bits;  // or null
    const float* score;
    float threshold;

    bool has(int64_t j) const {
        return bits ? bits[j / 32] >> (j % 32) & 1 : !(score[j] <= threshold);
    }

    // Writes those below n in order to `chosen` [n]; returns their number.
    int64_t list(int64_t n, int32_t* chosen) const {
        if (!bits) return kernels().choose(score, n, threshold, chosen);
        int64_t count = 0;
        for (int64_t first = 0; first < n; first += 32) {
            const uint32_t outside = n - first < 32 ? ~0u << (n - first) : 0;
            for (uint32_t left = bits[first / 32] & ~outside; left; left &= left - 1)
                chosen[count++] = static_cast<int32_t>(first + __builtin_ctz(left));
        }
        return count;
    }
};

// Where one bit a neuron of the layer is set, [T, stride] words; null: nowhere.
struct Fired {
    uint32_t* bits = nullptr;
    int64_t stride = 0;

    void set(int64_t t, int64_t j) const { bits[t * stride + j / 32] |= 1u << j % 32; }
};

// Weight bytes read.
struct NeuronBytes {
    int64_t gate = 0, up = 0, down = 0;
};
