// Gated delta nets: from a row's projections to its heads' outputs. A job is a head of one sequence, through all of
// the sequence's rows in the pass; kernels().delta_head has the arithmetic.
#pragma once
#include <array>
#include <vector>

#include "attention.h"

inline int64_t delta_channels(const HsDelta& l) {
    return 2 * l.num_key_heads * l.key_width + l.num_value_heads * l.value_width;
}
inline int64_t delta_outputs(const HsDelta& l) { return l.num_value_heads * l.value_width; }
// Values of a row's projections: inputs of the convolution, gates of the output, two numbers a value head.
inline int64_t delta_inputs(const HsDelta& l) {
    return delta_channels(l) + delta_outputs(l) + 2 * l.num_value_heads;
}
inline bool is_delta(const HsLayer& l) { return l.delta.num_value_heads > 0; }

// Runs the rows `row` of a pass, of which the computed ones are in `places`: from their projections x [T,
// delta_inputs] to `out` [T, delta_outputs].
inline void run_delta(const HsDelta& l, const HsRow* row, const Attention& places, const float* x,
                      Operand& out) {
    const int64_t T = places.num_rows(), V = l.num_value_heads, N = l.key_width, M = l.value_width;
    const int64_t of_state = V * N * M, of_inputs = (l.num_taps - 1) * delta_channels(l);
    auto row_of = [&](int64_t t) -> const HsRow& { return row[places.number(t)]; };
    std::array<int64_t, MAX_ROWS + 1> begin;  // of each sequence's rows
    int64_t num_runs = 0;
    for (int64_t t = 0; t < T; ++t)
        if (t == 0 || row_of(t).sequence != row_of(t - 1).sequence) begin[num_runs++] = t;
    begin[num_runs] = T;
    out.size = delta_outputs(l);
    // Runs one head of rows t0 .. t1-1, the first of which begin with what is in slot `reads`.
    auto run_head = [&](int64_t h, int64_t t0, int64_t t1) {
        static thread_local std::vector<float> scratch;
        if (scratch.size() < static_cast<size_t>(delta_scratch(N, M) + 16))
            scratch.resize(delta_scratch(N, M) + 16);
        DeltaHead head = {};
        const int64_t of_key = V / l.num_key_heads;  // value heads
        head.value_head = h, head.key_head = l.is_grouped ? h / of_key : h % l.num_key_heads;
        head.stores_key = l.is_grouped ? h % of_key == 0 : h < l.num_key_heads;
        head.G = l.num_key_heads, head.V = V, head.N = N, head.M = M;
        head.J = l.num_taps, head.x_stride = delta_inputs(l), head.y_stride = out.size;
        head.conv = l.conv, head.decay = l.decay, head.step_bias = l.step_bias;
        head.norm = l.norm.weight, head.epsilon = l.norm.epsilon;
        head.scratch = scratch.data() + (16 - reinterpret_cast<uintptr_t>(scratch.data()) / 4 % 16);
        const int32_t read = row_of(t0).reads;
        if (read >= 0) head.inputs = l.inputs + read * of_inputs;
        if (read >= 0) head.state = l.state + read * of_state + h * N * M;
        for (int64_t t = t0; t < t1; t += head.T) {  // up to a row after which the state is kept
            head.T = 1;
            while (t + head.T < t1 && row_of(t + head.T - 1).writes < 0) ++head.T;
            const int32_t write = row_of(t + head.T - 1).writes;
            head.earlier = t - t0, head.x = x + t * head.x_stride, head.y = out.row(t) + h * M;
            head.next_inputs = write < 0 ? nullptr : l.inputs + write * of_inputs;
            head.next_state = write < 0 ? nullptr : l.state + write * of_state + h * N * M;
            kernels().delta_head(head);
            head.state = head.next_state;
        }
    };
    const int64_t bytes = (num_runs + T) * of_state * static_cast<int64_t>(sizeof(float));
    split(bytes, num_runs * V, 1, 8, [&](int64_t i0, int64_t i1) {
        for (int64_t i = i0; i < i1; ++i) run_head(i % V, begin[i / V], begin[i / V + 1]);
    });
    out.changed();
}
