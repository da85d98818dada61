// Operations with weights of their own, position-wise or with a state (model/operations.py). Each is in a file of its own
// beside this one: it registers itself by its kind in the step program, and says which
// weights fit which values, what memory it needs and what it computes. step.cpp names none of them.
#pragma once
#include <cstring>

#include <array>

#include "operands.h"
#include "step_clock.h"

constexpr int MOST_READ = 3, MOST_WRITTEN = 2;  // values of an operation

// The values that an operation reads and writes, in the order of the step program: numbers (VALUE_NONE: absent),
// and floats per token (0).
struct OperationValues {
    int32_t read[MOST_READ], written[MOST_WRITTEN];
    int64_t read_size[MOST_READ], written_size[MOST_WRITTEN];
};

// Calls body(t) for each of T rows, on all threads if they touch many values.
template <class Body>
void for_rows(int64_t T, int64_t values, const Body& body) {
    if (T == 1) return body(0);
    split(T * values * 4, T, 1, 4, [&](int64_t t0, int64_t t1) {
        for (int64_t t = t0; t < t1; ++t) body(t);
    });
}

// y [T, stride] = W x + bias of T rows, for up to four matrices with concatenated outputs.
void multiply(const HsMatrix* matrix, int count, Operand& x, int64_t T, float* y, int64_t stride);

inline void unpack_row(const HsMatrix& m, int64_t row, float* y) {
    const int32_t index = static_cast<int32_t>(row);  // a tied embedding may be tiled
    kernels().unpack_rows[m.kind]({m.data, m.stride, m.num_columns, &index, 1}, y, 0, 1);
}

// What an operation is run with, for the computed rows of a step.
struct OperationCall {
    int64_t num_rows, max_rows;
    const int64_t* token;   // [num_rows]
    const HsRow* row;       // [num_rows] in a model with states
    int64_t* weight_bytes;  // counts the matrices; null: they are not counted
    StepClock* clock;
    float* seen_heads;  // what observers see, or null
    Arena scratch;      // memory that holds nothing before and after
    Operand *read[MOST_READ], *written[MOST_WRITTEN];

    // Calls body(t) for each row.
    template <class Body>
    void rows(int64_t values, const Body& body) const {
        for_rows(num_rows, values, body);
    }

    // y [num_rows, m.num_rows] = W x + bias.
    void multiply(const HsMatrix& m, Operand& x, float* y) const { multiply(&m, 1, x, y, m.num_rows); }

    // y [num_rows, stride] of several matrices with concatenated outputs.
    void multiply(const HsMatrix* m, int count, Operand& x, float* y, int64_t stride) const {
        ::multiply(m, count, x, num_rows, y, stride);
        for (int i = 0; weight_bytes && i < count; ++i)
            *weight_bytes += m[i].num_rows * row_bytes(m[i]);
    }

    // Where the rows of each sequence begin, and where the last ones end; returns the number of sequences.
    int64_t runs(std::array<int64_t, MAX_ROWS + 1>& begin) const {
        int64_t count = 0;
        for (int64_t t = 0; t < num_rows; ++t)
            if (t == 0 || row[t].sequence != row[t - 1].sequence) begin[count++] = t;
        begin[count] = num_rows;
        return count;
    }

    void ended(Timed part) const { clock->ended(part); }

    void show_heads(const Operand& heads) const {
        if (seen_heads) std::copy_n(heads.f32, num_rows * heads.size, seen_heads);
    }
};

// Slots of recurrent states, and rows whose inputs can be kept.
struct StateRooms {
    int64_t slots, kept;
};
inline bool fits_kept(const float* kept, int64_t count) {
    return count >= 0 && count <= INT32_MAX && (kept || !count);
}

// An operation. `weights` is what HsOp has of it, checked by `accepts`.
class Operation {
  public:
    virtual bool accepts(const void* weights, const OperationValues& values) const = 0;
    // The packed forms (operands.h) in which its matrices multiply a value that it reads.
    virtual uint32_t forms(const void* weights, int read) const = 0;
    virtual int64_t scratch_bytes(const void* weights, int64_t max_rows) const = 0;
    // Tokens that its tables have a row of.
    virtual int64_t num_tokens(const void* weights) const = 0;
    // Room of its states; nothing if it has none.
    virtual StateRooms rooms(const void* weights) const = 0;
    virtual void run(const void* weights, OperationCall& call) const = 0;

    const char* const kind;
    const int num_read, num_written;

  protected:
    Operation(const char* kind, int num_read, int num_written);  // registers it
    ~Operation() = default;
};

const Operation* registered_operation(int32_t number);  // null if there is none

// The operation of this kind, a number that hs_operation_kind returns; null for those of step.cpp.
inline const Operation* operation(int32_t kind) {
    return kind < NUM_OP_KINDS ? nullptr : registered_operation(kind - NUM_OP_KINDS);
}

// An operation with weights of this type. `Room` takes its memory from an arena: Room(weights, arena, max_rows).
template <class Weights, class Room>
class OperationOf : public Operation {
  public:
    using Operation::Operation;

    virtual bool fits(const Weights& weights, const OperationValues& values) const = 0;
    virtual uint32_t forms_of(const Weights&, int) const { return 0; }
    virtual int64_t tokens_of(const Weights&) const { return INT64_MAX; }
    virtual StateRooms rooms_of(const Weights&) const { return {0, 0}; }
    virtual void compute(const Weights& weights, Room& room, const OperationCall& call) const = 0;

    bool accepts(const void* weights, const OperationValues& values) const final {
        return weights && fits(of(weights), values);
    }
    uint32_t forms(const void* weights, int read) const final { return forms_of(of(weights), read); }
    int64_t scratch_bytes(const void* weights, int64_t max_rows) const final {
        Arena arena(nullptr);
        Room(of(weights), arena, max_rows);
        return arena.used();
    }
    int64_t num_tokens(const void* weights) const final { return tokens_of(of(weights)); }
    StateRooms rooms(const void* weights) const final { return rooms_of(of(weights)); }
    void run(const void* weights, OperationCall& call) const final {
        Room room(of(weights), call.scratch, call.max_rows);
        compute(of(weights), room, call);
    }

  private:
    static const Weights& of(const void* weights) { return *static_cast<const Weights*>(weights); }
};

// The memory of operations that need none.
struct NoRoom {
    template <class Weights>
    NoRoom(const Weights&, Arena&, int64_t) {}
};
