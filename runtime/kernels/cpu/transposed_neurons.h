// All neurons of a layer whose gate and up are stored with a row for each input: sums the rows of
// active inputs, then the `down` rows of neurons that contribute. The reference is feed_forward.py.
#pragma once
#include "neurons.h"
#include "sparse_inputs.h"

class TransposedNeurons {
  public:
    // Allocates for F neurons (nothing if F is 0) and up to T tokens.
    TransposedNeurons(Arena& arena, int64_t F, int64_t T) : F(F) {
        value_ = arena.take<float>(2 * T * F);
        no_limit_ = arena.take<float>(F);
    }

    // Writes the output of the predicted neurons (all, if `named` is null) for T tokens x [T, D] to out
    // [T, D]; sets in `fired` the bits of those whose row of `down` is used (dense: all).
    void run(SparseInputs& inputs, const HsBlock& block, const Gate& gate, const Named* named,
             const float* x, const InputLimits& input_limits, int64_t T, float* out,
             NeuronBytes& read, Fired fired) {
        const HsMatrix both[] = {block.gate, block.up};
        const int count = block.up.data ? 2 : 1;
        const int64_t D = block.down.num_columns;
        const int64_t bytes = inputs.run(both, count, x, input_limits, T, value_, 2 * F);
        const int64_t gate_row = row_bytes(block.gate);
        const int64_t row = gate_row + (block.up.data ? row_bytes(block.up) : 0);
        read.gate += bytes / row * gate_row;
        read.up += bytes / row * (row - gate_row);
        // Hidden values overwrite the gates; vectors are contiguous.
        for (int64_t t = 0; t < T; ++t)
            hidden(block, gate, named ? named + t : nullptr, value_ + t * 2 * F, value_ + t * F);
        const NeuronLimits limits(block, gate);
        if (!limits.has_hidden()) std::fill_n(no_limit_, F, 0.0f);
        const float* silent = limits.has_hidden() ? limits.hidden : no_limit_;
        if (gate.mode == MODE_DENSE) silent = nullptr;
        read.down += inputs.run(&block.down, 1, value_, {silent}, T, out, D);
        for (int64_t i = 0; fired.bits && i < T * F; ++i)
            if (TokenLimits{silent}.pass(value_[i], i % F)) fired.set(i / F, i % F);
    }

  private:
    // Computes hidden values `to` [F] of one token from `values`, its gates and then its ups; 0 for
    // neurons that do not fire or are not predicted.
    void hidden(const HsBlock& block, const Gate& gate, const Named* named, float* values,
                float* to) const {
        const NeuronLimits limits(block, gate);
        float* up = values + F;
        const bool is_drelu = gate.activation == ACTIVATION_DRELU;
        for (int64_t j = 0; is_drelu && j < F; ++j) up[j] = up[j] < 0.0f ? 0.0f : up[j];
        gate.smooth(values, F);
        for (int64_t j = 0; j < F; ++j) {
            float value = values[j];
            const bool fires = gate.act(value, limits.of_gate(j)) && (!named || named->has(j));
            if (block.up.data) value *= up[j];
            to[j] = fires ? value : 0.0f;
        }
    }

    const int64_t F;
    float *value_, *no_limit_;
};
