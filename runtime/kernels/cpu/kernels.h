// Three operations over a weight matrix W [num_rows, D] stored row by row as in a GGUF file:
//   dot_rows         y[a] = sum over d of x[d] * W[index[a]][d]       a < A
//   accumulate_rows  y[d] = sum over a of c[a] * W[index[a]][d]       d < D
//   unpack_rows      out[a][d] = W[index[a]][d]                       a < A, d < D
// x, c and y are f32, index is int32; null: all rows, A = num_rows (or A = 0). Weights are unpacked
// in registers. Each moves A * row_bytes bytes of W; x, c, y stay in cache. For the block kinds
// dot_rows takes x in blocks of 16-bit integers, see Input; all other arithmetic is f32. unpack_rows
// writes f32, or bf16 rounded to the nearest, ties to even (a NaN stays one), for a
// matrix product over several tokens; its row stride may be more than the bytes of a row.
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
    STATUS_NO_MEMORY,
};

// A vector to be multiplied with rows. The block kinds take it quantised: of each 32 values
//   scale = max |x| / 32767 (0 where that is below 1e-30, NaN where an x is not finite)
//   value = x * (32767 / max |x|), rounded to the nearest, ties to even
// 16 bits rather than the 8 that llama.cpp takes: a 16-bit product of unpacked weights costs no
// more instructions, and the rounding (1.5e-5 of the largest of 32) is below that of an f16.
struct Input {
    const float* f32;  // D values; for the float kinds
    uint8_t* packed;   // packed_bytes(D), 64-aligned; what quantise() makes of them
};

inline int64_t packed_bytes(int64_t D) { return 4 * D + 256; }

constexpr int64_t BLOCK = 32;  // values unpacked at a time, for the float kinds too

// A level is one instruction set: kernels for each kind, over part of the work; index may be null.
// rows a0 <= a < a1 of y
using DotRows = void(const uint8_t* weight, int64_t row_bytes, int64_t D, const Input& x,
                     const int32_t* index, float* y, int64_t a0, int64_t a1);
// columns d0 <= d < d1 of y, d0 % 32 == 0, rows in index order
using AccumulateRows = void(const uint8_t* weight, int64_t row_bytes, const float* c,
                            const int32_t* index, int64_t A, float* y, int64_t d0, int64_t d1);
// rows a0 <= a < a1 of out, D values each
using UnpackRows = void(const uint8_t* weight, int64_t row_stride, int64_t D, const int32_t* index,
                        uint8_t* out, int64_t a0, int64_t a1);
// Fills packed from f32. D % 32 == 0.
using Quantise = void(const Input& x, int64_t D);
// x[i] = exp(x[i] - shift) for x[i] <= shift, relative error below 3e-7; returns the sum.
using ExpSum = float(float* x, int64_t n, float shift);

struct Kernels {
    DotRows* dot_rows[NUM_KINDS];
    AccumulateRows* accumulate_rows[NUM_KINDS];
    UnpackRows* unpack_rows[NUM_KINDS];       // to f32
    UnpackRows* unpack_rows_bf16[NUM_KINDS];
    Quantise* quantise[NUM_KINDS];  // null for the float kinds
    ExpSum* exp_sum;
};

extern const Kernels kernels_generic, kernels_avx2, kernels_avx512, kernels_avx512vnni;

// What library.py calls.
extern "C" {
// weight: num_rows * row_bytes bytes; x: D; index: A or null; y: A, written.
int32_t spark_dot_rows(int32_t kind, const uint8_t* weight, int64_t num_rows, int64_t D,
                       const float* x, const int32_t* index, int64_t A, float* y);
// weight: num_rows * row_bytes bytes; c: A; index: A or null; y: D, written.
int32_t spark_accumulate_rows(int32_t kind, const uint8_t* weight, int64_t num_rows, int64_t D,
                              const float* c, const int32_t* index, int64_t A, float* y);
// weight: num_rows rows, each row_stride bytes behind the one before; index: A or null; out: A * D
// values, written: KIND_F32 or KIND_BF16 by out_kind.
int32_t spark_unpack_rows(int32_t kind, const uint8_t* weight, int64_t num_rows, int64_t row_stride,
                          int64_t D, const int32_t* index, int64_t A, int32_t out_kind,
                          uint8_t* out);
const char* spark_level();
const char* spark_faulty_level();  // the best one that is advertised but faults or errs; or null
int32_t spark_level_status(const char* name);
int32_t spark_set_level(const char* name);
int32_t spark_num_threads();
int32_t spark_set_threads(int32_t num_threads);  // 1 to 1024
}
