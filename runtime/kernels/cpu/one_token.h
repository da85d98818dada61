// One token's pass over the candidate neurons of a few chunks: gate, activation, up and down of a few
// neurons, then of the next, while rows that come later are prefetched. Gates that are not interleaved
// with up and down are read first.
#pragma once
#include "firing.h"

// Candidate neurons of a block, ascending.
struct Candidates {
    const int32_t* position;  // in the block; null: candidate a is neuron a
    const int32_t* row;       // in the matrices; null: likewise
    int64_t count;

    int64_t place(int64_t a) const { return position ? position[a] : a; }
    // The first candidate from position p on.
    int64_t begin(int64_t p) const {
        return position ? std::lower_bound(position, position + count, p) - position
                        : std::min(p, count);
    }
};

// Room for a block's candidates, and for the sums of its chunks.
struct TokenRoom {
    float *gate, *up;          // indexed by candidate
    float* hidden;             // of neurons that fire
    int32_t *open, *position;  // their rows and positions
    float* sum;                // [chunks, D]
    int64_t chunk;             // positions of a chunk, whole groups
    const float* known;        // prepared gates, by candidate; null: they are multiplied
};

// The neurons of a few chunks that fire are room.open[begin .. end-1], of which those from `pending` on
// are not summed yet.
struct Opened {
    int64_t begin, end, pending;
};

class OneToken {
  public:
    OneToken(const HsBlock& block, const Gate& gate, const Input& gate_x, const Input& up_x,
             const TokenRoom& room, const Candidates& all)
        : block(block),
          gate(gate),
          gate_x(gate_x),
          up_x(up_x),
          room(room),
          all(all),
          is_together(block.gate.stride > row_bytes(block.gate)) {}

    // Writes the sums of chunks c0 .. c1-1.
    Opened run(int64_t c0, int64_t c1) {
        const int64_t a0 = all.begin(c0 * room.chunk), a1 = all.begin(c1 * room.chunk);
        open = {a0, a0, a0};
        std::fill_n(room.sum + c0 * D(), (c1 - c0) * D(), 0.0f);
        if (room.known)
            run_after_gates(a0, a1);
        else if (is_together && block.up.data)
            run_together(a0, a1);
        else if (is_together)
            run_without_ups(a0, a1);
        else
            run_after_gates(a0, a1);
        add_below(INT64_MAX);
        return open;
    }

  private:
    // Neurons that go from gate to up together, of any groups.
    static constexpr int64_t AT_ONCE = 8;

    // Rows that are read later: those of a matrix listed in row[begin .. end-1]; by default none.
    struct NextRows {
        const HsMatrix& of = NO_MATRIX;
        const int32_t* row = nullptr;
        int64_t begin = 0, end = 0;
    };
    static constexpr HsMatrix NO_MATRIX = {};

    NextRows gates_from(int64_t a) const {  // another piece of the same thread may begin at a
        return {block.gate, all.row, a, std::min(a + AT_ONCE, all.count)};
    }
    NextRows ups(int64_t o0, int64_t o1) const { return {block.up, room.open, o0, o1}; }

    // A few neurons whose gates were computed together: candidates a0 .. a1-1, of which o0 .. o1-1 fired.
    struct Batch {
        int64_t a0, a1, o0, o1;
    };
    // The next batch of candidates below `end`; where there is none, an empty one.
    Batch open_after(int64_t a, int64_t o, int64_t end) {
        const int64_t a1 = std::min(a + AT_ONCE, end);
        return {a, a1, o, open_gates(a, a1, o)};
    }

    // Runs candidates a0 .. a1-1 of a block in which gate, up and down of a neuron are adjacent. The gates of the
    // next batch are opened before the ups of this one are read, so that only ups of neurons that fire are
    // prefetched: gates prefetch the ups of the batch before, ups their downs, and sums, or else the ups, the
    // gates after next. open.end, up to which hidden values are kept, may lag behind a batch's o0.
    void run_together(int64_t a0, int64_t a1) {
        push(gates_from(std::min(a0 + AT_ONCE, a1)));
        Batch now = open_after(a0, open.end, a1);
        push(ups(now.o0, now.o1));
        while (now.a0 < a1) {
            const Batch ahead = open_after(now.a1, now.o1, a1);
            const bool is_last = now.a1 == a1, is_last_but_one = !is_last && ahead.a1 == a1;
            const int64_t group = all.place(is_last ? now.a0 : now.a1) / SUM_ROWS;
            const NextRows next =
                ups(ahead.o0, ahead.o1);  // no gates will prefetch those of the last batch
            run_few(now.o0, now.o1, group, is_last_but_one ? next : gates_from(ahead.a1));
            if (!is_last_but_one) push(next);
            now = ahead;
        }
    }

    // The same without ups: gates prefetch gates, and sums the downs.
    void run_without_ups(int64_t a0, int64_t a1) {
        for (int64_t a = a0, end; a < a1; a = end) {
            end = std::min(a + AT_ONCE, a1);
            push(gates_from(end));
            const int64_t first = open.end, fired = open_gates(a, end, first);
            run_few(first, fired, all.place(a) / SUM_ROWS, {});
        }
    }

