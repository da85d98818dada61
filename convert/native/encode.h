// Encodes weights of one float type as a type of the model file, in one pass:
//   target[n][m] = source[(index ? index[n] : n) * row_stride + m * column_stride]   n < N, m < M
// The bytes are those of gguf.quants (gguf-py/gguf/quants.py of ggml-org/llama.cpp), which are
// ggml's, and for the K-quants, which it only unpacks, those of ggml itself. All floating-point
// arithmetic is f32 and never fused, so that every instruction set gives the same result.
#pragma once
#include <stdint.h>

enum Kind : int32_t {
    KIND_F32,   // 4 bytes a value
    KIND_F16,   // 2, rounded to nearest even
    KIND_BF16,  // 2, rounded to nearest even
    KIND_Q8_0,  // 34 bytes for 32 values: f16 scale = largest / 127, 32 x int8, ties away from 0
    KIND_Q4_0,  // 18 bytes for 32 values: f16 scale = the value of largest magnitude / -8, 16 x 2
                // nibbles = value / scale + 8.5 truncated, at most 15; values 0..15 are in the low
                // nibbles, 16..31 in the high ones
    KIND_Q4_K,  // 144 bytes for 256 values, see k_quants.h
    KIND_Q5_K,  // 176
    KIND_Q6_K,  // 210
    NUM_KINDS
};
constexpr int32_t NUM_SOURCE_KINDS = 3;  // f32, f16, bf16

enum Status : int32_t {
    STATUS_OK,
    // Unknown kind, a level that cannot run, a negative size, strides that Job excludes, or M not
    // in whole blocks of the kind.
    STATUS_BAD_ARGUMENT,
};

// Each level includes those before it.
enum Level : int32_t { LEVEL_GENERIC, LEVEL_AVX2, LEVEL_AVX512 };

struct Job {
    const uint8_t* source;
    int64_t row_stride, column_stride;  // in values; one is 1: column_stride if index is set
    const int64_t* index;               // N row numbers, or null: row n is row n
    int64_t num_rows, num_columns;      // N, M
    uint32_t limit;                     // bits of the smallest magnitude that is not encoded
    uint8_t* target;                    // N contiguous rows
};

// Returns the bits of the largest magnitude read; those of a NaN are above those of infinity. The
// piece of a row, or the tile, in which a value reaches the limit is read but not written.
using Encode = uint32_t(const Job& job);
using Encoders = Encode* [NUM_SOURCE_KINDS][NUM_KINDS];

extern const Encoders encoders_generic, encoders_avx2, encoders_avx512;

// The functions library.py calls.
extern "C" {
// The best level that this build has and this processor can run.
int32_t hs_encode_best_level();
// source: read in place, any alignment; target: N * row bytes, written; largest: the largest
// magnitude, NaN if there is one. If largest >= limit (or NaN), the target is incomplete. Moves
// N * M values in and N rows out, in the caller's thread.
int32_t hs_encode(int32_t level, int32_t source_kind, const uint8_t* source, int64_t row_stride,
                  int64_t column_stride, const int64_t* index, int64_t num_rows, int64_t num_columns,
                  int32_t kind, float limit, uint8_t* target, float* largest);
}
