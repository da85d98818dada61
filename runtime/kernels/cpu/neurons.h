// The feed-forward of a block of neurons. For one token, gate, activation, up and down are one pass
// over the candidate neurons; for several tokens, hidden values are computed one group of neurons
// after another, then sums in pieces of columns, with bit-identical results. If all neurons of
// contiguous matrices are read, see whole_neurons.h. The reference is feed_forward.py.
#pragma once
#include <cstring>

#include "one_token.h"
#include "whole_neurons.h"

class Neurons {
  public:
    // Allocates for blocks of up to F neurons of width D at most, and up to T tokens. `forms`: the packed
    // forms of hidden values for `down` by outputs (by_output_forms). `needs_all`: Gate::needs_all().
    Neurons(Arena& arena, int64_t D, int64_t F, int64_t T, uint32_t forms, bool needs_all)
        : sums_(arena, D, T) {
        all_gates_ = arena.take<float>(needs_all ? T * F : 0);
        position_ = arena.take<int32_t>(F);
        candidate_ = arena.take<int32_t>(F);
        gate_ = arena.take<float>(F);
        up_ = arena.take<float>(F);
        open_ = arena.take<int32_t>(F);
        open_position_ = arena.take<int32_t>(F);
        const int64_t groups = groups_of(F);
        hidden_ = {arena.take<float>(T * groups * SUM_ROWS), nullptr, groups, T};
        up_many_ = arena.take<float>(T * groups * SUM_ROWS);
        hidden_x_ = arena.operand(F, T, forms, hidden_.value);
        if (T == 1) return;
        hidden_.mask = arena.take<uint64_t>(T * groups);
        num_read_ = arena.take<NumRead>(groups);
    }

    // Writes the output of a block's predicted neurons (all, if `named` is null) for T tokens to
    // out [T, D]; sets in `fired` the bits of neurons whose row of `down` is used. `seen`: see
    // HsStep's seen_gate.
    void run(const HsBlock& block, const Gate& gate, const Named* named, Operand& x, int64_t T,
             float* out, NeuronBytes& read, Fired fired = {}, const Seen& seen = {}) {
        seen_ = seen;
        known_ = nullptr;
        D = block.gate.num_columns;
        if (gate.needs_all()) {
            HsBlock rest = block;
            rest.gate.bias = nullptr;  // added here
            known_ = prepare_gates(block, gate, x, T);
            return run_block(rest, gate, named, x, T, out, read, fired);
        }
        run_block(block, gate, named, x, T, out, read, fired);
    }

  private:
    void run_block(const HsBlock& block, const Gate& gate, const Named* named, Operand& x, int64_t T,
                   float* out, NeuronBytes& read, Fired fired) {
        if (block.is_by_output) return run_by_output(block, gate, x, T, out, read, fired);
        if (!named && T <= RowSums::MOST_TOGETHER && WholeNeurons::takes(block, gate))
            return run_whole(block, gate, x, T, out, read, fired);
        if (T > 1 || seen_.is_wanted()) return run_many(block, gate, named, x, T, out, read, fired);
        if (!named) return run_one(block, gate, nullptr, block.num_neurons, x, out, read, fired);
        run_one(block, gate, position_, list(block, *named, position_), x, out, read, fired);
    }

    // What the activation takes [T, N] of the gates of all neurons, which it needs first.
    const float* prepare_gates(const HsBlock& block, const Gate& gate, Operand& x, int64_t T) {
        const int64_t N = block.num_neurons;
        const Input gate_x = x.as(block.gate.kind, T);
        split(T * num_bytes(block.gate), N, T == 1 ? TILE_ROWS : 32, 16, [&](int64_t a0, int64_t a1) {
            kernels().dot_rows[block.gate.kind](::rows_of(block.gate), gate_x, all_gates_, N, a0, a1);
            for (int64_t t = 0; block.gate.bias && t < T; ++t)
                for (int64_t a = a0; a < a1; ++a) all_gates_[t * N + a] += block.gate.bias[a];
        });
        split(T * N * 8, T, 1, 4, [&](int64_t t0, int64_t t1) {
            for (int64_t t = t0; t < t1; ++t) gate.prepare(all_gates_ + t * N, N);
        });
        return all_gates_;
    }

    // Numbers of rows that any token needs; dot_groups() and the sums may read further rows of the group.
    struct NumRead {
        int32_t gate, fired;
    };

