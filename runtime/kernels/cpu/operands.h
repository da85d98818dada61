// Shared by the sources of a step: an arena for arrays, and vectors in the forms that kernels need.
#pragma once
#include <algorithm>

#include "dispatch.h"
#include "step.h"

// Vectors, one per token, and their packed forms, which are made on first use.
struct Operand {
    float* f32;  // [capacity, size]
    uint8_t* packed[NUM_FORMS];
    int64_t num_packed[NUM_FORMS];  // number of packed vectors; 0: none
    int64_t size, capacity;

    float* row(int64_t t) const { return f32 + t * size; }
    void changed() { std::fill_n(num_packed, NUM_FORMS, 0); }

    // The first T vectors in the form that products with matrices of `kind` read; packs them unless they are
    // packed already.
    Input as(int32_t kind, int64_t T) {
        Input input{f32, nullptr, size, T, 0, T};
        Quantise* quantise = kernels().quantise[kind];
        if (!quantise) return input;
        const int form = form_of(kind);
        input.packed = packed[form];
        if (num_packed[form] != T)
            split(T > 1 ? 16 * T * size : 0, T, 16, 4,
                  [&](int64_t t0, int64_t t1) { quantise(input.part(t0, t1), size); });
        num_packed[form] = T;
        return input;
    }
};

// Divides one piece of memory into arrays; if the memory is null, only counts bytes.
class Arena {
  public:
    explicit Arena(uint8_t* base) : base_(base) {}

    template <class T>
    T* take(int64_t count) {
        const int64_t start = used_;
        used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
        return base_ ? reinterpret_cast<T*>(base_ + start) : nullptr;
    }

    // Allocates the packed forms in the bit mask `forms`, and the values unless `f32` is given or nothing
    // reads them.
    Operand operand(int64_t size, int64_t capacity, uint32_t forms, float* f32 = nullptr,
                    bool reads_f32 = true) {
        const int64_t count = f32 || !reads_f32 ? 0 : capacity * size;
        Operand operand = {f32 ? f32 : take<float>(count), {}, {}, size, capacity};
        for (int form = 0; form < NUM_FORMS; ++form)
            if (forms >> form & 1) operand.packed[form] = take<uint8_t>(capacity * packed_room(size));
        return operand;
    }

    int64_t used() const { return used_; }

  private:
    uint8_t* base_;
    int64_t used_ = 0;
};

// The packed form that some level needs for products with a matrix, as a bit mask; 0 if none does.
inline uint32_t form_bit(const HsMatrix& m) {
    return m.data && form_of(m.kind) ? 1u << form_of(m.kind) : 0;
}

inline uint32_t forms_of(const HsBlock& block) { return form_bit(block.gate) | form_bit(block.up); }

inline int64_t row_bytes(const HsMatrix& m) { return row_bytes_of(m.kind, m.num_columns); }
inline int64_t num_bytes(const HsMatrix& m) {
    return m.num_rows * (row_bytes(m) + (m.bias ? static_cast<int64_t>(sizeof(float)) : 0));
}

inline Rows rows_of(const HsMatrix& m) {
    return {m.data, m.stride, m.num_columns, nullptr, m.num_rows};
}

// True for a matrix of this shape, in any layout.
inline bool has_shape(const HsMatrix& m, int64_t num_rows, int64_t num_columns) {
    const int64_t together = rows_together(m.kind);
    return m.data && m.num_rows == num_rows && m.num_columns == num_columns && row_bytes(m) >= 0 &&
           m.stride >= row_bytes(m) &&
           (together == 1 || (m.stride == row_bytes(m) && num_rows % together == 0));
}

// True for a matrix of this shape whose rows can be multiplied.
inline bool fits(const HsMatrix& m, int64_t num_rows, int64_t num_columns) {
    return has_shape(m, num_rows, num_columns) && !is_grouped(m.kind);
}

// True if any subset of the matrix's rows can be summed. A grouped matrix allows only whole groups,
// a tiled one no sums.
inline bool has_sums(const HsMatrix& m) { return !is_tiled(m.kind) && !is_grouped(m.kind); }
