// How the products of gates become activations, and which neurons are silent. The reference is Gate in
// runtime/kernels/gate.py.
#pragma once
#include <cmath>

#include "dispatch.h"

struct HsGate {
    int32_t activation;
    int32_t computes_all;  // silent neurons too, if they are named or none are; else those that fire
    float threshold;
    // k: the activation takes max(0, g - m - k s) of a gate g; m, s: mean and standard deviation of all
    // gates of the row. Only with `has_cutoff`.
    float cutoff = 0.0f;
    int32_t has_cutoff = 0;
};

struct Gate : HsGate {
    bool is_smooth() const { return activation >= ACTIVATION_SILU; }

    bool is_valid() const { return activation >= 0 && activation < NUM_ACTIVATIONS; }

    // True if prepare() is to be called with all gates of a layer, which then has one block of all neurons.
    bool needs_all() const { return has_cutoff; }

    // Leaves of the n gates of a layer what is above the cutoff; NaN stays. The sums of each eighth value
    // are apart, so that they are vectors.
    void prepare(float* gate, int64_t n) const {
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

    bool turns_ups() const {
        return activation == ACTIVATION_DRELU || activation == ACTIVATION_SWIGLU_OAI;
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

    // True if the neuron fires: its gate, after smooth(), is above the threshold (SiLU and GELU, behind a
    // cutoff: not 0), or NaN; always if all are computed. ReLU and its variants set a gate that is not above
    // the threshold to 0, and ReLU squared squares the others.
    bool act(float& gate) const {
        if (is_smooth()) return computes_all || gate != 0.0f;
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