    // Lists the positions of predicted neurons in the block, ascending; returns their number.
    static int64_t list(const HsBlock& block, const Named& named, int32_t* position) {
        if (!block.id) return named.list(block.num_neurons, position);
        int64_t count = 0;
        for (int64_t p = 0; p < block.num_neurons; ++p) {
            position[count] = static_cast<int32_t>(p);
            count += named.has(block.id[p]);
        }
        return count;
    }

    // Runs all neurons of a block whose `down` has a row per output: two or three products.
    void run_by_output(const HsBlock& block, const Gate& gate, Operand& x, int64_t T, float* out,
                       NeuronBytes& read, Fired fired) {
        const int64_t N = block.num_neurons, grain = T == 1 ? TILE_ROWS : 32;
        const Input gate_x = x.as(block.gate.kind, T);
        const Input up_x = block.up.data ? x.as(block.up.kind, T) : gate_x;
        split(T * N * (row_bytes(block.gate) + row_bytes(block.up)), N, grain, 16,
              [&](int64_t a0, int64_t a1) {
            Rows rows = ::rows_of(block.gate);
            if (block.up.data) rows.after = block.up.data + a0 * block.up.stride;
            for (int64_t t = 0; known_ && t < T; ++t)
                std::copy(known_ + t * N + a0, known_ + t * N + a1, hidden_.value + t * N + a0);
            if (!known_) kernels().dot_rows[block.gate.kind](rows, gate_x, hidden_.value, N, a0, a1);
            if (block.up.data)
                kernels().dot_rows[block.up.kind](::rows_of(block.up), up_x, up_many_, N, a0, a1);
            for (int64_t t = 0; t < T; ++t)
                activate_whole(block, gate, t, a0, a1, hidden_.value + t * N, up_many_ + t * N, seen_);
        });
        hidden_x_.size = N;
        hidden_x_.changed();
        const Input hidden = hidden_x_.as(block.down.kind, T);
        split(T * num_bytes(block.down), D, grain, 16, [&](int64_t d0, int64_t d1) {
            kernels().dot_rows[block.down.kind](::rows_of(block.down), hidden, out, D, d0, d1);
        });
        read.gate += N * row_bytes(block.gate), read.down += D * row_bytes(block.down);
        if (block.up.data) read.up += N * row_bytes(block.up);
        for (int64_t t = 0; fired.bits && t < T; ++t)
            for (int64_t p = 0; p < N; ++p) fired.set(t, id_of(block, p));
    }

    // Runs all neurons, from contiguous matrices.
    void run_whole(const HsBlock& block, const Gate& gate, Operand& x, int64_t T, float* out,
                   NeuronBytes& read, Fired fired) {
        const int64_t N = block.num_neurons, chunk = groups_of_chunk(N) * SUM_ROWS;
        const int64_t chunks = (N + chunk - 1) / chunk;
        const Input gate_x = x.as(block.gate.kind, T);
        const Input up_x = block.up.data ? x.as(block.up.kind, T) : gate_x;
        const WholeNeurons whole = {block,
                                    gate,
                                    gate_x,
                                    up_x,
                                    T,
                                    hidden_.value,
                                    up_many_,
                                    hidden_.mask,
                                    groups_of(N) * SUM_ROWS,
                                    sums_.part,
                                    chunk,
                                    seen_,
                                    known_};
        split(T * N * row_bytes(block.gate), chunks, 1, MAX_CHUNKS,
              [&](int64_t c0, int64_t c1) { whole.run(c0, c1); });
        auto join = [&](int64_t t, int64_t d0, int64_t d1) {
            RowSums::join(sums_.part + t * D, T * D, chunks, block.down.kind, d0, d1, out + t * D);
        };
        split(T * chunks * D * 4, T == 1 ? D : T, T == 1 ? 128 : 1, 1, [&](int64_t i0, int64_t i1) {
            if (T == 1) return join(0, i0, i1);
            for (int64_t t = i0; t < i1; ++t) join(t, 0, D);
        });
        read.gate += N * row_bytes(block.gate), read.down += N * row_bytes(block.down);
        if (block.up.data) read.up += N * row_bytes(block.up);
        for (int64_t t = 0; fired.bits && t < T; ++t)
            for (int64_t p = 0; p < N; ++p) fired.set(t, id_of(block, p));
    }

    // ---- one token ------------------------------------------------------------------------------

