// The feed-forward of all neurons with contiguous matrices, for one token or a few: a thread reads its
// part of gate, then of up, then of down, and meanwhile prefetches the beginning of the next part.
#pragma once
#include "firing.h"

// Where values of a layer's neurons are kept for observers, [T, stride]; null: they are not kept.
struct Seen {
    float *gate, *hidden;
    int64_t stride;
    const int32_t* row;  // [T] the tokens' rows there, or null: in order

    bool is_wanted() const { return gate || hidden; }

    // Keeps `count` values of token t, from position p of the block on.
    void keep(float* to, const HsBlock& block, int64_t t, int64_t p, const float* value,
              int64_t count) const {
        if (!to) return;
        to += (row ? row[t] : t) * stride;
        if (!block.id) std::memcpy(to + p, value, count * sizeof(float));
        for (int64_t i = 0; block.id && i < count; ++i) to[block.id[p + i]] = value[i];
    }

    // Keeps gates of a group; NaN for neurons whose bit in `named` is not set.
    void keep_gates(const HsBlock& block, int64_t t, int64_t p, const float* value, int64_t count,
                    uint64_t named) const {
        if (!gate) return;
        float values[SUM_ROWS];
        for (int64_t i = 0; i < count; ++i) values[i] = named >> i & 1 ? value[i] : __builtin_nanf("");
        keep(gate, block, t, p, values, count);
    }
};

// Turns gates a0 .. a1-1 of token t into hidden values; `by`: the products with up.
inline void activate_whole(const HsBlock& block, const Gate& gate, int64_t t, int64_t a0, int64_t a1,
                           float* value, float* by, const Seen& seen) {
    const HsMatrix& up = block.up;
    for (int64_t a = a0; block.gate.bias && a < a1; ++a) value[a] += block.gate.bias[a];
    seen.keep(seen.gate, block, t, a0, value + a0, a1 - a0);
    gate.smooth(value + a0, a1 - a0);
    for (int64_t a = a0; !gate.is_smooth() && a < a1; ++a) gate.act(value[a]);
    for (int64_t a = a0; up.bias && a < a1; ++a) by[a] += up.bias[a];
    if (up.data) gate.turn_ups(by + a0, a1 - a0);
    for (int64_t a = a0; up.data && a < a1; ++a) value[a] *= by[a];
    seen.keep(seen.hidden, block, t, a0, value + a0, a1 - a0);
}

struct WholeNeurons {
    const HsBlock& block;
    const Gate& gate;
    const Input &gate_x, &up_x;
    int64_t T;
    float *hidden, *up_value;  // [T, stride]
    uint64_t* mask;            // [groups, T]
    int64_t stride;            // neurons, padded to whole groups
    float* part;               // [chunks, T, D]
    int64_t chunk;             // neurons of a chunk
    Seen seen;
    const float* known;  // [T, N] prepared gates; null: they are multiplied

    static bool takes(const HsBlock& block, const Gate& gate) {
        auto is_run = [](const HsMatrix& m) { return !m.data || m.stride == row_bytes(m); };
        return gate.computes_all && !block.row && is_run(block.gate) && is_run(block.up) &&
               is_run(block.down);
    }

    // Writes the sums of chunks c0 .. c1-1.
    void run(int64_t c0, int64_t c1) const {
        const int64_t a0 = c0 * chunk, a1 = std::min(c1 * chunk, block.num_neurons);
        const bool has_up = block.up.data;
        const uint8_t* down = is_grouped(block.down.kind) ? row(block.down, a0) : nullptr;
        for (int64_t t = 0; known && t < T; ++t)
            std::copy(known + t * block.num_neurons + a0, known + t * block.num_neurons + a1,
                      hidden + t * stride + a0);
        if (!known) multiply(block.gate, gate_x, a0, a1, hidden, has_up ? row(block.up, a0) : down);
        if (has_up) multiply(block.up, up_x, a0, a1, up_value, down);
        for (int64_t t = 0; t < T; ++t)
            activate_whole(block, gate, t, a0, a1, hidden + t * stride, up_value + t * stride, seen);
        for (int64_t c = c0; c < c1; ++c) add(c, a1);
    }

  private:
    static const uint8_t* row(const HsMatrix& m, int64_t a) { return m.data + a * m.stride; }

    // Multiplies rows a0 .. a1-1. `after`: the memory that is read next; null: `down`, whose first rows
    // are prefetched in full.
    void multiply(const HsMatrix& m, const Input& x, int64_t a0, int64_t a1, float* y,
                  const uint8_t* after) const {
        Rows rows = rows_of(m);
        const int64_t last = after ? a1 : a0 + (a1 - a0 - 1) / SUM_ROWS * SUM_ROWS;
        rows.after = after;
        if (last > a0) kernels().dot_rows[m.kind](rows, x, y, stride, a0, last);
        if (after) return;
        const uint8_t* also[SUM_ROWS];
        for (int64_t i = 0; i < SUM_ROWS; ++i)
            also[i] = row(block.down, std::min(a0 + i, block.num_neurons - 1));
        rows.also = also;
        kernels().dot_rows[m.kind](rows, x, y, stride, last, a1);
    }

    // Computes the sums of chunk c, and prefetches the neurons after it up to `end`.
    void add(int64_t c, int64_t end) const {
        const HsMatrix& m = block.down;
        const int64_t D = m.num_columns, a1 = std::min((c + 1) * chunk, end);
        float* out = part + c * T * D;
        std::fill_n(out, T * D, 0.0f);
        if (is_grouped(m.kind) && T == 1) {
            Rows rows = rows_of(m);
            if (a1 == end && end < block.num_neurons) rows.after = row(block.gate, end);
            kernels().accumulate_rows[m.kind](rows, hidden, out, c * chunk, a1, 0, D);
            return;
        }
        for (int64_t a = c * chunk; a < a1; a += SUM_ROWS) {
            const int64_t count = std::min(SUM_ROWS, a1 - a), left = end - a - count;
            const uint8_t* then = row(m, a + count);
            Rows rows = {row(m, a), m.stride, D, nullptr, count};
            rows.then = &then, rows.num_then = left > 0;
            rows.then_bytes = std::min(SUM_ROWS, left) * m.stride;
            if (T == 1) {
                kernels().accumulate_rows[m.kind](rows, hidden + a, out, 0, count, 0, D);
                continue;
            }
            uint64_t* all = mask + a / SUM_ROWS * T;
            std::fill_n(all, T, ~0ull >> (SUM_ROWS - count));
            kernels().accumulate_many[m.kind](rows, 0, count,
                                              {hidden + a, all, out, stride, 1, D, 0, 0, T, 0, D});
        }
    }
};
