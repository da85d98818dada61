// Encodes weights of one float type as a type of the model file, in one pass:
//   target[n][m] = source[(index ? index[n] : n) * row_stride + m * column_stride]   n < N, m < M
// The bytes are those of ggml (ggml-quants.c of ggml-org/llama.cpp), and of gguf.quants where that
// package packs the type. All floating-point arithmetic is f32 and never fused, so that every
// instruction set gives the same result.
#pragma once
#include <stdint.h>

// The types by ggml's numbers (enum ggml_type of ggml.h), with the bytes of a block. Halves are f16;
// nibbles are the low and the high half of a byte: of small blocks, those of values 0..15 and 16..31.
enum Kind : int32_t {
    KIND_F32 = 0,   // 4 bytes a value
    KIND_F16 = 1,   // 2, rounded to nearest even
    KIND_Q4_0 = 2,  // 18 bytes for 32 values: half scale = the value of largest magnitude / -8, nibbles
                    // = value / scale + 8.5 truncated, at most 15
    KIND_Q4_1 = 3,  // 20: half scale = (largest - least) / 15, half minimum, nibbles
    KIND_Q5_0 = 6,  // 22: as Q4_0 with 5 bits: half scale, 32 fifth bits, nibbles
    KIND_Q5_1 = 7,  // 24: as Q4_1 with 5 bits: half scale, half minimum, 32 fifth bits, nibbles
    KIND_Q8_0 = 8,  // 34: half scale = largest magnitude / 127, 32 x int8, ties away from 0
    KIND_Q2_K = 10,    // 84 bytes for 256 values, see k_quants.h
    KIND_Q3_K = 11,    // 110
    KIND_Q4_K = 12,    // 144
    KIND_Q5_K = 13,    // 176
    KIND_Q6_K = 14,    // 210
    KIND_IQ4_NL = 20,  // 18 bytes for 32 values, see nonlinear.h
    KIND_IQ4_XS = 23,  // 136 bytes for 256 values
    KIND_BF16 = 30,    // 2, rounded to nearest even
    KIND_MXFP4 = 39,   // 17 bytes for 32 values, see nonlinear.h
    NUM_KINDS
};
constexpr int32_t NUM_SOURCE_KINDS = 3;  // f32, f16, bf16

enum Status : int32_t {
    STATUS_OK,
    // Unknown kind, a level that cannot run, a negative size, strides or importances that Job excludes,
    // or M not in whole blocks of the kind.
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
    // M mean squares of what the columns are multiplied by, finite and at least 0, by which the search
    // for scales weighs errors; null: none. column_stride is 1 then. Floats, q8_0 and mxfp4 have no
    // search.
    const float* importance;
};

// Returns the bits of the largest magnitude read; those of a NaN are above those of infinity. The
// piece of a row, or the tile, in which a value reaches the limit is read but not written.
using Encode = uint32_t(const Job& job);
struct Encoder {
    Encode* encode;        // null: there is none for this kind
    int64_t block_values;  // rows are whole blocks
};
struct Encoders {
    Encoder of[NUM_SOURCE_KINDS][NUM_KINDS];
};

extern const Encoders encoders_generic, encoders_avx2, encoders_avx512;

// The functions encoder_library.py calls.
extern "C" {
// The best level that this build has and this processor can run.
int32_t hs_encode_best_level();
// source: read in place, any alignment; importance: null, or M values, see Job; target: N * row bytes,
// written; largest: the largest magnitude, NaN if there is one. If largest >= limit (or NaN), the target
// is incomplete. Moves N * M values in and N rows out, in the caller's thread.
int32_t hs_encode(int32_t level, int32_t source_kind, const uint8_t* source, int64_t row_stride,
                  int64_t column_stride, const int64_t* index, int64_t num_rows, int64_t num_columns,
                  int32_t kind, float limit, const float* importance, uint8_t* target, float* largest);
}
