// A layer's attention, and what becomes of the queries, keys and values of a row between their projection and the
// cache: gates apart, norms, rotation, growth, the cache's own rotation. Heads of src/hotsplit/model/attention.py has
// the last fields of HsAttention by the same names, from which they are mirrored; ops/attention/block.py is the
// reference.
#pragma once
#include <stdint.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "cache_rows.h"
#include "scores.h"
#include "tensors.h"

// The second matrices of latent attention, see latent.h for the letters.
struct HsLatent {
    HsMatrix query;  // [H (N + P), R], or absent: the first one gives the queries
    HsMatrix key;    // [H C, N]
    HsMatrix value;  // [H V, C]
    HsNorm query_norm, key_norm;
};

struct HsAttention {
    HsNorm query_norm, key_norm;
    // Absent if a GPU projects (OP_ATTEND). With `latent`: of queries or their latents, and of key and latent.
    HsMatrix input[4], output;
    const HsLatent* latent;  // or null
    uint8_t *key, *value;    // [num_blocks, K, block_length, bytes of a row], see cache_rows.h
    // Only with a selection, see key_selection.h; B: key blocks in a block of the cache.
    uint8_t *summary, *code;  // [num_blocks, K, B, bytes], [num_blocks, K, B * block, W / 4 padded]
    float *summary_unit, *code_factor;  // [num_blocks, K, B], [num_blocks, K, B * block]
    HsScores scores;
    int32_t rotary;  // index in HsStep's `rotary`; below 0: queries and keys are not rotated
    int32_t table;   // index in HsStep's `table`
    int64_t num_heads, num_kv_heads, head_dim;
    // What is projected beside queries. 2: keys and values; 1: keys, which are the values as they are before
    // their norm; 0: nothing, the keys and values are an earlier layer's.
    int64_t num_kv_projections;
    int64_t
        value_width;  // values are this many of the last ones of the keys as stored; 0: they are stored
    int64_t window;   // a token attends to this many of the latest positions; 0: to all
    // Queries at position p are multiplied by 1 + growth * log(1 + floor(p / growth_length)) (Llama 4).
    int64_t growth_length;  // 0: they are not
    // Gates of each head behind all that is projected otherwise, by whose sigmoids its output is multiplied:
    // head_dim, one for each value; 1, for all of them; or 0.
    int64_t gate_width;
    float growth;
    int32_t norms_all_heads;  // query_norm and key_norm are over all heads together, else over each
    int32_t norms_by_head;    // query_norm and key_norm have weights for each head, [H, W] and [K, W]
    int32_t norms_values;     // each head of values has an RMS norm without weights
    // attn_q has for each head its query, then as many gates: the head's output is multiplied by their sigmoids
    int32_t is_gated;
    int32_t norms_rotated;  // query_norm and key_norm come after the rotation
};

inline int64_t queries_size(const HsAttention& l) { return l.num_heads * l.head_dim; }
// Values of a head's output.
inline int64_t value_size(const HsAttention& l) { return l.value_width ? l.value_width : l.head_dim; }
inline int64_t heads_size(const HsAttention& l) { return l.num_heads * value_size(l); }
inline bool has_gates(const HsAttention& l) { return l.is_gated || l.gate_width; }
inline int64_t gates_size(const HsAttention& l) { return has_gates(l) ? heads_size(l) : 0; }
// Heads of keys that a layer writes to its cache, and as many of values.
inline int64_t own_heads(const HsAttention& l) { return l.num_kv_projections ? l.num_kv_heads : 0; }
inline int64_t query_rows(const HsAttention& l) { return queries_size(l) * (l.is_gated ? 2 : 1); }
// What is projected for a row.
inline int64_t qkv_size(const HsAttention& l) {
    return query_rows(l) + l.num_kv_projections * l.num_kv_heads * l.head_dim +
           l.num_heads * l.gate_width;
}
inline int64_t raw_keys_size(const HsAttention& l) {
    return l.num_kv_projections == 1 && !l.value_width ? l.num_kv_heads * l.head_dim : 0;
}

// Matrices that project: one, for all, or one each for queries, keys, values and gates as far as they are projected.
inline int64_t num_inputs(const HsAttention& l) {
    int64_t count = 0;
    while (count < 4 && l.input[count].data) ++count;
    return count;
}

// True if the numbers and norms of the heads fit together.
inline bool heads_fit(const HsAttention& l) {
    if (l.num_kv_projections < 0 || l.num_kv_projections > 2 || l.growth_length < 0) return false;
    if (l.gate_width && (l.is_gated || (l.gate_width != 1 && l.gate_width != l.head_dim))) return false;
    if (l.value_width < 0 || l.value_width > l.head_dim || (l.latent && !l.value_width)) return false;
    if (l.value_width && (l.num_kv_projections != 1 || has_gates(l) || l.norms_values)) return false;
    if (num_inputs(l) > 1 && num_inputs(l) != 1 + l.num_kv_projections + (l.gate_width > 0))
        return false;
    if (!l.query_norm.weight) return !l.norms_values;
    return !l.num_kv_projections || l.key_norm.weight;
}

