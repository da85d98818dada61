// The sparse feed-forward of a block of neurons, for one token: gate, activation, up and down in one
// pass over the candidates. The reference is feed_forward.py.
#pragma once
#include <cmath>
#include <cstring>

#include "work.h"

// Neurons are cut into at most this many chunks, each with a sum of its own that is added to the
// others' in order: cuts and order depend on the number of neurons alone, so the threads' number and
// luck do not show in the result.
constexpr int64_t MAX_CHUNKS = 32;
// At least so many neurons to a chunk, whose sum and whose first rows cost about what five do.
constexpr int64_t CHUNK_NEURONS = 64;
// Where gate, up and down of a neuron lie together, so many neurons at a time go from gate to down,
// each row asking for the one that is wanted a group's rows later; fewer where rows are long, so that
// what was asked for is still in the first cache then.
constexpr int64_t GROUP = 4;
constexpr int64_t GROUP_BYTES = 10 * 1024;

// What an activation does to a gate, as Gate in feed_forward.py.
struct Gate {
    int32_t activation, mode;
    float threshold;

    float smooth(float x) const {
        if (activation == ACTIVATION_SILU) return x / (1.0f + std::exp(-x));
        if (activation == ACTIVATION_GELU) return 0.5f * x * (1.0f + std::erf(x * 0.70710678f));
        return 0.5f * x * (1.0f + std::tanh(0.79788456f * (x + 0.044715f * x * x * x)));
    }

    // What it lets through; whether the neuron fires, which what is no number does.
    bool act(float& gate) const {
        if (activation >= ACTIVATION_SILU) {
            gate = smooth(gate);
            return mode == MODE_DENSE || !(std::fabs(gate) <= threshold);
        }
        const bool fires = !(gate <= (activation == ACTIVATION_FATRELU ? threshold : 0.0f));
        if (!fires) gate = 0.0f;
        return fires || mode == MODE_DENSE;
    }
};

// Neurons of a layer by number: a bit each, or a score that is above a threshold or no number.
struct Named {
    const uint32_t* bits;  // or null
    const float* score;
    float threshold;

    bool has(int64_t j) const {
        return bits ? bits[j / 32] >> (j % 32) & 1 : !(score[j] <= threshold);
    }

    // Those below n in order, to `chosen` [n]; how many they are.
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

// Bytes of weights that were read.
struct NeuronBytes {
    int64_t gate = 0, up = 0, down = 0;
};

class Neurons {
  public:
    // Memory for blocks of up to F neurons of width D.
    Neurons(Arena& arena, int64_t D, int64_t F) : D(D) {
        candidate_ = arena.take<int32_t>(F);
        gate_ = arena.take<float>(F);
        up_ = arena.take<float>(F);
        open_ = arena.take<int32_t>(F);
        part_ = arena.take<float>(MAX_CHUNKS * D);
    }

    // All neurons of a block into `out` [D].
    void run_all(const SparkBlock& block, const Gate& gate, Operand& x, float* out,
                 NeuronBytes& read) {
        run(block, gate, block.row, block.num_neurons, x, out, read);
    }

    // The named ones.
    void run_named(const SparkBlock& block, const Gate& gate, const Named& named, Operand& x,
                   float* out, NeuronBytes& read) {
        int64_t count = 0;
        if (!block.id) {
            count = named.list(block.num_neurons, candidate_);
            for (int64_t i = 0; block.row && i < count; ++i)
                candidate_[i] = block.row[candidate_[i]];
        }
        for (int64_t p = 0; block.id && p < block.num_neurons; ++p) {
            candidate_[count] = block.row ? block.row[p] : static_cast<int32_t>(p);
            count += named.has(block.id[p]);
        }
        run(block, gate, candidate_, count, x, out, read);
    }

  private:
    // `rows`, or the first `count` where it is null.
    void run(const SparkBlock& block, const Gate& gate, const int32_t* rows, int64_t count,
             Operand& x, float* out, NeuronBytes& read) {
        // A power of two, which most numbers of threads share evenly.
        int64_t chunks = 1;
        while (chunks < MAX_CHUNKS && 2 * chunks * CHUNK_NEURONS <= count) chunks *= 2;
        auto begin_of = [&](int64_t c) {  // in whole groups
            return c == chunks ? count : count * c / chunks / GROUP * GROUP;
        };
        const Input gate_x = x.as(block.gate.kind), up_x = x.as(block.up.kind);
        int64_t num_open[MAX_CHUNKS];
        const int64_t bytes = count * row_bytes(block.gate);
        split(bytes, chunks, 1, MAX_CHUNKS, [&](int64_t c0, int64_t c1) {
            for (int64_t c = c0; c < c1; ++c)
                num_open[c] = run_chunk(block, gate, gate_x, up_x, rows, begin_of(c),
                                        begin_of(c + 1), part_ + c * D);
        });
        OrderSums* order_sums = kernels().order_sums[block.down.kind];
        split(chunks * D * 4, D, 128, 1, [&](int64_t d0, int64_t d1) {
            for (int64_t d = d0; d < d1; ++d) out[d] = part_[d];
            for (int64_t c = 1; c < chunks; ++c)
                for (int64_t d = d0; d < d1; ++d) out[d] += part_[c * D + d];
            if (order_sums) order_sums(out, d0, d1);
        });
        int64_t all_open = 0;
        for (int64_t c = 0; c < chunks; ++c) all_open += num_open[c];
        read.gate += count * row_bytes(block.gate);
        if (block.up.data) read.up += all_open * row_bytes(block.up);
        read.down += all_open * row_bytes(block.down);
    }