    // Runs candidates a0 .. a1-1 of a block whose gates are contiguous: reads all their gates first.
    void run_after_gates(int64_t a0, int64_t a1) {
        Rows gates = {block.gate.data, block.gate.stride, D(), all.row, a1};
        if (room.known)
            std::copy(room.known + a0, room.known + a1, room.gate + a0);
        else if (a0 < a1)
            kernels().dot_rows[block.gate.kind](gates, gate_x, room.gate, 0, a0, a1);
        const int64_t first = open.end, fired = act(a0, a1, first);
        if (!block.up.data) return finish(first, fired);
        for (int64_t o = first, end; o < fired; o = end) {
            end = std::min(o + AT_ONCE, fired);
            run_few(o, end, group_of(end == fired ? o : end),
                    {block.up, room.open, end, std::min(end + AT_ONCE, fired)});
        }
    }

    void push(const NextRows& next) {
        const HsMatrix& m = next.of;
        for (int64_t a = next.begin; m.data && a < next.end; ++a)
            queue.push(m.data + (next.row ? next.row[a] : a) * m.stride);
    }

    // Multiplies neurons o0 .. o1-1 that fired by their ups, and sums all groups below `group`. If there are
    // no ups, the products of the next neurons prefetch rows of down, and sums wait for these.
    void run_few(int64_t o0, int64_t o1, int64_t group, const NextRows& next) {
        push({block.down, room.open, o0, o1});
        const bool is_sum = block.up.data && open.pending < o1 && group_of(open.pending) < group;
        if (!is_sum) push(next);
        finish(o0, o1);
        if (is_sum) push(next);
        add_below(group);
    }

    int64_t D() const { return block.down.num_columns; }

    Rows rows_of(const HsMatrix& m, const int32_t* row, int64_t count) {
        Rows rows = {m.data, m.stride, m.num_columns, row, count};
        rows.queue = &queue;
        return rows;
    }

    void multiply(const HsMatrix& m, const Input& x, const int32_t* row, int64_t a0, int64_t a1,
                  float* y) {
        kernels().dot_rows[m.kind](rows_of(m, row, a1), x, y, 0, a0, a1);
    }

    // Computes and activates the gates of candidates a0 .. a1-1, see act().
    int64_t open_gates(int64_t a0, int64_t a1, int64_t at) {
        if (a0 == a1) return at;
        multiply(block.gate, gate_x, all.row, a0, a1, room.gate);
        return act(a0, a1, at);
    }

    // Activates gates g0 .. g1-1: neurons that fire go to room.open, room.position and room.hidden from
    // `at` on; returns where they end.
    int64_t act(int64_t g0, int64_t g1, int64_t at) {
        const float* bias = block.gate.bias;
        for (int64_t a = g0; bias && a < g1; ++a) room.gate[a] += bias[all.row ? all.row[a] : a];
        gate.smooth(room.gate + g0, g1 - g0);
        for (int64_t a = g0; a < g1; ++a) {
            float value = room.gate[a];
            const int32_t place = all.position ? all.position[a] : static_cast<int32_t>(a);
            const bool fires = gate.act(value);
            room.open[at] = all.row ? all.row[a] : static_cast<int32_t>(a);
            room.position[at] = place;
            room.hidden[at] = value;
            at += fires;
        }
        return at;
    }

    // Multiplies hidden values o0 .. o1-1 by their ups.
    void finish(int64_t o0, int64_t o1) {
        if (block.up.data && o0 < o1) {
            multiply(block.up, up_x, room.open, o0, o1, room.up);
            for (int64_t o = o0; o < o1; ++o) {
                float value = room.up[o] + (block.up.bias ? block.up.bias[room.open[o]] : 0.0f);
                gate.turn_ups(&value, 1);
                room.hidden[o] *= value;
            }
        }
        open.end = o1;
    }

    int64_t group_of(int64_t o) const { return room.position[o] / SUM_ROWS; }

    // Prefetches the downs of the next group, which no product has: all of them, because one that is missing delays
    // the sums of every column. A Zen 5 core, Nemotron 3's experts in q8_0 and mode exact, 30 % of neurons fire:
    // 12.6 ms with the first AT_ONCE rows, 11.5 with all.
    void ask_for_next_group(Rows& rows, const uint8_t** then) {
        rows.then = then, rows.then_bytes = row_bytes(block.down);
        for (int64_t o = open.pending; o < open.end && group_of(o) == group_of(open.pending); ++o) {
            then[rows.num_then++] = block.down.data + room.open[o] * block.down.stride;
            queue.push(then[rows.num_then - 1]);  // kinds whose sums do not take `then`
        }
    }

    // Sums pending neurons of groups below `group`, a group at a time.
    void add_below(int64_t group) {
        while (open.pending < open.end && group_of(open.pending) < group) {
            const int64_t first = open.pending;
            while (open.pending < open.end && group_of(open.pending) == group_of(first)) ++open.pending;
            Rows rows = rows_of(block.down, room.open + first, open.pending - first);
            const uint8_t* then[SUM_ROWS];
            if (!is_together && !block.up.data) ask_for_next_group(rows, then);
            float* out = room.sum + room.position[first] / room.chunk * D();
            kernels().accumulate_rows[block.down.kind](rows, room.hidden + first, out, 0, rows.A, 0,
                                                       rows.D);
        }
    }

    const HsBlock& block;
    const Gate& gate;
    const Input &gate_x, &up_x;
    const TokenRoom& room;
    const Candidates& all;
    const bool is_together;  // gate, up and down of a neuron are adjacent
    Opened open;
    PrefetchQueue queue;
};