    // Runs the neurons at `count` positions of the block (null: the first `count`).
    void run_one(const HsBlock& block, const Gate& gate, const int32_t* position, int64_t count,
                 Operand& x, float* out, NeuronBytes& read, Fired fired) {
        const int64_t chunk = groups_of_chunk(block.num_neurons) * SUM_ROWS;
        const int64_t chunks = (block.num_neurons + chunk - 1) / chunk;
        const int32_t* rows = position;
        if (block.row) {
            for (int64_t i = 0; i < count; ++i) candidate_[i] = block.row[position ? position[i] : i];
            rows = candidate_;
        }
        const Candidates all = {position, rows, count};
        const Input gate_x = x.as(block.gate.kind, 1);
        const Input up_x = block.up.data ? x.as(block.up.kind, 1) : gate_x;
        const TokenRoom room = {gate_,          up_,        hidden_.value, open_,
                                open_position_, sums_.part, chunk,         known_};
        Opened opened[MAX_CHUNKS] = {};
        split(count * row_bytes(block.gate), chunks, 1, MAX_CHUNKS, [&](int64_t c0, int64_t c1) {
            opened[c0] = OneToken(block, gate, gate_x, up_x, room, all).run(c0, c1);
        });
        split(chunks * D * 4, D, 128, 1, [&](int64_t d0, int64_t d1) {
            RowSums::join(sums_.part, D, chunks, block.down.kind, d0, d1, out);
        });
        read.gate += count * row_bytes(block.gate);
        for (int64_t c = 0; c < chunks; ++c) {
            const int64_t num_fired = opened[c].end - opened[c].begin;
            if (block.up.data) read.up += num_fired * row_bytes(block.up);
            read.down += num_fired * row_bytes(block.down);
        }
        for (int64_t c = 0; fired.bits && c < chunks; ++c)
            for (int64_t o = opened[c].begin; o < opened[c].end; ++o)
                fired.set(0, id_of(block, open_position_[o]));
    }

    static int64_t id_of(const HsBlock& block, int64_t p) { return block.id ? block.id[p] : p; }

    // ---- several tokens -------------------------------------------------------------------------

    // A row of a list takes about three times as long as a row of a whole group.
    static constexpr int64_t TOGETHER = 3;

    // Computes the hidden values of neurons that fire, group by group, then the sums, in pieces of
    // columns.
    void run_many(const HsBlock& block, const Gate& gate, const Named* named, Operand& x, int64_t T,
                  float* out, NeuronBytes& read, Fired fired) {
        const int64_t groups = groups_of(block.num_neurons);
        hidden_.groups = groups, hidden_.T = T;
        const Input gate_x = x.as(block.gate.kind, T);
        const Input up_x = block.up.data ? x.as(block.up.kind, T) : gate_x;
        const int64_t at_once = groups_at_once(groups);
        split(T * block.num_neurons * row_bytes(block.gate), groups, at_once, 16,
              [&](int64_t g0, int64_t g1) {
            for (int64_t g = g0, end; g < g1; g = end) {
                end = std::min(g + at_once, g1);
                run_groups(block, gate, named, gate_x, up_x, T, g, end);
            }
        });
        sums_.add_many({block.down, block.row, block.num_neurons}, hidden_, T, out, D);
        for (int64_t g = 0; g < groups; ++g) {
            read.gate += num_read_[g].gate * row_bytes(block.gate);
            if (block.up.data) read.up += num_read_[g].fired * row_bytes(block.up);
            read.down += num_read_[g].fired * row_bytes(block.down);
        }
        for (int64_t t = 0; fired.bits && t < T; ++t)
            for (int64_t g = 0; g < groups; ++g)
                for (uint64_t left = hidden_.used(g, t); left; left &= left - 1)
                    fired.set(t, id_of(block, g * SUM_ROWS + __builtin_ctzll(left)));
    }

    // Groups whose rows a token multiplies in one list, so that few calls multiply less than four rows. Many
    // threads take fewer at a time.
    static constexpr int64_t LISTED_GROUPS = 4;
    static int64_t groups_at_once(int64_t groups) {
        return std::clamp<int64_t>(groups / (4 * num_threads()), 1, LISTED_GROUPS);
    }

    // For each of a few groups, the bits of the neurons that a token needs.
    struct Needed {
        uint64_t bits[LISTED_GROUPS][MAX_ROWS];
    };

