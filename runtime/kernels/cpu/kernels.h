// The CPU kernels. The three operations over a weight matrix W [num_rows, D], stored row by row as
// in a GGUF file or in a layout made in memory (enum Kind), are
//   dot_rows         y[a] = sum over d of x[d] * W[index[a]][d]       a < A
//   accumulate_rows  y[d] = sum over a of c[a] * W[index[a]][d]       d < D
//   unpack_rows      out[a][d] = W[index[a]][d]                       a < A, d < D
// x, c and y are f32, index is int32; null: all rows, A = num_rows (or A = 0). Weights are unpacked in
// registers. Each operation reads A * row_bytes bytes of W, or more if tiled rows are listed; x, c and y
// stay in cache. For block kinds, dot_rows reads x in blocks of 16-bit integers, see Input; for q8_0 and
// q4_0, accumulate_rows rounds c times scale to 16 bits; for bf16, both round x and c to bf16 at levels with
// AVX512_BF16 (bf16_pairs.h). All other arithmetic is f32 or exact. Rows may be strided, except those of tiled
// and grouped kinds.
#pragma once
#include <stdint.h>

#include "prefetch_queue.h"
#include "scores.h"

constexpr int64_t TILE_ROWS = 16, GROUP_ROWS = 64;

enum Layout : int32_t {
    IN_FILE,
    // A row with all its scales first, then all its quants: made by hs_pack_rows; no file has it.
    PLANAR,
    // Tiles of TILE_ROWS rows, for matrices that are read whole; a tile takes as many bytes as its rows in a
    // file. Small blocks: for as many blocks as have 64 bytes of scales (the last may be fewer), the scales of
    // all rows, block by block; then the quants of each block, four bytes of every row at a time. K-quants:
    // k_tiles.h.
    TILED,
    // Groups of GROUP_ROWS rows, for matrices whose rows are all summed; a group takes as many bytes as its rows
    // in a file. For each block of columns the scales of all rows, then the quants of rows p, p + 16, p + 32 and
    // p + 48 for p = 0 .. 15, byte by byte; floats: for each block of 32 columns the values of all rows, one
    // row after another.
    GROUPED,
};

// The form of packed vectors that a kind's products read, see Input. f32 and f16 read none, and bf16 only at levels
// with AVX512_BF16.
enum Form : int32_t {
    NO_FORM,
    FORM_BYTES,
    FORM_NIBBLES,
    FORM_BF16,
    FORM_TWOS,
    FORM_ONES,
    FORM_GRIDS,
    NUM_FORMS
};

