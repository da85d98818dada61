// The rows of sequences that a head with a state goes through, and the slots that take the states after them.
#pragma once
#include <vector>

#include "operation.h"

struct StateMemory {
    float* state;       // [num_slots, of_state] of all heads
    float* inputs;      // [num_slots, J - 1, C]
    const float* kept;  // [num_kept, R]
    int64_t of_state;
};

// Calls run(head) for rows t0 .. t1-1 of a pass, which belong to one sequence, and before these for the rows that are
// repeated: for each stretch up to a row after which the state is kept, with the head's rows and slots set. The head's
// `x` and `y` are those of the pass's first row, its state begins `at` so many values after a slot's.
template <class Head, class Run>
void for_state_spans(Head head, const StateMemory& memory, int64_t at, const HsRow* row, int64_t t0,
                     int64_t t1, const Run& run) {
    const auto [state, inputs, kept, of_state] = memory;
    const HsRow& first = row[t0];
    const int64_t of_inputs = (head.J - 1) * head.C;
    if (first.reads >= 0) head.inputs = inputs + first.reads * of_inputs;
    if (first.reads >= 0) head.state = state + first.reads * of_state + at;
    head.num_again = first.num_again, head.again = kept + first.again * head.R;
    head.x += t0 * head.x_stride, head.y += t0 * head.y_stride;
    // The slot that stores the state after a row.
    auto slot_after = [&](int64_t t) {
        if (t + 1 == head.num_again && first.begins >= 0) return first.begins;
        return t < head.num_again ? -1 : row[t0 + t - head.num_again].writes;
    };
    const int64_t end = head.num_again + t1 - t0;
    for (; head.begin < end; head.begin += head.T) {
        head.T = 1;
        while (head.begin + head.T < end && slot_after(head.begin + head.T - 1) < 0) ++head.T;
        const int32_t write = slot_after(head.begin + head.T - 1);
        head.next_inputs = write < 0 ? nullptr : inputs + write * of_inputs;
        head.next_state = write < 0 ? nullptr : state + write * of_state + at;
        run(head);
        head.state = head.next_state;
    }
}

// The values that an operation has made of rows of a text, of which later rows read the last `depth`: those of the pass,
// of the rows that are repeated before them, and of the state.
struct RowHistory {
    float* state;       // [num_slots, depth, size], oldest first
    float* kept;        // [num_kept, size]
    const float* made;  // of the pass, [T, stride]
    int64_t stride, depth, size;
    const HsRow* row;
    std::array<int64_t, MAX_ROWS> first;  // the row with which each row's sequence begins

    RowHistory(float* state, float* kept, const float* made, int64_t stride, int64_t depth,
               int64_t size, const OperationCall& call)
        : state(state),
          kept(kept),
          made(made),
          stride(stride),
          depth(depth),
          size(size),
          row(call.row) {
        for (int64_t t = 0; t < call.num_rows; ++t)
            first[t] = t && row[t].sequence == row[t - 1].sequence ? first[t - 1] : t;
    }

    // Those of the row `before` rows before row t; null: before the text.
    const float* at(int64_t t, int64_t before) const {
        const HsRow& begin = row[first[t]];
        if (t - before >= first[t]) return made + (t - before) * stride;
        const int64_t again = begin.num_again + t - before - first[t];
        if (again >= 0) return kept + (begin.again + again) * size;
        return begin.reads < 0 ? nullptr : state + (begin.reads * depth + depth + again) * size;
    }

    // Stores what is to be stored of row t.
    void store(int64_t t) const {
        store(row[t].writes, t, 0);
        if (t == first[t]) store(row[t].begins, t, 1);
        if (row[t].keeps >= 0) std::copy_n(at(t, 0), size, kept + row[t].keeps * size);
    }

  private:
    // The state after the row `before` rows before row t.
    void store(int32_t slot, int64_t t, int64_t before) const {
        for (int64_t j = 0; slot >= 0 && j < depth; ++j) {
            const float* x = at(t, before + depth - 1 - j);
            float* to = state + (slot * depth + j) * size;
            if (x)
                std::copy_n(x, size, to);
            else
                std::fill_n(to, size, 0.0f);
        }
    }
};

// Memory of a thread for `count` values, 64-aligned.
inline float* thread_scratch(int64_t count) {
    static thread_local std::vector<float> scratch;
    if (scratch.size() < static_cast<size_t>(count + 16)) scratch.resize(count + 16);
    return scratch.data() + (16 - reinterpret_cast<uintptr_t>(scratch.data()) / 4 % 16);
}
