// Decides whether neurons fire, lists those that are predicted to, and keeps bits of those that do.
// The reference is feed_forward.py.
#pragma once
#include <cmath>

#include "row_sums.h"

// The activation of a gate; the reference is Gate in runtime/kernels/gate.py.
struct Gate {
    int32_t activation;
    bool computes_all;  // silent neurons are computed, too
    float threshold;
    float cutoff = 0.0f;
    bool cuts = false;

    bool is_smooth() const { return activation >= ACTIVATION_SILU; }

    // Leaves of the n gates of a layer what is above the cutoff; NaN stays. The sums of each eighth value
    // are apart, so that they are vectors.
    void cut(float* gate, int64_t n) const {
        const double mean = sum_of(gate, n, [](double x) { return x; }) / static_cast<double>(n);
        const double squares = sum_of(gate, n, [=](double x) { return (x - mean) * (x - mean); });
        const double deviation = std::sqrt(squares / static_cast<double>(n));
        const float least = static_cast<float>(mean + cutoff * deviation);
        for (int64_t i = 0; i < n; ++i) {
            const float left = gate[i] - least;
            gate[i] = left < 0.0f ? 0.0f : left;
        }
    }

    template <class Of>
    static double sum_of(const float* x, int64_t n, const Of& of) {
        constexpr int64_t LANES = 8;
        double sum[LANES] = {}, total = 0.0;
        int64_t i = 0;
        for (; i + LANES <= n; i += LANES)
            for (int64_t lane = 0; lane < LANES; ++lane) sum[lane] += of(x[i + lane]);
        for (; i < n; ++i) total += of(x[i]);
        for (double part : sum) total += part;
        return total;
    }

    // SiLU or GELU of n gates, to be called before act().
    void smooth(float* gate, int64_t n) const {
        if (activation == ACTIVATION_SWIGLU_OAI) return swiglu(gate, n);
        if (is_smooth()) kernels().smooth(gate, n, activation);
    }

    // Applies what the activation does with products of up.
    void turn_ups(float* up, int64_t n) const {
        for (int64_t i = 0; activation == ACTIVATION_DRELU && i < n; ++i)
            up[i] = up[i] < 0.0f ? 0.0f : up[i];
        for (int64_t i = 0; activation == ACTIVATION_SWIGLU_OAI && i < n; ++i)
            up[i] = (up[i] < -SWIGLU_LIMIT  ? -SWIGLU_LIMIT
                     : up[i] > SWIGLU_LIMIT ? SWIGLU_LIMIT
                                            : up[i]) +
                    1.0f;
    }

    // Squares n gates that are not below 0, if the activation does.
    void square(float* gate, int64_t n) const {
        for (int64_t i = 0; activation == ACTIVATION_RELU2 && i < n; ++i) gate[i] *= gate[i];
    }

    // True if the neuron fires: its gate, after smooth(), is above the threshold (SiLU and GELU: its
    // magnitude above `limit`), or NaN; always if all are computed. ReLU and its variants set a gate that is not
    // above the threshold to 0, and ReLU squared squares the others.
    bool act(float& gate, float limit) const {
        if (is_smooth()) return computes_all || !(std::fabs(gate) <= limit);
        const bool fires = !(gate <= least());
        if (!fires) gate = 0.0f;
        square(&gate, 1);
        return fires || computes_all;
    }

    // g * sigmoid(alpha g) of clamped gates: SiLU of alpha g, over alpha.
    static void swiglu(float* gate, int64_t n) {
        for (int64_t i = 0; i < n; ++i)
            gate[i] = SWIGLU_ALPHA * (gate[i] > SWIGLU_LIMIT ? SWIGLU_LIMIT : gate[i]);
        kernels().smooth(gate, n, ACTIVATION_SILU);
        for (int64_t i = 0; i < n; ++i) gate[i] /= SWIGLU_ALPHA;
    }
    static constexpr float SWIGLU_LIMIT = 7.0f, SWIGLU_ALPHA = 1.702f;

    // The gate above which a neuron with ReLU or a variant fires.
    float least() const { return activation == ACTIVATION_FATRELU ? threshold : 0.0f; }
};

// Limits of a block's neurons, by position in the block.
struct NeuronLimits {
    NeuronLimits(const HsBlock& block, const Gate& gate)
        : threshold(gate.threshold), gate(block.gate_limit) {}

    float of_gate(int64_t p) const { return gate ? gate[p] : threshold; }
    // Bit i says whether the smooth gate at position p + i fires, for i < n <= 64.
    uint64_t open_gates(const float* value, int64_t p, int64_t n) const {
        if (gate) return kernels().beyond(value, n, gate + p);
        float same[64];
        std::fill_n(same, n, threshold);
        return kernels().beyond(value, n, same);
    }

    const float threshold;
    const float* const gate;  // or null
};

// The predicted neurons of a layer, given by bits, or by scores above a threshold or NaN.
struct Named {
    const uint32_t* bits;  // or null
    const float* score;
    float threshold;

    bool has(int64_t j) const { return bits ? bits[j / 32] >> (j % 32) & 1 : !(score[j] <= threshold); }

    // Bit i says whether neuron j + i is predicted, for i < n <= 64. j % 32 == 0.
    uint64_t which(int64_t j, int64_t n) const {
        if (!bits) return kernels().above(score + j, n, threshold);
        const uint64_t word = bits[j / 32] | static_cast<uint64_t>(n > 32 ? bits[j / 32 + 1] : 0) << 32;
        return word & ~0ull >> (64 - n);
    }

    // Writes the predicted neurons below n to `chosen` [n], ascending; returns their number.
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

// Memory for one bit per neuron of the layer, [T, stride] words; null: bits are not wanted.
struct Fired {
    uint32_t* bits = nullptr;
    int64_t stride = 0;

    void set(int64_t t, int64_t j) const { bits[t * stride + j / 32] |= 1u << j % 32; }
};

// Weight bytes of the rows that any token needs, each counted once. For one token, exactly these
// are read; several tokens may read further rows of the same groups (see neurons.h).
struct NeuronBytes {
    int64_t gate = 0, up = 0, down = 0;
};