// What a row's queries, keys and values are prepared with.
struct RowOfHeads {
    int64_t position;
    const HsRotary* rotary;                 // null: they are not rotated
    const float *cos, *sin;                 // of the position, if they are
    bool is_key_rotated, is_value_rotated;  // by the cache
    float *gates, *raw_keys;                // room: gates_size, raw_keys_size
};

// Moves each head's gates to `gates` [H, W], and the queries, keys and values of the row together.
inline void take_gates(const HsAttention& l, float* values, float* gates) {
    const int64_t W = l.head_dim, H = l.num_heads;
    for (int64_t h = 0; h < H; ++h) {
        std::copy_n(values + (2 * h + 1) * W, W, gates + h * W);
        std::copy_n(values + 2 * h * W, h ? W : 0, values + h * W);
    }
    std::copy_n(values + 2 * H * W, l.num_kv_projections * l.num_kv_heads * W, values + H * W);
}

// Copies the gates of a row to `gates` [H, W], a head's only one to each of its values.
inline void copy_gates(const HsAttention& l, const float* values, float* gates) {
    const float* own = values + qkv_size(l) - l.num_heads * l.gate_width;
    for (int64_t h = 0; h < l.num_heads; ++h, gates += l.head_dim)
        if (l.gate_width == 1)
            std::fill_n(gates, l.head_dim, own[h]);
        else
            std::copy_n(own + h * l.head_dim, l.head_dim, gates);
}

// Norms the queries and keys of a row in place.
inline void norm_heads(const HsAttention& l, float* values) {
    const int64_t W = l.head_dim, H = l.num_heads, K = own_heads(l);
    if (!l.query_norm.weight) return;
    if (l.norms_all_heads) {
        apply(l.query_norm, values, H * W, values);
        if (K) apply(l.key_norm, values + H * W, K * W, values + H * W);
        return;
    }
    for (int64_t h = 0; h < H + K; ++h) {
        HsNorm norm = h < H ? l.query_norm : l.key_norm;
        if (l.norms_by_head) norm.weight += (h < H ? h : h - H) * W;
        apply(norm, values + h * W, W, values + h * W);
    }
}

// Norms the values [K, W] of a row in place.
inline void norm_values(const HsAttention& l, float* own) {
    static const std::array<float, MAX_HEAD_WIDTH> ones = [] {
        std::array<float, MAX_HEAD_WIDTH> each;
        each.fill(1.0f);
        return each;
    }();
    const HsNorm norm = {ones.data(), nullptr, l.query_norm.epsilon, 0};
    for (int64_t k = 0; k < own_heads(l); ++k)
        apply(norm, own + k * l.head_dim, l.head_dim, own + k * l.head_dim);
}

// Rotates the queries and keys of a row in place, or the first values of each head.
inline void rotate_heads(const HsAttention& l, const RowOfHeads& row, float* values) {
    const HsRotary& rotary = *row.rotary;
    const int64_t W = l.head_dim, heads = l.num_heads + own_heads(l);
    const int64_t together = rotary.head_width == W ? heads : 1;
    for (int64_t h = 0; h < heads; h += together)
        kernels().rotate(values + h * W, together, row.cos, row.sin, rotary.head_width,
                         rotary.is_adjacent);
}

inline void grow_queries(const HsAttention& l, int64_t position, float* values) {
    const double steps = static_cast<double>(position / l.growth_length);
    const float factor = static_cast<float>(1.0 + l.growth * std::log1p(steps));
    for (float* x = values; x < values + queries_size(l); ++x) *x *= factor;
}

// Values that the cache rotates together, in keys and in what is summed of them.
inline int64_t turned_together(const HsAttention& l) {
    const int64_t all = l.head_dim | (l.head_dim - value_size(l));
    return all & -all;
}

// Prepares the projections of a row in place: with gates behind queries (2 H + 2 K) W values, else (H + 2 K) W; if
// values are keys, (H + K) W; if they are another layer's, H W; behind these are other gates. Queries are then at
// `values`, keys after them, and values at what it returns: null, if they are another layer's or a part of the keys.
inline float* prepare_heads(const HsAttention& l, const RowOfHeads& row, float* values) {
    const int64_t W = l.head_dim, H = l.num_heads, K = own_heads(l);
    if (l.is_gated) take_gates(l, values, row.gates);
    if (l.gate_width) copy_gates(l, values, row.gates);
    float* own = values + (H + K) * W;
    if (raw_keys_size(l)) own = std::copy_n(values + H * W, K * W, row.raw_keys) - K * W;
    if (!l.norms_rotated) norm_heads(l, values);
    if (l.norms_values) norm_values(l, own);
    if (row.rotary) rotate_heads(l, row, values);
    if (l.norms_rotated) norm_heads(l, values);
    if (l.growth_length) grow_queries(l, row.position, values);
    for (int64_t h = 0; row.is_key_rotated && h < H + K; ++h)
        turn_by_hadamard(values + h * W, W, turned_together(l));
    if (!K || l.value_width) return nullptr;
    for (int64_t k = 0; row.is_value_rotated && k < K; ++k) turn_by_hadamard(own + k * W, W, W & -W);
    return own;
}