// One line a kind: name, layout, the kind in a file that it is made from (itself for a file's), values of a block,
// its bytes, those of them before the quants of a small block (its scale, and a minimum if there is one), form of
// packed vectors. Types are in the order of weight_types.py, then each layout's types in that order; last the types with
// grids, which are only multiplied, in tiles, where grid_formats.h runs.
// Blocks are laid out as in llama.cpp's ggml-common.h:
//   Q8_0           f16 scale, 32 x int8
//   Q4_0           f16 scale, 16 x 2 nibbles; value = (nibble - 8) * scale, low nibbles are values 0..15, high
//                  nibbles values 16..31
//   K-quants, IQ4_XS, TQ2_0, table types   k_formats.h
//   MXFP4 .. Q5_1, Q2_0, Q1_0, NVFP4_SCALED  coded_blocks.h
// Rows of NVFP4_SCALED begin with a factor: row_factors.h.
//   IQ2_XXS, IQ2_XS, IQ3_XXS, IQ3_S   grid_formats.h
// clang-format off
#define FOR_ALL_KINDS(KIND) \
    KIND(F32, IN_FILE, F32, 1, 4, 0, NO_FORM) \
    KIND(F16, IN_FILE, F16, 1, 2, 0, NO_FORM) \
    KIND(BF16, IN_FILE, BF16, 1, 2, 0, FORM_BF16) \
    KIND(Q8_0, IN_FILE, Q8_0, 32, 34, 2, FORM_BYTES) \
    KIND(Q4_0, IN_FILE, Q4_0, 32, 18, 2, FORM_NIBBLES) \
    KIND(Q4_K, IN_FILE, Q4_K, 256, 144, 0, FORM_BYTES) \
    KIND(Q5_K, IN_FILE, Q5_K, 256, 176, 0, FORM_BYTES) \
    KIND(Q6_K, IN_FILE, Q6_K, 256, 210, 0, FORM_BYTES) \
    KIND(MXFP4, IN_FILE, MXFP4, 32, 17, 1, FORM_BYTES) \
    KIND(IQ4_NL, IN_FILE, IQ4_NL, 32, 18, 2, FORM_BYTES) \
    KIND(Q5_0, IN_FILE, Q5_0, 32, 22, 2, FORM_BYTES) \
    KIND(Q4_1, IN_FILE, Q4_1, 32, 20, 4, FORM_BYTES) \
    KIND(Q5_1, IN_FILE, Q5_1, 32, 24, 4, FORM_BYTES) \
    KIND(Q3_K, IN_FILE, Q3_K, 256, 110, 0, FORM_BYTES) \
    KIND(Q2_K, IN_FILE, Q2_K, 256, 84, 0, FORM_BYTES) \
    KIND(IQ4_XS, IN_FILE, IQ4_XS, 256, 136, 0, FORM_BYTES) \
    KIND(TQ2_0, IN_FILE, TQ2_0, 256, 66, 0, FORM_BYTES) \
    KIND(Q2_0, IN_FILE, Q2_0, 64, 18, 2, FORM_TWOS) \
    KIND(Q1_0, IN_FILE, Q1_0, 128, 18, 2, FORM_ONES) \
    KIND(IQ1_TABLE, IN_FILE, IQ1_TABLE, 256, 110, 0, FORM_BYTES) \
    KIND(IQ2_TABLE, IN_FILE, IQ2_TABLE, 256, 110, 0, FORM_BYTES) \
    KIND(IQ3_XXS_TABLE, IN_FILE, IQ3_XXS_TABLE, 256, 136, 0, FORM_BYTES) \
    KIND(IQ3_S_TABLE, IN_FILE, IQ3_S_TABLE, 256, 136, 0, FORM_BYTES) \
    KIND(NVFP4_SCALED, IN_FILE, NVFP4_SCALED, 64, 36, 4, FORM_BYTES) \
    KIND(Q8_0_PLANAR, PLANAR, Q8_0, 32, 34, 2, FORM_BYTES) \
    KIND(Q4_0_PLANAR, PLANAR, Q4_0, 32, 18, 2, FORM_NIBBLES) \
    KIND(Q8_0_TILED, TILED, Q8_0, 32, 34, 2, FORM_BYTES) \
    KIND(Q4_0_TILED, TILED, Q4_0, 32, 18, 2, FORM_NIBBLES) \
    KIND(Q4_K_TILED, TILED, Q4_K, 256, 144, 0, FORM_BYTES) \
    KIND(Q5_K_TILED, TILED, Q5_K, 256, 176, 0, FORM_BYTES) \
    KIND(Q6_K_TILED, TILED, Q6_K, 256, 210, 0, FORM_BYTES) \
    KIND(MXFP4_TILED, TILED, MXFP4, 32, 17, 1, FORM_BYTES) \
    KIND(IQ4_NL_TILED, TILED, IQ4_NL, 32, 18, 2, FORM_BYTES) \
    KIND(Q5_0_TILED, TILED, Q5_0, 32, 22, 2, FORM_BYTES) \
    KIND(Q4_1_TILED, TILED, Q4_1, 32, 20, 4, FORM_BYTES) \
    KIND(Q5_1_TILED, TILED, Q5_1, 32, 24, 4, FORM_BYTES) \
    KIND(Q3_K_TILED, TILED, Q3_K, 256, 110, 0, FORM_BYTES) \
    KIND(Q2_K_TILED, TILED, Q2_K, 256, 84, 0, FORM_BYTES) \
    KIND(IQ4_XS_TILED, TILED, IQ4_XS, 256, 136, 0, FORM_BYTES) \
    KIND(TQ2_0_TILED, TILED, TQ2_0, 256, 66, 0, FORM_BYTES) \
    KIND(Q2_0_TILED, TILED, Q2_0, 64, 18, 2, FORM_TWOS) \
    KIND(Q1_0_TILED, TILED, Q1_0, 128, 18, 2, FORM_ONES) \
    KIND(IQ1_TABLE_TILED, TILED, IQ1_TABLE, 256, 110, 0, FORM_BYTES) \
    KIND(IQ2_TABLE_TILED, TILED, IQ2_TABLE, 256, 110, 0, FORM_BYTES) \
    KIND(IQ3_XXS_TABLE_TILED, TILED, IQ3_XXS_TABLE, 256, 136, 0, FORM_BYTES) \
    KIND(IQ3_S_TABLE_TILED, TILED, IQ3_S_TABLE, 256, 136, 0, FORM_BYTES) \
    KIND(NVFP4_SCALED_TILED, TILED, NVFP4_SCALED, 64, 36, 4, FORM_BYTES) \
    KIND(F16_GROUPED, GROUPED, F16, 32, 64, 0, NO_FORM) \
    KIND(BF16_GROUPED, GROUPED, BF16, 32, 64, 0, NO_FORM) \
    KIND(Q8_0_GROUPED, GROUPED, Q8_0, 32, 34, 2, FORM_BYTES) \
    KIND(Q4_0_GROUPED, GROUPED, Q4_0, 32, 18, 2, FORM_NIBBLES) \
    KIND(IQ2_XXS, IN_FILE, IQ2_XXS, 256, 66, 0, NO_FORM) \
    KIND(IQ2_XS, IN_FILE, IQ2_XS, 256, 74, 0, NO_FORM) \
    KIND(IQ3_XXS, IN_FILE, IQ3_XXS, 256, 98, 0, NO_FORM) \
    KIND(IQ3_S, IN_FILE, IQ3_S, 256, 110, 0, NO_FORM) \
    KIND(IQ2_XXS_TILED, TILED, IQ2_XXS, 256, 66, 0, FORM_GRIDS) \
    KIND(IQ2_XS_TILED, TILED, IQ2_XS, 256, 74, 0, FORM_GRIDS) \
    KIND(IQ3_XXS_TILED, TILED, IQ3_XXS, 256, 98, 0, FORM_GRIDS) \
    KIND(IQ3_S_TILED, TILED, IQ3_S, 256, 110, 0, FORM_GRIDS)
