// What the sources of a decode step share: memory cut into arrays, and vectors as the kernels of
// each type take them.
#pragma once
#include <algorithm>

#include "dispatch.h"
#include "step.h"

// A vector and its packed forms, made when first asked for.
struct Operand {
    float* f32;
    uint8_t* packed[NUM_FORMS];
    bool is_packed[NUM_FORMS];
    int64_t size;

    void changed() { std::fill_n(is_packed, NUM_FORMS, false); }

    Input as(int32_t kind) {
        Quantise* quantise = kernels().quantise[kind];
        if (!quantise) return {f32, nullptr};
        const int form = form_of(kind);
        const Input input{f32, packed[form]};
        if (!is_packed[form]) quantise(input, size);
        is_packed[form] = true;
        return input;
    }
};

// Cuts one piece of memory into arrays; from null it only counts.
class Arena {
  public:
    explicit Arena(uint8_t* base) : base_(base) {}

    template <class T>
    T* take(int64_t count) {
        const int64_t start = used_;
        used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
        return base_ ? reinterpret_cast<T*>(base_ + start) : nullptr;
    }

    Operand operand(int64_t size) {
        Operand operand = {take<float>(size), {}, {}, size};
        for (uint8_t*& packed : operand.packed) packed = take<uint8_t>(packed_bytes(size));
        return operand;
    }

    int64_t used() const { return used_; }

  private:
    uint8_t* base_;
    int64_t used_ = 0;
};

inline int64_t row_bytes(const SparkMatrix& m) { return row_bytes_of(m.kind, m.num_columns); }
inline int64_t num_bytes(const SparkMatrix& m) {
    return m.num_rows * (row_bytes(m) + (m.bias ? static_cast<int64_t>(sizeof(float)) : 0));
}

inline Rows rows_of(const SparkMatrix& m) {
    return {m.data, m.stride, m.num_columns, nullptr, m.num_rows};
}

inline bool fits(const SparkMatrix& m, int64_t num_rows, int64_t num_columns) {
    return m.data && m.num_rows == num_rows && m.num_columns == num_columns &&
           row_bytes(m) >= 0 && m.stride >= row_bytes(m);
}
