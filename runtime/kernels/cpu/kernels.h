// Two operations over a weight matrix W [num_rows, D] stored row by row as in a GGUF file:
//   dot_rows         y[a] = sum over d of x[d] * W[index[a]][d]       a < A
//   accumulate_rows  y[d] = sum over a of c[a] * W[index[a]][d]       d < D
// x, c and y are f32, index is int32; null: all rows, A = num_rows (or A = 0). Weights are unpacked
// in registers, all arithmetic is f32. Each moves A * row_bytes bytes of W; x, c, y stay in cache.
#pragma once
#include <stdint.h>

enum Kind : int32_t {
    KIND_F32,   // 4 bytes a value
    KIND_F16,   // 2
    KIND_BF16,  // 2
    KIND_Q8_0,  // 34 bytes for 32 values: f16 scale, 32 x int8
    KIND_Q4_0,  // 18 bytes for 32 values: f16 scale, 16 x 2 nibbles; value = (nibble - 8) * scale,
                // low nibbles are values 0..15, high nibbles values 16..31
    NUM_KINDS
};

enum Status : int32_t {
    STATUS_OK,
    STATUS_BAD_ARGUMENT,        // unknown kind, a size that cannot be, D % 32 != 0 for a block kind
    STATUS_INDEX_OUT_OF_RANGE,  // an index below 0 or not below num_rows; nothing was written
    STATUS_UNKNOWN_LEVEL,       // this build has no such instruction set
    STATUS_UNUSABLE_LEVEL,      // it has, but this processor or its operating system has not
    STATUS_NO_THREADS,          // the operating system refused to start that many threads
};

// A level is one instruction set: kernels for each kind, over part of the work; index may be null.
// rows a0 <= a < a1 of y
using DotRows = void(const uint8_t* weight, int64_t row_bytes, int64_t D, const float* x,
                     const int32_t* index, float* y, int64_t a0, int64_t a1);
// columns d0 <= d < d1 of y, d0 % 32 == 0, rows in index order
using AccumulateRows = void(const uint8_t* weight, int64_t row_bytes, const float* c,
                            const int32_t* index, int64_t A, float* y, int64_t d0, int64_t d1);

struct Kernels {
    DotRows* dot_rows[NUM_KINDS];
    AccumulateRows* accumulate_rows[NUM_KINDS];
};

extern const Kernels kernels_generic, kernels_avx2, kernels_avx512;

// What library.py calls.
extern "C" {
// weight: num_rows * row_bytes bytes; x: D; index: A or null; y: A, written.
int32_t spark_dot_rows(int32_t kind, const uint8_t* weight, int64_t num_rows, int64_t D,
                       const float* x, const int32_t* index, int64_t A, float* y);
// weight: num_rows * row_bytes bytes; c: A; index: A or null; y: D, written.
int32_t spark_accumulate_rows(int32_t kind, const uint8_t* weight, int64_t num_rows, int64_t D,
                              const float* c, const int32_t* index, int64_t A, float* y);
const char* spark_level();
int32_t spark_level_status(const char* name);
int32_t spark_set_level(const char* name);
int32_t spark_num_threads();
int32_t spark_set_threads(int32_t num_threads);  // 1 to 1024
}