    // Candidates a0 .. a1-1 of `rows` (null: of all rows) into `out`; returns how many fired.
    int64_t run_chunk(const SparkBlock& block, const Gate& gate, const Input& gate_x,
                      const Input& up_x, const int32_t* rows, int64_t a0, int64_t a1, float* out) {
        const SparkMatrix& matrix = block.gate;
        // Gates that lie one behind the other are read to the end first.
        const bool is_bundled = matrix.stride > row_bytes(matrix);
        const int64_t fitting = std::max<int64_t>(1, GROUP_BYTES / row_bytes(matrix));
        const int64_t few = std::min(GROUP, fitting), group = is_bundled ? few : a1 - a0;
        std::fill_n(out, D, 0.0f);
        int64_t all_open = 0;
        for (int64_t g0 = a0, g1; g0 < a1; g0 = g1) {
            g1 = std::min(g0 + group, a1);
            const uint8_t* next[GROUP];
            Rows gates = {matrix.data, matrix.stride, D, rows, a1};
            if (is_bundled) {
                const SparkMatrix& then = block.up.data ? block.up : block.down;
                gates.next = rows_at(then, rows, g0, g1, next);
            }
            kernels().dot_rows[matrix.kind](gates, gate_x, gate_, g0, g1);
            int32_t* open = open_ + g0;
            const int64_t count = act_all(matrix, gate, rows, g0, g1, open);
            for (int64_t o0 = 0; o0 < count; o0 += few) {
                const int64_t o1 = std::min(o0 + few, count);
                const uint8_t* after[GROUP];
                if (is_bundled)  // the next group's gates
                    rows_at(matrix, rows, g1, std::min(g1 + few, a1), after);
                else  // the next neurons' ups or downs
                    rows_at(block.up.data ? block.up : block.down, open, o1,
                            std::min(o1 + few, count), after);
                const bool is_drelu = gate.activation == ACTIVATION_DRELU;
                add(block, up_x, is_drelu, open + o0, o1 - o0, gate_ + g0 + o0, up_ + g0 + o0,
                    after, out);
            }
            all_open += count;
        }
        return all_open;
    }

    // Gates g0 .. g1-1 through the activation: what fires goes to `open`, its value to gate_ + g0;
    // returns how many they are.
    int64_t act_all(const SparkMatrix& matrix, const Gate& gate, const int32_t* rows, int64_t g0,
                    int64_t g1, int32_t* open) {
        float* hidden = gate_ + g0;
        int64_t count = 0;
        for (int64_t a = g0; a < g1; ++a) {
            const int32_t row = rows ? rows[a] : static_cast<int32_t>(a);
            float value = gate_[a];
            if (matrix.bias) value += matrix.bias[row];
            const bool fires = gate.act(value);
            open[count] = row, hidden[count] = value;
            count += fires;
        }
        return count;
    }

    // Where rows a0 .. a1-1 of a list (null: of all rows) lie; where they are fewer than GROUP, some
    // place that may be asked for.
    static const uint8_t* const* rows_at(const SparkMatrix& m, const int32_t* list, int64_t a0,
                                         int64_t a1, const uint8_t** next) {
        for (int64_t i = 0; i < GROUP; ++i) {
            const int64_t row = a0 + i >= a1 ? 0 : list ? list[a0 + i] : a0 + i;
            next[i] = m.data + row * m.stride;
        }
        return next;
    }

    // Up and down of up to GROUP neurons; `hidden` are their activated gates, `up_out` is room, and
    // `after` is what is wanted when they are done.
    void add(const SparkBlock& block, const Input& up_x, bool is_drelu, const int32_t* open,
             int64_t count, float* hidden, float* up_out, const uint8_t* const* after, float* out) {
        const SparkMatrix &up = block.up, &down = block.down;
        if (up.data) {
            const uint8_t* downs[GROUP];
            rows_at(down, open, 0, count, downs);
            kernels().dot_rows[up.kind]({up.data, up.stride, D, open, count, downs}, up_x, up_out,
                                        0, count);
            for (int64_t o = 0; o < count; ++o) {
                float value = up_out[o] + (up.bias ? up.bias[open[o]] : 0.0f);
                if (is_drelu && value < 0.0f) value = 0.0f;
                hidden[o] *= value;
            }
        }
        kernels().accumulate_rows[down.kind]({down.data, down.stride, D, open, count, after},
                                             hidden, out, 0, count, 0, D);
    }

    const int64_t D;
    int32_t *candidate_, *open_;
    float *gate_, *up_, *part_;
};

// Whether a block of a layer of F neurons of width D is one.
inline bool fits(const SparkBlock& block, int64_t D, int64_t F, bool is_gated) {
    const int64_t rows = block.gate.num_rows;
    if (block.num_neurons < 1 || block.num_neurons > F) return false;
    if (!fits(block.gate, rows, D) || !fits(block.down, rows, D)) return false;
    if (is_gated != (block.up.data != nullptr)) return false;
    if (is_gated && !fits(block.up, rows, D)) return false;
    if (!block.row && rows != block.num_neurons) return false;
    for (int64_t p = 0; block.row && p < block.num_neurons; ++p)
        if (block.row[p] < 0 || block.row[p] >= rows) return false;
    for (int64_t p = 0; block.id && p < block.num_neurons; ++p)
        if (block.id[p] < 0 || block.id[p] >= F) return false;
    return true;
}
