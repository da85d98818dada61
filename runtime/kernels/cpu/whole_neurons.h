// One token's feed-forward in mode "dense" where each matrix is contiguous: a thread reads its part of
// gate, of up and of down to the end, and prefetches the beginning of the next meanwhile.
#pragma once
#include "gate.h"

struct WholeNeurons {
    const SparkBlock& block;
    const Gate& gate;
    const Input &gate_x, &up_x;
    float *gate_value, *up_value, *hidden;  // [N]
    float* part;                            // [chunks, D]
    int64_t chunk;                          // neurons of one

    static bool takes(const SparkBlock& block, const Gate& gate) {
        auto is_run = [](const SparkMatrix& m) { return !m.data || m.stride == row_bytes(m); };
        return gate.mode == MODE_DENSE && !block.row && is_run(block.gate) && is_run(block.up) &&
               is_run(block.down);
    }

    // Writes the sums of chunks c0 .. c1-1.
    void run(int64_t c0, int64_t c1) const {
        const int64_t a0 = c0 * chunk, a1 = std::min(c1 * chunk, block.num_neurons);
        const bool has_up = block.up.data;
        multiply(block.gate, gate_x, a0, a1, gate_value, has_up ? row(block.up, a0) : nullptr);
        if (has_up) multiply(block.up, up_x, a0, a1, up_value, nullptr);
        activate(a0, a1);
        for (int64_t c = c0; c < c1; ++c) add(c, a1);
    }

  private:
    static const uint8_t* row(const SparkMatrix& m, int64_t a) { return m.data + a * m.stride; }

    // Rows a0 .. a1-1. What is read after them begins at `after`; null: it is `down`, whose first rows
    // are prefetched whole.
    void multiply(const SparkMatrix& m, const Input& x, int64_t a0, int64_t a1, float* y,
                  const uint8_t* after) const {
        Rows rows = rows_of(m);
        const int64_t last = after ? a1 : a0 + (a1 - a0 - 1) / SUM_ROWS * SUM_ROWS;
        rows.after = after;
        if (last > a0) kernels().dot_rows[m.kind](rows, x, y, 0, a0, last);
        if (after) return;
        const uint8_t* also[SUM_ROWS];
        for (int64_t i = 0; i < SUM_ROWS; ++i)
            also[i] = row(block.down, std::min(a0 + i, block.num_neurons - 1));
        rows.also = also;
        kernels().dot_rows[m.kind](rows, x, y, 0, last, a1);
    }

    void activate(int64_t a0, int64_t a1) const {
        const SparkMatrix& up = block.up;
        for (int64_t a = a0; block.gate.bias && a < a1; ++a) gate_value[a] += block.gate.bias[a];
        gate.smooth(gate_value + a0, a1 - a0);
        std::copy(gate_value + a0, gate_value + a1, hidden + a0);
        for (int64_t a = a0; !gate.is_smooth() && a < a1; ++a) gate.act(hidden[a], 0.0f);
        for (int64_t a = a0; up.bias && a < a1; ++a) up_value[a] += up.bias[a];
        const bool is_drelu = gate.activation == ACTIVATION_DRELU;
        for (int64_t a = a0; is_drelu && a < a1; ++a)
            up_value[a] = up_value[a] < 0.0f ? 0.0f : up_value[a];
        for (int64_t a = a0; up.data && a < a1; ++a) hidden[a] *= up_value[a];
    }

    // The sums of chunk c, while the neurons after it, below `end`, are prefetched.
    void add(int64_t c, int64_t end) const {
        const SparkMatrix& m = block.down;
        const int64_t D = m.num_columns, a1 = std::min((c + 1) * chunk, end);
        float* out = part + c * D;
        std::fill_n(out, D, 0.0f);
        for (int64_t a = c * chunk; a < a1; a += SUM_ROWS) {
            const int64_t count = std::min(SUM_ROWS, a1 - a), left = end - a - count;
            const uint8_t* then = row(m, a + count);
            Rows rows = {row(m, a), m.stride, D, nullptr, count};
            rows.then = &then, rows.num_then = left > 0;
            rows.then_bytes = std::min(SUM_ROWS, left) * m.stride;
            kernels().accumulate_rows[m.kind](rows, hidden + a, out, 0, count, 0, D);
        }
    }
};