// clang-format on

#define NUMBER(NAME, ...) KIND_##NAME,
enum Kind : int32_t { FOR_ALL_KINDS(NUMBER) NUM_KINDS };
#undef NUMBER

struct KindFacts {
    Layout layout;
    Kind in_file;
    int64_t block_values, block_bytes, head_bytes;
    Form form;
};
#define FACTS(NAME, LAYOUT, IN_FILE_KIND, VALUES, BYTES, HEAD, FORM) \
    {LAYOUT, KIND_##IN_FILE_KIND, VALUES, BYTES, HEAD, FORM},
constexpr KindFacts KINDS[NUM_KINDS] = {FOR_ALL_KINDS(FACTS)};
#undef FACTS

// Bytes of each number before the quants: f16, or the exponent of a power of two.
constexpr int64_t number_bytes(int64_t head_bytes) { return head_bytes < 2 ? 1 : 2; }
// Bytes of the factor before a row's blocks; 0: there is none.
constexpr int64_t FACTOR_BYTES = 4;
constexpr int64_t row_head(int32_t kind) {
    return KINDS[kind].in_file == KIND_NVFP4_SCALED ? FACTOR_BYTES : 0;
}
// Blocks of a tile whose numbers are stored together: they fill a cache line.
constexpr int64_t blocks_together(int64_t head_bytes) { return 4 / head_bytes; }

constexpr bool is_tiled(int32_t kind) { return KINDS[kind].layout == TILED; }
constexpr bool is_grouped(int32_t kind) { return KINDS[kind].layout == GROUPED; }

constexpr int32_t NUM_CACHE_KINDS = KIND_Q4_0 + 1;  // kinds in which keys and values may be stored

enum Activation : int32_t {
    ACTIVATION_RELU,
    ACTIVATION_RELU2,
    ACTIVATION_FATRELU,
    ACTIVATION_DRELU,
    ACTIVATION_SILU,
    ACTIVATION_GELU,
    ACTIVATION_GELU_TANH,
    ACTIVATION_SWIGLU_OAI,
    NUM_ACTIVATIONS
};

// Values in one block of a kind; 1 for the float kinds in a file.
constexpr int64_t block_values(int32_t kind) { return KINDS[kind].block_values; }

// The bytes of one row, or -1 if such a row is impossible.
inline int64_t row_bytes_of(int32_t kind, int64_t D) {
    if (kind < 0 || kind >= NUM_KINDS || D < 0) return -1;
    const int64_t values = block_values(kind);
    return D % values ? -1 : row_head(kind) + D / values * KINDS[kind].block_bytes;
}

enum Status : int32_t {
    STATUS_OK,
    STATUS_BAD_ARGUMENT,        // unknown kind, an impossible size, D not in whole blocks
    STATUS_INDEX_OUT_OF_RANGE,  // an index below 0 or not below num_rows; nothing was written
    STATUS_UNKNOWN_LEVEL,       // this build has no such instruction set
    STATUS_UNUSABLE_LEVEL,      // the build has it, but the processor or the system does not
    STATUS_NO_THREADS,          // the operating system refused to start that many threads
    STATUS_NO_MEMORY,
};

// Vectors to be multiplied by rows, one per token. Block kinds read them quantised; each block of 32
// values has
//   scale = max |x| / LARGEST (0 where max |x| is below 1e-30, NaN where an x is not finite)
//   value = x * (LARGEST / max |x|), rounded to the nearest, ties to even
// with LARGEST = 32639, so that a value is also two signed bytes, 256 * high + low. 16 bits rather than
// llama.cpp's 8, because the rounding (1.5e-5 of the largest of 32) is then below that of an f16,
// and a prompt on AMX's int8 tiles can have the same arithmetic as a step.
struct Input {
    // vector t begins at f32 + t * stride; for f32, f16 and quantise(); bf16 without pairs
    const float* f32;
    uint8_t* packed;  // capacity * packed_bytes(D), 64-aligned; output of quantise()
    int64_t stride, capacity;
    int64_t first, count;  // vectors first .. first + count - 1 are used

    const float* vector(int64_t t) const { return f32 + (first + t) * stride; }
    Input part(int64_t t0, int64_t t1) const {
        return {f32, packed, stride, capacity, first + t0, t1 - t0};
    }
};

constexpr int form_of(int32_t kind) { return KINDS[kind].form; }
// The kind in a file from which a kind in memory is made; a file's kind itself.
constexpr int32_t kind_in_file(int32_t kind) { return KINDS[kind].in_file; }
// Number of rows that are stored together; a matrix of the kind has a multiple of this number.
constexpr int64_t rows_together(int32_t kind) {
    return is_tiled(kind) ? TILE_ROWS : is_grouped(kind) ? GROUP_ROWS : 1;
}

constexpr int64_t BLOCK = 32;         // values unpacked at a time, also for float kinds
constexpr int64_t SUPER_BLOCK = 256;  // values of a K-quant's block

// Packed blocks of a vector: n of them, padded with zeros to a multiple of four; and their bytes, see PackedBlocks.
constexpr int64_t whole_fours(int64_t n) { return (n + 3) / 4 * 4; }
constexpr int64_t packed_blocks_bytes(int64_t n) { return whole_fours(n) * 76; }

// Upper bound on the bytes of a packed vector, a multiple of 64. The panels that follow the blocks at level amx
// (blocks_amx.h) make it the most: below 6.9 * D + 248 for 8 vectors, 4.7 * D for many.
constexpr int64_t packed_bytes(int64_t D, bool has_panels = true) {
    return ((has_panels ? 7 * D + 2048 : packed_blocks_bytes((D + BLOCK - 1) / BLOCK)) + 63) / 64 * 64;
}

// Rows of D values, `stride` bytes apart. If index is null, row a is row a of the matrix. Rows of tiled
// and grouped kinds have no gaps and begin with a whole tile or group.
struct Rows {
    const uint8_t* weight;
    int64_t stride, D;
    const int32_t* index;
    int64_t A;  // rows a < A may be prefetched
    // For accumulate_rows: addresses to prefetch while row a0 + i is used, for each i; null: later rows of
    // this matrix.
    const uint8_t* const* next = nullptr;
    // For dot_rows: likewise, in addition to later rows; may be ignored.
    const uint8_t* const* also = nullptr;
    // Instead of `next`, if rows are close together: addresses of the parts of rows that are needed
    // after these, in memory order, and their length. For accumulate_rows of at most SUM_ROWS rows.
    const uint8_t* const* then = nullptr;
    int64_t num_then = 0, then_bytes = 0;
    // For contiguous rows in dot_rows, and grouped rows in accumulate_rows: the memory that is read
    // next, for prefetching. May be ignored.
    const uint8_t* after = nullptr;
    // Instead of all of the above: other rows, to be prefetched while rows of this matrix are read.
    PrefetchQueue* queue = nullptr;
};

// How many bytes ahead tiled matrices, and grouped ones of q8_0 and q4_0 for one vector, are
// prefetched by software; 0: they are left to the hardware prefetcher, except where
// tiled_template.h and k_tiled.h say otherwise. dispatch.cpp sets it for processors that it knows,
// prefetch_distance.py for others; results do not depend on it.
inline int64_t stream_ahead = 0;

// Whether rows of a queue are prefetched to L2 only; results do not depend on it. dispatch.cpp sets it.
inline bool queue_to_l2 = false;

// A level is one instruction set. It has kernels for each kind, which do part of the work.
//
// y[t * y_stride + a] = row a . x[t] for rows a0 <= a < a1 and all vectors of x. A product does not
// depend on the others that are computed with it.
using DotRows = void(const Rows& rows, const Input& x, float* y, int64_t y_stride, int64_t a0,
                     int64_t a1);
// y[d] += sum over a0 <= a < a1 of c[a] * row a[d], for d0 <= d < d1, d0 % 128 == 0 (K-quants: 256);
// rows in order. For q8_0 and q4_0, c times scale is rounded to 16 bits for SUM_ROWS rows at a time, see
// planar_template.h. For these and where bf16_pairs.h is used, y is in a permuted order until order_sums.
// Rows of the grouped kinds are summed in whole groups, without a list, and their y is in order. rows.next: at most SUM_ROWS pointers, as many
// as rows but at least four.
constexpr int64_t SUM_ROWS = GROUP_ROWS;
using AccumulateRows = void(const Rows& rows, const float* c, float* y, int64_t a0, int64_t a1,
                            int64_t d0, int64_t d1);
// The same for several vectors and rows a0 .. a0 + k - 1, k <= WINDOW_ROWS, in groups of SUM_ROWS. Bit j of
// mask[t * mask_stride + g * mask_group] says whether vector t takes row j of group g; if not, its coefficient
// c[t * c_stride + g * c_group + j] is 0.
constexpr int64_t WINDOW_ROWS = 4 * SUM_ROWS;
struct ManySums {
    const float* c;
    const uint64_t* mask;
    float* y;
    int64_t c_stride, mask_stride, y_stride;  // from vector to vector
    int64_t c_group, mask_group;              // from group to group
    int64_t count;                            // vectors
    int64_t d0, d1;
};
using AccumulateMany = void(const Rows& rows, int64_t a0, int64_t k, const ManySums& sums);
// Puts columns d0 <= d < d1 of accumulate_rows' y in order; d0 % 128 == 0.
using OrderSums = void(float* y, int64_t d0, int64_t d1);
// Writes rows a0 <= a < a1 of out, D values each.
using UnpackRows = void(const Rows& rows, float* out, int64_t a0, int64_t a1);
// Fills x.packed from x.f32, for the vectors in use. Block kinds: D % 32 == 0.
using Quantise = void(const Input& x, int64_t D);
// Queries that share a key-value head, over n positions of the cache; each attends to the first
// `count`.
struct AttendPart {
    const uint8_t *const *key, *const *value;  // runs of rows
    int64_t run;                               // rows of a run, a multiple of 16 if there are several
    int64_t key_bytes, value_bytes;            // of a row
    int64_t n, W, value_width, num_queries;    // values of a key and of a value
    const int32_t* count;  // [num_queries] the number of rows that a query attends to, 0 .. n
    const float* query;    // [num_queries, padded_head(W)], zeros after W
    HsScores scores;
    float* score;        // [num_queries, padded_part(n)], scratch
    float *top, *total;  // [num_queries] the largest score; the sum of exp(score - top)
    float* out;          // [num_queries, padded_head(value_width)] the sum of exp(score - top) * value
    // [n] the row of each position in the only run, in any order; null: rows are in order.
    const int64_t *key_place = nullptr, *value_place = nullptr;
    // With a window: [num_queries] the first row that a query attends to, 0 .. its count, and the
    // least of them. Null: row 0.
    const int32_t* from = nullptr;
    int64_t first = 0;
};
// weigh_keys writes `score`, `top` and `total`, then mix_values sums the values into `out`. There
// are two functions because keys and values may be of different kinds.
using Attend = void(const AttendPart& part);
constexpr int64_t MAX_HEAD_WIDTH = 576;  // a latent of 512 and 64 that rotate (DeepSeek)
inline int64_t padded_head(int64_t W) { return (W + 31) / 32 * 32; }
inline int64_t padded_part(int64_t n) { return (n + 15) / 16 * 16; }

// out[g * stride + i] = row i . query[g], exact integers, for i < n and all queries; see
// key_scores_template.h. dot_bytes: row[i] are `width` bytes each, 0 to 127. dot_codes: row[0] points to n
// rows of `width` values of two bits.
constexpr int64_t SELECT_WIDTH = 64;
struct SelectDots {
    const uint8_t* const* row;
    int64_t n, width, num_queries, stride;
    const int8_t* query;  // [num_queries, width]
    int32_t* out;
};
// score[g * stride + i] = center[g * center_stride] + (times * dot[g * n + i] - offset[g]) * factor[i] * by[g]
// for i < n and all queries; no center: 0.
struct SelectScores {
    const int32_t* dot;  // [num_queries, n]
    int64_t n, num_queries, stride, center_stride;
    int32_t times;
    const int32_t* offset;
    const float *factor, *by, *center;
    float* score;
};

// T consecutive rows of a sequence that a head with a state reads, and the convolution of their inputs
// (delta_template.h). Rows are numbered from the `num_again` ones on that the sequence begins with: rows of an earlier
// pass, which change the state again but have no outputs. Letters: J taps, C channels, R values of a row that has been
// kept: the inputs of the convolution, and after these the numbers of heads that the state depends on.
struct HeadRows {
    int64_t J, C, R;
    int64_t begin, T;  // rows begin .. begin+T-1
    int64_t num_again;
    const float* again;  // [num_again, R]
    const float* x;  // row num_again + t begins at x + t * x_stride, with C inputs of the convolution
    int64_t x_stride;
    const float *conv, *conv_bias;  // [J, C], oldest first; [C] or null
    const float *inputs,
        *state;  // before row 0, [J - 1, C], and before row `begin`, the head's; or null: zeros
    float *next_inputs, *next_state;  // both after the last row; other memory; or null
    float* y;  // the head's output of row num_again + t begins at y + t * y_stride
    int64_t y_stride;
    float* scratch;  // 64-aligned

    bool is_again(int64_t t) const { return t < num_again; }
    const float* row(int64_t t) const {
        return is_again(t) ? again + t * R : x + (t - num_again) * x_stride;
    }
};

// A value head of a gated delta net. Letters: G key heads, V value heads, N and M values of a key and of a value head,
// A decays of a value head. The channels are q [G, N], k [G, N], v [V, M]; beta [V] and alpha [V, A], which are kept too,
// are before their functions, and z [V, M] is behind them in rows that are not kept.
struct DeltaHead : HeadRows {
    int64_t value_head, key_head;
    bool stores_key;  // the key head's inputs too; one value head of a key head does
    int64_t G, V, N, M;
    const float *decay, *step_bias;  // [V], below zero; [V, A]
    const float* norm;               // [M], of the output
    float epsilon;
    // Kimi Delta Attention (arXiv 2510.26692): a decay of each row of the state, A = N, and gates by sigmoid; else A = 1,
    // and gates by silu.
    bool is_by_row;

    int64_t A() const { return is_by_row ? N : 1; }
    const float* gates(int64_t t) const { return row(t) + C; }  // beta and alpha
};

// A head of Mamba-2. Letters: H heads, G groups, P values of a head, N of a state. The channels are x [H, P],
// b [G, N], c [G, N]; the steps [H] kept after them are before their function.
struct Mamba2Head : HeadRows {
    int64_t head, group;
    bool stores_group;  // the group's inputs too; one head of a group does
    int64_t H, G, N, P;
    const float *decay, *step_bias,
        *skip;  // [H]: below zero; added to steps; the factor of x in the output
};
constexpr int64_t DELTA_ROWS = 16;  // rows taken at a time
constexpr int64_t MAX_TAPS = 16;
inline int64_t padded_delta(int64_t M) { return (M + 15) / 16 * 16; }
inline int64_t delta_scratch(int64_t N, int64_t M) {
    return DELTA_ROWS * (4 * N + padded_delta(M)) + (N + 1) * padded_delta(M);
}
inline int64_t mamba2_scratch(int64_t N, int64_t P) {
    return DELTA_ROWS * (2 * N + 2 * padded_delta(P)) + N * padded_delta(P);
}

struct Kernels {
    DotRows* dot_rows[NUM_KINDS];                // null for the grouped kinds
    AccumulateRows* accumulate_rows[NUM_KINDS];  // null for the tiled kinds
    AccumulateMany* accumulate_many[NUM_KINDS];  // likewise
    UnpackRows* unpack_rows[NUM_KINDS];
    Quantise* quantise[NUM_KINDS];  // null for grouped kinds, f32 and f16; bf16: HAS_BF16_PAIRS only
    Attend *weigh_keys[NUM_CACHE_KINDS], *mix_values[NUM_CACHE_KINDS];
    OrderSums* order_sums[NUM_KINDS];  // null if they are in order
    // Writes the indices of scores that are above the limit or NaN, ascending, to `chosen` [n]; returns
    // their number.
    int64_t (*choose)(const float* score, int64_t n, float limit, int32_t* chosen);
    // SiLU or GELU of n values, in place; NaN stays NaN. `activation` is one of these.
    void (*smooth)(float* x, int64_t n, int32_t activation);
    // x[i] = cap * tanh(x[i] / cap), for a cap above 0; NaN stays NaN.
    void (*soft_cap)(float* x, int64_t n, float cap);
    // Bit i says whether x[i] is above the limit or NaN. n <= 64.
    uint64_t (*above)(const float* x, int64_t n, float limit);
    // Sets values i < 64 whose bit is not set to 0.
    void (*keep_only)(float* x, uint64_t mask);
    // y[i] += x[i]
    void (*add_to)(float* y, const float* x, int64_t n);
    // y[i] = the sum of part[c * stride + i] over c < count, in order
    void (*sum_parts)(const float* part, int64_t stride, int64_t count, int64_t n, float* y);
    // Norms of x [n]; y may be x. `bias` may not be null.
    void (*rms_norm)(const float* x, const float* weight, float epsilon, int64_t n, float* y);
    void (*layer_norm)(const float* x, const float* weight, const float* bias, float epsilon, int64_t n,
                       float* y);
    // Rotates pairs of values of each head, which are adjacent or half a head apart. x: [heads, width], in
    // place; cos and sin: [width / 2].
    void (*rotate)(float* x, int64_t heads, const float* cos, const float* sin, int64_t width,
                   bool is_adjacent);
    // y[i] *= sigmoid(gate[i])
    void (*gate_by)(float* y, const float* gate, int64_t n);
    // Writes y, next_inputs and next_state; reads C, and reads and writes M * N, values of state once.
    void (*delta_head)(const DeltaHead& head);
    // The same; reads and writes N * P values of state once.
    void (*mamba2_head)(const Mamba2Head& head);
    // y[i] = x[i], rounded as by to_f16()
    void (*store_f16)(const float* x, int64_t n, uint16_t* y);
    void (*dot_bytes)(const SelectDots& dots);
    void (*dot_codes)(const SelectDots& dots);
    void (*scale_dots)(const SelectScores& scores);
    // Converts scores [G, n] of queries that share keys to their softmax mass summed over queries, `out` [n].
    void (*share_mass)(float* score, int64_t num_queries, int64_t n, float* out);
    // Writes the indices of the `k` largest of scores [n], ascending, to `chosen` [k]; k <= n, and no
    // score is negative. Of equal scores the first wins; NaN counts as infinite. `bits` [n] is scratch.
    void (*choose_largest)(const float* score, int64_t n, int64_t k, int32_t* bits, int32_t* chosen);
};

extern const Kernels kernels_generic, kernels_avx2, kernels_avxvnni, kernels_avx512, kernels_avx512vnni;
extern const Kernels kernels_avx512bf16;
extern const Kernels kernels_amx;
// rows_grids.cpp: adds those of tiles of types with grids; as hs_set_grid.
void add_grids(Kernels& to);
int32_t set_grid_of(int32_t kind, const uint8_t* codes, int64_t num_entries);

// The beginning of the definition of a function that Python calls.
#define EXPORT extern "C" __attribute__((visibility("default")))

// Functions that library.py calls; step.h and row_copies.h declare the others.
extern "C" {
// weight: num_rows rows, `stride` bytes apart; x: [T, D]; index: A or null; y: [T, A], written.
int32_t hs_dot_rows(int32_t kind, const uint8_t* weight, int64_t stride, int64_t num_rows, int64_t D,
                    const float* x, int64_t T, const int32_t* index, int64_t A, float* y);
// weight: num_rows rows, `stride` bytes apart; c: A; index: A or null; y: D, written.
int32_t hs_accumulate_rows(int32_t kind, const uint8_t* weight, int64_t stride, int64_t num_rows,
                           int64_t D, const float* c, const int32_t* index, int64_t A, float* y);
// Copies rows of the kind (index null: all rows) as rows of `to_kind`: the same kind, or one that is made from it.
int32_t hs_pack_rows(int32_t kind, int32_t to_kind, const uint8_t* from, int64_t num_rows, int64_t D,
                     const int32_t* index, int64_t A, uint8_t* to, int64_t stride);
// weight: num_rows rows, `stride` bytes apart; index: A or null; out: A * D values, written.
int32_t hs_unpack_rows(int32_t kind, const uint8_t* weight, int64_t stride, int64_t num_rows, int64_t D,
                       const int32_t* index, int64_t A, float* out);
// Whether the level has kernels for tiles of types with grids.
int32_t hs_reads_grids();
// codes: one for each value of an entry of a type's grid, the place of its magnitude in the type's table
// (k_formats.h). Copied.
int32_t hs_set_grid(int32_t kind, const uint8_t* codes, int64_t num_entries);
const char* hs_level();
const char* hs_faulty_level();  // the best level that is advertised but faults or errs; or null
int32_t hs_level_status(const char* name);
int32_t hs_set_level(const char* name);
int32_t hs_num_threads();
// 1 to 1024 threads, and the processors that they may keep busy. The default counts until hs_set_threads; at
// first it is 1.
void hs_set_default_threads(int32_t num_threads, int32_t num_processors);
int32_t hs_set_threads(int32_t num_threads, int32_t num_processors);
void hs_set_spin_time(int32_t microseconds);
int32_t hs_knows_prefetch_distance();  // of this processor
int64_t hs_prefetch_distance();        // stream_ahead
void hs_set_prefetch_distance(int64_t bytes);
void hs_evict(const uint8_t* begin, int64_t num_bytes);  // from all caches
}