    // Multiplies the rows of groups g0 .. g1-1 for the tokens that need them; y [groups, T, SUM_ROWS].
    static void dot_groups(const HsMatrix& m, const HsBlock& block, const Input& x, int64_t T,
                           int64_t g0, int64_t g1, const Needed& needed, float* y) {
        const int64_t first = g0 * SUM_ROWS, end = std::min(g1 * SUM_ROWS, block.num_neurons);
        int64_t all = 0;
        for (int64_t g = g0; g < g1; ++g)
            for (int64_t t = 0; t < T; ++t) all += __builtin_popcountll(needed.bits[g - g0][t]);
        if (all * TOGETHER > T * (end - first)) {
            for (int64_t p = first; p < end; p += SUM_ROWS) {
                const int64_t count = std::min(SUM_ROWS, end - p);
                kernels().dot_rows[m.kind](rows_of(m, block, p, count), x, y + p * T, SUM_ROWS, 0,
                                           count);
            }
            return;
        }
        for (int64_t t = 0; t < T; ++t) {
            int32_t index[LISTED_GROUPS * SUM_ROWS], place[LISTED_GROUPS * SUM_ROWS];
            float values[LISTED_GROUPS * SUM_ROWS];
            int32_t n = 0;
            for (int64_t g = g0; g < g1; ++g)
                for (uint64_t left = needed.bits[g - g0][t]; left; left &= left - 1, ++n) {
                    const int32_t j = __builtin_ctzll(left), p = static_cast<int32_t>(g * SUM_ROWS) + j;
                    index[n] = block.row ? block.row[p] : p;
                    place[n] = static_cast<int32_t>((g * T + t) * SUM_ROWS) + j;
                }
            if (!n) continue;
            kernels().dot_rows[m.kind]({m.data, m.stride, m.num_columns, index, n}, x.part(t, t + 1),
                                       values, 0, 0, n);
            for (int32_t i = 0; i < n; ++i) y[place[i]] = values[i];
        }
    }

    // Computes the hidden values of groups g0 .. g1-1.
    void run_groups(const HsBlock& block, const Gate& gate, const Named* named, const Input& gate_x,
                    const Input& up_x, int64_t T, int64_t g0, int64_t g1) {
        Needed needed;
        for (int64_t g = g0; g < g1; ++g) {
            const int64_t p0 = g * SUM_ROWS, count = std::min(SUM_ROWS, block.num_neurons - p0);
            num_read_[g] = {};
            uint64_t any = 0;
            for (int64_t t = 0; t < T; ++t)
                any |= needed.bits[g - g0][t] =
                    named ? names(block, named[t], p0, count) : ~0ull >> (SUM_ROWS - count);
            num_read_[g].gate = __builtin_popcountll(any);
        }
        for (int64_t g = g0; known_ && g < g1; ++g) {
            const int64_t p0 = g * SUM_ROWS, count = std::min(SUM_ROWS, block.num_neurons - p0);
            for (int64_t t = 0; t < T; ++t)
                std::copy_n(known_ + t * block.num_neurons + p0, count, hidden_.values(g, t));
        }
        if (!known_) dot_groups(block.gate, block, gate_x, T, g0, g1, needed, hidden_.value);
        for (int64_t g = g0; g < g1; ++g) open_group(block, gate, T, g, needed.bits[g - g0]);
        if (block.up.data) dot_groups(block.up, block, up_x, T, g0, g1, needed, up_many_);
        for (int64_t g = g0; g < g1; ++g) finish_group(block, gate, T, g, needed.bits[g - g0]);
    }

    // Activates the gates of a group; clears the bits of those that do not fire.
    void open_group(const HsBlock& block, const Gate& gate, int64_t T, int64_t g, uint64_t* needed) {
        const int64_t p0 = g * SUM_ROWS, count = std::min(SUM_ROWS, block.num_neurons - p0);
        const Biases bias{block.gate.bias, block.row, p0};
        uint64_t any = 0;
        for (int64_t t = 0; t < T; ++t) {
            float* of = hidden_.values(g, t);
            for (int64_t i = 0; bias.data && i < count; ++i) of[i] += bias[i];
            seen_.keep_gates(block, t, p0, of, count, needed[t]);
            gate.smooth(of, count);
            any |= needed[t] &= act(gate, of, count);
        }
        num_read_[g].fired = __builtin_popcountll(any);
    }

    // Multiplies the activated gates of a group by its ups, and stores which of them fire.
    void finish_group(const HsBlock& block, const Gate& gate, int64_t T, int64_t g,
                      const uint64_t* needed) {
        const int64_t p0 = g * SUM_ROWS, count = std::min(SUM_ROWS, block.num_neurons - p0);
        const Biases bias{block.up.bias, block.row, p0};
        for (int64_t t = 0; t < T; ++t) {
            float *of = hidden_.values(g, t), *by = up_many_ + (of - hidden_.value);
            for (int64_t i = 0; bias.data && i < count; ++i) by[i] += bias[i];
            if (block.up.data) gate.turn_ups(by, count);
            for (int64_t i = 0; block.up.data && i < count; ++i) of[i] *= by[i];
            kernels().keep_only(of, needed[t]);
            seen_.keep(seen_.hidden, block, t, p0, of, count);
            hidden_.used(g, t) = needed[t];
        }
    }

    // Activates gates of a group; the mask of those that fire. The values of others are not used.
    static uint64_t act(const Gate& gate, float* value, int64_t count) {
        if (gate.is_smooth()) {
            uint64_t fired = 0;
            for (int64_t i = 0; i < count; ++i) fired |= static_cast<uint64_t>(value[i] != 0.0f) << i;
            return gate.computes_all ? ~0ull : fired;
        }
        const uint64_t fired = kernels().above(value, count, gate.least());
        if (gate.computes_all) kernels().keep_only(value, fired);
        gate.square(value, count);
        return gate.computes_all ? ~0ull : fired;
    }

    static Rows rows_of(const HsMatrix& m, const HsBlock& block, int64_t p0, int64_t count) {
        return Places{m, block.row, block.num_neurons}.rows(p0, count);
    }

    // Biases of the neurons at positions p0, p0 + 1, ...
    struct Biases {
        const float* data;  // or null
        const int32_t* row;
        int64_t p0;

        float operator[](int64_t i) const { return data[row ? row[p0 + i] : p0 + i]; }
    };

    static uint64_t names(const HsBlock& block, const Named& named, int64_t p0, int64_t count) {
        if (!block.id) return named.which(p0, count);
        uint64_t mask = 0;
        for (int64_t i = 0; i < count; ++i)
            mask |= static_cast<uint64_t>(named.has(id_of(block, p0 + i))) << i;
        return mask;
    }

    int64_t D = 0;  // the width of the block
    RowSums sums_;
    Coefficients hidden_;  // for one token, indexed by candidate
    Operand hidden_x_;     // the same memory
    int32_t *position_, *candidate_, *open_, *open_position_;
    float *gate_, *up_, *up_many_ = nullptr;
    float* all_gates_;
    const float* known_ = nullptr;
    NumRead* num_read_ = nullptr;
    Seen seen_ = {};
};

// The packed forms of a block's hidden values, as a bit mask; 0 unless `down` has a row per output.
inline uint32_t by_output_forms(const HsBlock& block) {
    return block.is_by_output ? form_bit(block.down) : 0;
}

// True if this block has all F neurons of a layer, in order.
inline bool has_all(const HsBlock& block, int64_t F) {
    return !block.row && !block.id && block.num_neurons == F;
}

// True if this is a valid block of a layer of F neurons of width D.
inline bool fits(const HsBlock& block, int64_t D, int64_t F, bool is_gated, bool computes_all) {
    if (block.is_by_output)
        return computes_all && has_all(block, F) && is_gated == (block.up.data != nullptr) &&
               fits(block.gate, F, D) && fits(block.down, D, F) && (!is_gated || fits(block.up, F, D));
    const int64_t rows = block.down.num_rows;
    const bool is_whole = computes_all && !block.row;
    if (!has_sums(block.down) && !(is_whole && is_grouped(block.down.kind))) return false;
    if (block.num_neurons < 1 || block.num_neurons > F) return false;
    if (!fits(block.gate, rows, D) || !has_shape(block.down, rows, D)) return false;
    if (is_gated != (block.up.data != nullptr)) return false;
    if (is_gated && !fits(block.up, rows, D)) return false;
    if (!block.row && rows != block.num_neurons) return false;
    for (int64_t p = 0; block.row && p < block.num_neurons; ++p)
        if (block.row[p] < 0 || block.row[p] >= rows) return false;
    for (int64_t p = 0; block.id && p < block.num_neurons; ++p)
        if (block.id[p] < 0 || block.id[p] >= F) return false;
    return true;
}
