// Runs the kernels of every usable level at sizes around block edges, and whole decode steps with
// all keys and with selected ones, on buffers without spare bytes (but for the alignment of a
// workspace). Compiled by test_sanitizers.py with the address and undefined-behaviour sanitizers,
// which end the program on an error. An argument names a fault that the program then has.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "../../runtime/kernels/cpu/dispatch.h"
#include "../../runtime/kernels/cpu/probe.h"
#include "../../runtime/kernels/cpu/row_copies.h"
#include "../../runtime/kernels/cpu/key_selection.h"
#include "../../runtime/kernels/cpu/step.h"
// Operations whose weights the driver makes.
#include "../../runtime/kernels/cpu/delta.cpp"
#include "../../runtime/kernels/cpu/draft_input.cpp"
#include "../../runtime/kernels/cpu/low_rank.cpp"
#include "../../runtime/kernels/cpu/per_layer.cpp"
#include "../../runtime/kernels/cpu/planes.cpp"
#include "../../runtime/kernels/cpu/short_conv.cpp"

namespace {

constexpr float UNSEEN = -1e30f;

const char* planted = "";
bool has_fault(const char* name) { return std::strcmp(planted, name) == 0; }

uint32_t state = 1;
uint32_t next() { return state = state * 1664525u + 1013904223u; }
float uniform() { return static_cast<float>(next() >> 8) / (1 << 23) - 1.0f; }

// Memory of exactly this many bytes, so that the sanitizer reports an access to the byte past it.
std::vector<std::unique_ptr<uint8_t[]>> all;
uint8_t* bytes(int64_t count) {
    all.emplace_back(new uint8_t[count]);
    return all.back().get();
}

float* floats(int64_t count, float shift = 0.0f) {
    float* values = reinterpret_cast<float*>(bytes(count * 4));
    for (int64_t i = 0; i < count; ++i) values[i] = shift + 0.1f * uniform();
    return values;
}

// The same from a multiple of 64 bytes on, as a workspace must be.
uint8_t* aligned(int64_t count) {
    uint8_t* memory = bytes(count + 63);
    return memory + (64 - reinterpret_cast<uintptr_t>(memory) % 64) % 64;
}

// A list of A rows, the last first.
const int32_t* backwards(int64_t A) {
    int32_t* index = reinterpret_cast<int32_t*>(bytes(A * 4));
    for (int64_t a = 0; a < A; ++a) index[a] = static_cast<int32_t>(A - 1 - a);
    return index;
}

// Rows of any type with small finite values.
uint8_t* weights(int32_t kind, int64_t num_rows, int64_t D) {
    const int32_t in_file = kind_in_file(kind);
    if (in_file != kind) {
        const int64_t stride = row_bytes_of(kind, D);
        uint8_t* packed = bytes(num_rows * stride);
        const uint8_t* from = weights(in_file, num_rows, D);
        hs_pack_rows(in_file, kind, from, num_rows, D, nullptr, num_rows, packed, stride);
        return packed;
    }
    const int64_t size = num_rows * row_bytes_of(kind, D);
    uint8_t* data = bytes(size);
    if (kind == KIND_F32) {
        std::memcpy(data, floats(num_rows * D), size);
        return data;
    }
    for (int64_t i = 0; i < size; ++i) data[i] = static_cast<uint8_t>(next() >> 24);
    const int64_t values = block_values(kind), stride = row_bytes_of(kind, values);
    const int64_t scale_at = kind == KIND_Q6_K   ? 208
                             : kind == KIND_Q3_K ? 108
                             : kind == KIND_Q2_K ? 80
                                                 : 0;
    const bool has_minima =
        kind == KIND_Q4_K || kind == KIND_Q5_K || kind == KIND_Q2_K || KINDS[kind].head_bytes == 4;
    for (uint8_t* block = data; block < data + size; block += stride) {
        if (KINDS[kind].head_bytes == 1) {
            block[0] = 0x78;
            continue;
        }
        block[scale_at + 1] = kind == KIND_BF16 ? 0x3d : 0x20;
        if (has_minima) block[scale_at + 3] = 0x20;
    }
    return data;
}

// True if rows listed backwards in `index` unpack to the same values as all rows in order.
bool unpacks(int32_t kind, const uint8_t* w, int64_t D, const int32_t* index, int64_t A) {
    const int64_t row_bytes = row_bytes_of(kind, D);
    float *all_rows = floats(A * D), *backwards = floats(A * D);
    if (hs_unpack_rows(kind, w, row_bytes, A, D, nullptr, A, all_rows) ||
        hs_unpack_rows(kind, w, row_bytes, A, D, index, A, backwards))
        return false;
    for (int64_t a = 0; a < A; ++a)
        if (std::memcmp(all_rows + a * D, backwards + (A - 1 - a) * D, D * 4)) return false;
    return true;
}

bool kernels_at(int32_t kind, int64_t D, int64_t A) {
    const uint8_t* w = weights(kind, has_fault("a row too many") && A > 1 ? A - 1 : A, D);
    const int64_t row_bytes = row_bytes_of(kind, D);
    constexpr int64_t T = 131;
    const float *x = floats(T * D), *c = floats(A);
    const int32_t* index = backwards(A);
    float *y = floats(A), *reversed = floats(A), *z = floats(D), *many = floats(T * A);
    if (hs_dot_rows(kind, w, row_bytes, A, D, x, 1, nullptr, A, y)) return false;
    if (hs_dot_rows(kind, w, row_bytes, A, D, x, 1, index, A, reversed)) return false;
    // Past a tile of vectors, either many rows or long ones: no address depends on all three.
    const int64_t most = A > 16 && D > 256 ? 37 : T;
    for (int64_t count : {int64_t{2}, int64_t{3}, int64_t{37}, most})
        if (hs_dot_rows(kind, w, row_bytes, A, D, x, count, nullptr, A, many) ||
            hs_dot_rows(kind, w, row_bytes, A, D, x, count, index, A, many))
            return false;
    for (int64_t a = 0; a < A; ++a)
        if (y[a] != reversed[A - 1 - a] || y[a] != many[A - 1 - a]) return false;
    if (is_tiled(kind))
        return hs_accumulate_rows(kind, w, row_bytes, A, D, c, nullptr, A, z) == STATUS_BAD_ARGUMENT &&
               unpacks(kind, w, D, index, A);
    return !hs_accumulate_rows(kind, w, row_bytes, A, D, c, nullptr, A, z) &&
           !hs_accumulate_rows(kind, w, row_bytes, A, D, c, index, A, z) &&
           unpacks(kind, w, D, index, A);
}

// The kind itself if its rows can be multiplied and summed in any number, otherwise another layout
// of the same values with which they can.
int32_t summed(int32_t kind) {
    if (!is_tiled(kind) && !is_grouped(kind)) return kind;
    const int32_t in_file = kind_in_file(kind);
    return in_file == KIND_Q4_0 ? KIND_Q4_0_PLANAR : in_file == KIND_Q8_0 ? KIND_Q8_0_PLANAR : in_file;
}

// True if the sum of grouped rows equals that of the same rows in another layout, bit for bit, if
// they unpack, and if products, and the sum of a list of rows, are refused.
bool groups_at(int32_t kind, int64_t D, int64_t A) {
    const int32_t in_file = kind_in_file(kind);
    const int64_t row_bytes = row_bytes_of(kind, D);
    const uint8_t* from = weights(in_file, A, D);
    uint8_t *packed = bytes(A * row_bytes), *planar = bytes(A * row_bytes);
    for (int32_t to : {kind, summed(kind)})
        if (hs_pack_rows(in_file, to, from, A, D, nullptr, A, to == kind ? packed : planar, row_bytes))
            return false;
    const float *x = floats(D), *c = floats(A, -0.05f);
    const int32_t* index = backwards(A);
    float *y = floats(A), *z = floats(D), *want = floats(D);
    return !hs_accumulate_rows(kind, packed, row_bytes, A, D, c, nullptr, A, z) &&
           !hs_accumulate_rows(summed(kind), planar, row_bytes, A, D, c, nullptr, A, want) &&
           std::memcmp(z, want, D * sizeof(float)) == 0 && unpacks(kind, packed, D, index, A) &&
           hs_accumulate_rows(kind, packed, row_bytes, A, D, c, index, A, z) == STATUS_BAD_ARGUMENT &&
           hs_dot_rows(kind, packed, row_bytes, A, D, x, 1, nullptr, A, y) == STATUS_BAD_ARGUMENT;
}

HsMatrix matrix(int32_t kind, int64_t num_rows, int64_t D, bool has_bias) {
    if (num_rows % TILE_ROWS || is_grouped(kind)) kind = summed(kind);
    return {weights(kind, num_rows, D),
            has_bias ? floats(num_rows) : nullptr,
            num_rows,
            D,
            row_bytes_of(kind, D),
            kind,
            0};
}

HsNorm norm(int64_t n, bool is_layer_norm) {
    return {floats(n, 1.0f), is_layer_norm ? floats(n) : nullptr, 1e-5f, 0};
}

uint32_t* words(int64_t count) { return reinterpret_cast<uint32_t*>(bytes(count * 4)); }

// Runs the neurons of a block without a step, skipping silent ones. True if several tokens together set
// the same bits as each token alone, also if the block lists the ids of its neurons.
bool neurons(const HsBlock& whole, int32_t activation, int64_t D, int64_t F) {
    constexpr int64_t T = 3;
    const int64_t W = (F + 31) / 32;
    for (const int32_t* ids : {static_cast<const int32_t*>(nullptr), backwards(F)}) {
        HsNeurons n = {};
        n.block = whole, n.block.id = ids;
        n.x = floats(T * D), n.y = floats(T * D), n.fired = words(T * W);
        n.width = D, n.num_neurons = F, n.num_tokens = n.max_tokens = T;
        n.gate.activation = activation;
        const int64_t size = hs_neurons_bytes(&n);
        if (size < 0) return false;
        n.workspace = aligned(size);
        hs_neurons(&n);
        const uint32_t* together = n.fired;
        n.num_tokens = 1, n.fired = words(W);
        for (int64_t t = 0; t < T; ++t, n.x += D) {
            hs_neurons(&n);
            if (std::memcmp(n.fired, together + t * W, W * 4)) return false;
        }
    }
    return true;
}

// The same block with gate, up and down of each neuron adjacent.
HsBlock interleaved(HsBlock block) {
    HsMatrix* matrices[] = {&block.gate, &block.up, &block.down};
    auto row_bytes = [](const HsMatrix& m) { return m.data ? row_bytes_of(m.kind, m.num_columns) : 0; };
    int64_t stride = 0, at = 0;
    for (const HsMatrix* m : matrices) stride += row_bytes(*m);
    uint8_t* memory = bytes(block.num_neurons * stride);
    for (HsMatrix* m : matrices) {
        const int64_t size = row_bytes(*m);
        for (int64_t j = 0; j < block.num_neurons && size; ++j)
            std::memcpy(memory + j * stride + at, m->data + j * m->stride, size);
        if (size) m->data = memory + at, m->stride = stride;
        at += size;
    }
    return block;
}

// The norms of a pre-norm layer, in this order.
enum { NORM_ATTN, NORM_FFN };

const HsNorm* norms(int64_t D, bool is_layer_norm) {
    HsNorm* found = reinterpret_cast<HsNorm*>(bytes(2 * sizeof(HsNorm)));
    found[NORM_ATTN] = norm(D, is_layer_norm), found[NORM_FFN] = norm(D, is_layer_norm);
    return found;
}

// The operations of a model of one pre-norm layer.
std::vector<HsOp> operations(const HsStep& s) {
    const int32_t none = VALUE_NONE;
    std::vector<HsOp> ops = {
        {OP_EMBED, 1, 0, none, none, VALUE_X},
        {OP_NORM, 0, NORM_ATTN, VALUE_X, none, VALUE_ATTN_IN},
        {OP_ATTENTION, 0, 0, VALUE_ATTN_IN, none, VALUE_ATTN_OUT},
        {OP_ADD, 0, 0, VALUE_X, VALUE_ATTN_OUT, VALUE_X},
        {OP_NORM, 0, NORM_FFN, VALUE_X, none, VALUE_FFN_IN},
        {OP_NEURONS, 0, 0, VALUE_FFN_IN, none, VALUE_FFN_OUT},
        {OP_ADD, 0, 0, VALUE_X, VALUE_FFN_OUT, VALUE_X},
        {OP_HEAD_NORM, 1, 0, VALUE_X, none, VALUE_ATTN_IN},
        {OP_HEAD, 1, 0, VALUE_ATTN_IN, none, none},
    };
    if (s.layer->feed_forward.down_bias)
        ops.insert(ops.begin() + 6, {OP_ADD_BIAS, 0, 0, VALUE_FFN_OUT, none, VALUE_FFN_OUT});
    if (s.layer->predictor.up.data) {
        ops.insert(ops.begin() + 5, {OP_PREDICT, 0, 0, VALUE_FFN_IN, none, VALUE_NAMED});
        ops[6].in_2 = VALUE_NAMED;
    }
    return ops;
}

// True if the last position's logits are `want` when the operations run in parts: all in one, for
// one row; four at a time, for two rows; and one at a time, for one row. In the last two cases the
// vectors are outside the workspace.
bool parts(HsStep step, const float* want) {
    const int64_t V = step.head.num_rows, last = step.context_length - 1;
    const int64_t most = std::min<int64_t>(2, step.max_rows), num_rows_of[] = {1, most};
    const HsRow rows[] = {{last - most + 1, last - most + 1, 0, 0, -1, 0}, {last, last, 0, 1, -1, 0}};
    HsPart part = {};
    part.step = &step, part.logits = floats(V);
    part.named = words(2 * ((step.num_neurons + 31) / 32));
    for (int64_t length : {step.num_ops, int64_t{4}, int64_t{1}}) {
        const int64_t& num_rows = num_rows_of[length == 4];
        part.num_rows = &num_rows, part.row = rows + 2 - num_rows;
        for (part.begin = 0; part.begin < step.num_ops; part.begin = part.end) {
            part.end = std::min(part.begin + length, step.num_ops);
            hs_part(&part);
        }
        if (std::memcmp(part.logits, want, V * sizeof(float))) return false;
        for (float*& vector : step.vector) vector = floats(2 * step.width);
        step.max_rows = most;
    }
    return true;
}

// True if a step is refused when any field of its OP_NEURONS is out of range.
bool refuses_operations(const HsStep& step) {
    for (int32_t HsOp::* field :
         {&HsOp::kind, &HsOp::layer, &HsOp::part, &HsOp::in, &HsOp::in_2, &HsOp::out})
        for (int32_t wrong : {-1, 100}) {
            HsStep other = step;
            std::vector<HsOp> ops = operations(step);
            ops[5 + (step.layer->predictor.up.data != nullptr)].*field = wrong;
            other.op = ops.data();
            if (hs_step_bytes(&other) != -1) return false;
        }
    return true;
}

// Runs three sequences whose cache blocks, of 32 positions, are not in order. At every position the
// first two compute a row, and the third copies the second's key and value. True if the last
// position has the same logits in all three, and if an unknown sequence, a wrong source and a block
// that does not exist are refused.
bool pages(HsStep step, HsLayer layer, const float* want) {
    constexpr int64_t LENGTH = 32;
    const int64_t C = step.context_length, V = step.head.num_rows, N = (C + LENGTH - 1) / LENGTH;
    const int64_t size = 3 * N * LENGTH * layer.attention.num_kv_heads * layer.attention.head_dim * 2;
    layer.attention.key = bytes(size), layer.attention.value = bytes(size);
    step.layer = &layer;
    std::vector<int32_t> block(3 * N);
    for (int64_t i = 0; i < 3 * N; ++i) block[i] = static_cast<int32_t>((5 * i + 2) % (3 * N));
    const HsTable table = {block.data(), 3, N, LENGTH, 3 * N, 0};
    step.table = &table;
    std::vector<float> logits(2 * V);
    for (int64_t position = 0; position < C; ++position) {
        const auto at = [&](int32_t sequence, int32_t source) {
            return HsRow{position, position, sequence, source < 0, source, 0};
        };
        const HsRow rows[] = {at(0, -1), at(1, -1), at(2, 1)};
        if (hs_step(&step, rows, 3, logits.data())) return false;
    }
    const HsRow last[] = {{C - 1, C - 1, 2, 1, -1, 0}, {C - 1, C - 1, 1, 1, -1, 0}};
    if (std::memcmp(logits.data(), want, V * sizeof(float))) return false;
    if (std::memcmp(logits.data() + V, want, V * sizeof(float))) return false;
    std::fill(logits.begin(), logits.end(), 0.0f);
    if (hs_step(&step, last, 2, logits.data())) return false;
    const HsRow wrong[] = {{0, 0, 3, 1, -1, 0}, {0, 0, 0, 1, 0, 0}};
    if (std::memcmp(logits.data(), want, V * sizeof(float))) return false;
    if (std::memcmp(logits.data() + V, want, V * sizeof(float))) return false;
    for (const HsRow& row : wrong)
        if (hs_step(&step, &row, 1, logits.data()) != STATUS_BAD_ARGUMENT) return false;
    block[0] = static_cast<int32_t>(3 * N);
    const HsRow astray = {0, 0, 0, 1, -1, 0};
    return hs_step(&step, &astray, 1, logits.data()) == STATUS_INDEX_OUT_OF_RANGE;
}

bool steps(int32_t kind, bool computes_all, bool is_named, bool is_gated, int64_t rank) {
    const bool is_wide = block_values(kind) > 32;
    const int64_t D = is_wide ? 256 : 96, W = is_wide ? 64 : 24;
    const int64_t F = is_grouped(kind) ? 64 : 65, H = 4, K = 2, V = 33, R = 5;
    const int64_t C = computes_all && is_gated && !rank ? 33 : 9;  // 33: two blocks in pages()
    HsLayer layer = {};
    layer.norm = norms(D, !is_gated), layer.num_norms = 2;
    HsAttention& attention = layer.attention;
    HsFeedForward& feed_forward = layer.feed_forward;
    attention.input[0] = matrix(kind, H * W, D, true);
    for (int i : {1, 2}) attention.input[i] = matrix(kind, K * W, D, true);
    attention.output = matrix(kind, D, H * W, true);
    attention.key = bytes(C * K * W * 2), attention.value = bytes(C * K * W * 2);
    if (is_named && rank) layer.predictor.down = matrix(kind, rank, D, false);
    if (is_named) layer.predictor.up = matrix(kind, F, rank ? rank : D, true);
    feed_forward.down_bias = floats(D), feed_forward.gate.computes_all = computes_all;
    HsBlock block = {};
    block.gate = matrix(kind, F, D, true), block.down = matrix(summed(kind), F, D, false);
    if (is_grouped(kind)) block.down.data = weights(kind, F, D), block.down.kind = kind;
    if (is_gated) block.up = matrix(kind, F, D, true);
    block.num_neurons = F;
    feed_forward.block = &block, feed_forward.num_blocks = 1, feed_forward.num_neurons = F;
    double frequency[32];
    for (int64_t i = 0; i < W / 2; ++i) frequency[i] = 1.0 / static_cast<double>(i + 1);
    HsStep step = {};
    step.embedding = matrix(kind, V, D, false), step.head = matrix(kind, V, D, false);
    step.output_norm = norm(D, false);
    const HsRotary rotary = {frequency, 1.0, W, 0, 0};
    attention.num_heads = H, attention.num_kv_heads = K, attention.head_dim = W;
    attention.num_kv_projections = 2;
    attention.scores.scale = 1.0f / std::sqrt(static_cast<float>(W));
    attention.window = computes_all || is_named ? 0 : 7;
    if (computes_all && !is_named) {
        attention.num_kv_projections = 1, attention.input[2] = {}, attention.norms_values = 1;
        attention.query_norm = norm(W, false), attention.key_norm = norm(W, false);
    }
    feed_forward.gate.activation = !is_gated    ? ACTIVATION_RELU
                                   : rank == 32 ? ACTIVATION_GELU_TANH
                                                : ACTIVATION_SILU;
    step.layer = &layer, step.num_layers = 1, step.rotary = &rotary, step.num_rotaries = 1;
    step.width = D, step.num_neurons = F, step.context_length = C, step.max_rows = R;
    const int32_t one_block[] = {0};
    const HsTable table = {one_block, 1, 1, C, 1, 0};
    step.table = &table, step.num_tables = 1;
    step.embedding_scale = 3.0f;
    step.key_kind = step.value_kind = KIND_F16;
    const std::vector<HsOp> ops = operations(step);
    step.op = ops.data(), step.num_ops = static_cast<int64_t>(ops.size());
    const int64_t size = hs_step_bytes(&step);
    if (is_grouped(kind) && (!computes_all || is_named)) return size < 0;  // all rows are summed
    if (size < 0) return false;
    step.workspace = aligned(size);
    float *logits = floats(V), *together = floats(R * V);
    for (int64_t position = 0; position < C; ++position) {
        const HsRow row = {position, position, 0, 1, -1, 0};
        if (hs_step(&step, &row, 1, logits)) return false;
    }
    HsRow rows[R];
    for (int64_t t = 0; t < R; ++t) rows[t] = {C - R + t, C - R + t, 0, 1, -1, 0};
    std::vector<int64_t> times(2 * NUM_TIMED * (step.num_layers + 1));
    step.times = times.data();
    step.seen_gate = floats(R * F, UNSEEN), step.seen_hidden = floats(R * F, UNSEEN);
    if (is_named) step.seen_predicted = floats(R * F, UNSEEN);
    if (hs_step(&step, rows, R, together)) return false;
    for (const float* seen : {step.seen_predicted, step.seen_gate, step.seen_hidden})
        if (seen && std::find(seen, seen + R * F, UNSEEN) != seen + R * F) return false;
    step.times = nullptr, step.seen_predicted = step.seen_gate = step.seen_hidden = nullptr;
    if (std::memcmp(together + (R - 1) * V, logits, V * sizeof(float))) return false;
    for (const HsBlock& each : {block, interleaved(block)})
        if (!computes_all && !neurons(each, feed_forward.gate.activation, D, F)) return false;
    const HsRow no_token = {V, 0, 0, 1, -1, 0}, no_position = {0, C, 0, 1, -1, 0};
    rows[1].position += 1;
    return hs_step(&step, &no_token, 1, together) == STATUS_INDEX_OUT_OF_RANGE &&
           hs_step(&step, &no_position, 1, together) == STATUS_INDEX_OUT_OF_RANGE &&
           hs_step(&step, rows, 3, together) == STATUS_BAD_ARGUMENT &&
           hs_step(&step, rows, R + 1, together) == STATUS_BAD_ARGUMENT && parts(step, logits) &&
           refuses_operations(step) && pages(step, layer, logits);
}

// Experts of a layer, each with F rows of gate and up and as many of down, or D.
HsExperts experts(int32_t kind, bool is_by_output, int64_t D, int64_t F, int64_t E) {
    HsExperts found = {};
    HsBlock& block = found.first;
    const int64_t rows = is_by_output ? D : F, width = is_by_output ? F : D;
    block.gate = matrix(kind, E * F, D, true), block.up = matrix(kind, E * F, D, true);
    block.down = matrix(kind, E * rows, width, false);
    found.gate_bytes = F * block.gate.stride, found.up_bytes = F * block.up.stride;
    found.down_bytes = rows * block.down.stride;
    block.gate.num_rows = block.up.num_rows = F, block.down.num_rows = rows;
    block.num_neurons = F, block.is_by_output = is_by_output;
    found.down_bias = floats(E * D), found.num_experts = E;
    return found;
}

// True if a step of several rows gives each the bits of a step of its own, in a layer of experts with
// sinks, half of whose heads' values rotate, and shared experts.
bool mixtures(int32_t kind, bool is_by_output, bool computes_all) {
    const int64_t D = block_values(kind) > 32 ? 256 : 96, F = is_by_output ? D : 64, W = 24;
    const int64_t H = 4, V = 33, R = 5, E = 6;
    HsLayer layer = {};
    layer.norm = norms(D, false), layer.num_norms = 2;
    HsAttention& attention = layer.attention;
    const int64_t padded = D == 256 ? 64 : W;  // of a head, in whole blocks
    for (HsMatrix& m : attention.input) m = matrix(kind, H * padded, D, true);
    attention.output = matrix(kind, D, H * padded, true);
    attention.key = bytes(R * H * padded * 2), attention.value = bytes(R * H * padded * 2);
    attention.num_heads = attention.num_kv_heads = H, attention.head_dim = padded;
    attention.num_kv_projections = 2, attention.scores.scale = 0.2f,
    attention.scores.head_sinks = floats(H);
    const HsExperts own = experts(kind, is_by_output, D, F, E);
    HsFeedForward& feed_forward = layer.feed_forward;
    feed_forward.experts = &own, feed_forward.num_blocks = 1, feed_forward.num_neurons = F;
    feed_forward.gate.computes_all = computes_all;
    feed_forward.gate.activation = computes_all ? ACTIVATION_SWIGLU_OAI : ACTIVATION_RELU;
    layer.route = {
        matrix(KIND_F32, E, D, true), floats(E), floats(E), 2, 3, 2, GATING_SIGMOID, 1, 1.5f, 0};
    const HsExperts one = experts(kind, is_by_output, D, F, 1);
    layer.shared = feed_forward, layer.shared.experts = nullptr;
    layer.shared.block = &one.first, layer.shared.num_blocks = 1;
    layer.shared_gate = matrix(KIND_F32, 1, D, false);
    double frequency[32];
    for (int64_t i = 0; i < 32; ++i) frequency[i] = 1.0 / static_cast<double>(i + 1);
    const HsRotary rotary = {frequency, 1.0, padded / 2, 0, 0};
    HsStep step = {};
    step.embedding = matrix(kind, V, D, false), step.head = matrix(kind, V, D, false);
    step.output_norm = norm(D, false);
    step.layer = &layer, step.num_layers = 1, step.rotary = &rotary, step.num_rotaries = 1;
    step.width = D, step.num_neurons = F, step.context_length = R, step.max_rows = R;
    const int32_t one_block[] = {0}, none = VALUE_NONE;
    const HsTable table = {one_block, 1, 1, R, 1, 0};
    step.table = &table, step.num_tables = 1, step.embedding_scale = 3.0f;
    step.key_kind = step.value_kind = KIND_F16;
    std::vector<HsOp> ops = operations(step);
    ops[5].in_2 = VALUE_ROUTED;
    ops.insert(ops.begin() + 5, {OP_ROUTE, 0, 0, VALUE_FFN_IN, none, VALUE_ROUTED});
    ops.insert(ops.begin() + 7, {OP_SHARED, 0, 0, VALUE_FFN_IN, none, VALUE_SHARED_OUT});
    ops.insert(ops.begin() + 8, {OP_ADD, 0, 0, VALUE_FFN_OUT, VALUE_SHARED_OUT, VALUE_FFN_OUT, 0.5f});
    step.op = ops.data(), step.num_ops = static_cast<int64_t>(ops.size());
    const int64_t size = hs_step_bytes(&step);
    if (size < 0) return false;
    step.workspace = aligned(size);
    float *logits = floats(R * V), *together = floats(R * V);
    HsRow rows[R];
    for (int64_t t = 0; t < R; ++t) {
        rows[t] = {t, t, 0, 1, -1, 0};
        if (hs_step(&step, &rows[t], 1, logits + t * V)) return false;
    }
    if (hs_step(&step, rows, R, together)) return false;
    const int64_t chosen = R * layer.route.num_used * F;
    step.seen_gate = floats(chosen, UNSEEN), step.seen_hidden = floats(chosen, UNSEEN);
    step.seen_shared = floats(R * F, UNSEEN), step.seen_heads = floats(R * H * padded, UNSEEN);
    if (hs_step(&step, rows, R, together)) return false;
    for (const auto& [seen, count] :
         {std::pair(step.seen_gate, chosen), std::pair(step.seen_hidden, chosen),
          std::pair(step.seen_shared, R * F), std::pair(step.seen_heads, R * H * padded)})
        if (std::find(seen, seen + count, UNSEEN) != seen + count) return false;
    if (std::memcmp(together, logits, R * V * sizeof(float))) return false;
    auto is_refused = [&](int64_t& field, int64_t value) {
        const int64_t before = field;
        field = value;
        const bool found = hs_step_bytes(&step) < 0;
        field = before;
        return found;
    };
    for (int64_t value : {int64_t{0}, E + 1})
        if (!is_refused(layer.route.num_used, value)) return false;
    return is_refused(layer.route.num_groups, 4) && is_refused(layer.route.num_used_groups, 4) &&
           is_refused(layer.route.router.num_rows, E - 1);
}

// True if a step of several rows gives each the bits of a step of its own, in a layer with a gated delta net and a
// short convolution and one whose attention has gates, and if rows that would write a slot that is read, or two rows the same one, are refused.
bool deltas(int32_t kind, int64_t M) {
    constexpr int64_t D = 256, R = 19, V = 33, G = 2, N = 24, HEADS = 4, H = 2, W = 32, SLOTS = 4,
                      J = 4;
    HsLayer layer[2] = {};
    for (HsLayer& each : layer) each.norm = norms(D, false), each.num_norms = 2;
    HsDelta delta = {};
    const int64_t C = 2 * G * N + HEADS * M, outputs[] = {C, HEADS * M, HEADS, HEADS};
    for (int m = 0; m < 4; ++m) delta.input[m] = matrix(kind, outputs[m], D, false);
    delta.output = matrix(block_values(kind) > 1 ? KIND_F32 : kind, D, HEADS * M, false);
    delta.norm = norm(M, false), delta.conv = floats(J * C), delta.decay = floats(HEADS, -1.0f);
    delta.step_bias = floats(HEADS), delta.state = floats(SLOTS * HEADS * N * M);
    delta.inputs = floats(SLOTS * (J - 1) * C), delta.num_key_heads = G, delta.num_value_heads = HEADS;
    delta.key_width = N, delta.value_width = M, delta.num_taps = J, delta.num_slots = SLOTS;
    const HsShortConv conv = {matrix(kind, 3 * D, D, false),
                              matrix(kind, D, D, false),
                              floats(J * D),
                              floats(SLOTS * (J - 1) * D),
                              J,
                              SLOTS};
    HsAttention& attention = layer[1].attention;
    attention.input[0] = matrix(kind, 2 * H * W, D, true);
    for (int m : {1, 2}) attention.input[m] = matrix(kind, W, D, true);
    attention.output = matrix(block_values(kind) > 32 ? KIND_F32 : kind, D, H * W, true);
    attention.key = bytes(R * W * 2), attention.value = bytes(R * W * 2), attention.is_gated = 1;
    attention.num_heads = H, attention.num_kv_heads = 1, attention.head_dim = W;
    attention.num_kv_projections = 2, attention.scores.scale = 0.2f, attention.rotary = -1;
    HsStep step = {};
    step.embedding = matrix(kind, V, D, false), step.head = matrix(kind, V, D, false);
    step.output_norm = norm(D, false), step.layer = layer, step.num_layers = 2;
    step.width = D, step.num_neurons = 1, step.context_length = R, step.max_rows = R;
    const int32_t one_block[] = {0}, none = VALUE_NONE;
    const HsTable table = {one_block, 1, 1, R, 1, 0};
    step.table = &table, step.num_tables = 1, step.embedding_scale = 3.0f;
    step.key_kind = step.value_kind = KIND_F16;
    const HsOp ops[] = {
        {OP_EMBED, 2, 0, none, none, VALUE_X},
        {OP_NORM, 0, NORM_ATTN, VALUE_X, none, VALUE_ATTN_IN},
        {hs_operation_kind("delta"), 0, 0, VALUE_ATTN_IN, none, VALUE_ATTN_OUT, 1.0f, 1.0f, none, none,
         &delta},
        {OP_ADD, 0, 0, VALUE_X, VALUE_ATTN_OUT, VALUE_X},
        {OP_NORM, 0, NORM_ATTN, VALUE_X, none, VALUE_ATTN_IN},
        {hs_operation_kind("short conv"), 0, 0, VALUE_ATTN_IN, none, VALUE_ATTN_OUT, 1.0f, 1.0f, none,
         none, &conv},
        {OP_ADD, 0, 0, VALUE_X, VALUE_ATTN_OUT, VALUE_X},
        {OP_NORM, 1, NORM_ATTN, VALUE_X, none, VALUE_ATTN_IN},
        {OP_ATTENTION, 1, 0, VALUE_ATTN_IN, none, VALUE_ATTN_OUT},
        {OP_ADD, 1, 0, VALUE_X, VALUE_ATTN_OUT, VALUE_X},
        {OP_HEAD_NORM, 2, 0, VALUE_X, none, VALUE_ATTN_IN},
        {OP_HEAD, 2, 0, VALUE_ATTN_IN, none, none},
    };
    step.op = ops, step.num_ops = sizeof ops / sizeof *ops;
    const int64_t size = hs_step_bytes(&step);
    if (size < 0) return false;
    step.workspace = aligned(size);
    float *logits = floats(R * V), *together = floats(R * V);
    HsRow rows[R];
    for (int32_t t = 0; t < R; ++t) {
        rows[t] = {t, t, 0, 1, -1, t ? (t - 1) % 2 : -1, t % 2, 0};
        if (hs_step(&step, &rows[t], 1, logits + t * V)) return false;
    }
    for (HsRow& row : rows) row.writes = -1;
    rows[4].writes = 2, rows[R - 1].writes = 3;
    if (hs_step(&step, rows, R, together)) return false;
    if (std::memcmp(together, logits, R * V * sizeof(float))) return false;
    auto is_refused = [&](int32_t HsRow::* field, int32_t value) {
        HsRow wrong[R];
        std::copy_n(rows, R, wrong);
        wrong[0].*field = value;
        return hs_step(&step, wrong, R, together) == STATUS_BAD_ARGUMENT;
    };
    return is_refused(&HsRow::reads, 2) && is_refused(&HsRow::reads, SLOTS) &&
           is_refused(&HsRow::writes, 3) && is_refused(&HsRow::writes, SLOTS);
}

// Operations that are in files of their own, in a model without layers' cores: all planes from the embedding, and
// layers' own inputs; in a layer planes are predicted, and corrected by a product of low rank and by what its own
// input makes; then one hidden state.
struct OwnOperations {
    static constexpr int64_t D = 256, P = 3, R = 5, L = 2, SIZE = 256, RANK = 256, V = 33;
    enum : int32_t { X = VALUE_X, ACTIVE = VALUE_OWN, INPUTS, OUT, NONE = VALUE_NONE };
    HsMatrix ends[2][P - 1];
    HsPlaneEnds begin, end;
    HsLayerInputs inputs;
    HsPredictPlanes predict;
    HsCorrectPlanes correct;
    HsAddToPlanes add = {P};
    HsLowRank low_rank;
    HsPerLayer per_layer;
    HsDraftInput draft;
    HsLayer layer = {};
    HsStep step = {};
    int32_t one_block[1] = {0};
    HsTable table = {one_block, 1, 1, R, 1, 0};
    std::vector<HsOp> ops;

    explicit OwnOperations(int32_t kind) {
        for (auto& end : ends)
            for (HsMatrix& m : end) m = matrix(kind, D, D, false);
        begin = {ends[0], P}, end = {ends[1], P};
        inputs = {matrix(kind, V, L * SIZE, false), matrix(kind, L * SIZE, D, false), norm(SIZE, false),
                  SIZE};
        predict = {{norm(D, false), matrix(kind, P, D, false)}, floats(P * P * P)};
        correct = {predict.router, floats(P * P), floats(D)};
        low_rank = {matrix(kind, RANK, D, false), matrix(kind, D, RANK, false)};
        per_layer = {
            matrix(kind, SIZE, D, false), matrix(kind, D, SIZE, false), {ACTIVATION_SILU, 1, 0.0f}, 1};
        draft = {matrix(kind, D, 2 * D, false), norm(D, false), norm(D, false)};
        layer.attention.num_heads = layer.attention.num_kv_heads = layer.attention.head_dim = 32;
        layer.attention.key = layer.attention.value = bytes(1), layer.attention.rotary = -1;
        step.embedding = matrix(kind, V, D, false), step.head = matrix(kind, V, D, false);
        step.layer = &layer, step.num_layers = 1, step.width = D, step.num_neurons = 1;
        step.x_size = P * D, step.own_size[0] = D, step.own_size[1] = L * SIZE, step.own_size[2] = D;
        step.context_length = step.max_rows = R, step.table = &table, step.num_tables = 1;
        step.embedding_scale = 3.0f, step.key_kind = step.value_kind = KIND_F16;
        ops = {
            {OP_EMBED, 1, 0, NONE, NONE, ACTIVE},
            own("layer inputs", 1, {ACTIVE, NONE}, {INPUTS, NONE}, &inputs),
            own("begin planes", 1, {ACTIVE, NONE}, {X, NONE}, &begin),
            own("predict planes", 0, {X, NONE}, {ACTIVE, X}, &predict),
            own("low rank", 0, {ACTIVE, NONE}, {OUT, NONE}, &low_rank),
            {OP_ADD, 0, 0, ACTIVE, OUT, ACTIVE},
            own("correct planes", 0, {ACTIVE, X}, {ACTIVE, X}, &correct),
            own("per layer", 0, {ACTIVE, INPUTS}, {OUT, NONE}, &per_layer),
            own("add to planes", 0, {X, OUT}, {X, NONE}, &add),
            own("draft input", 0, {ACTIVE, OUT}, {OUT, NONE}, &draft),
            own("add to planes", 0, {X, OUT}, {X, NONE}, &add),
            own("end planes", 1, {X, NONE}, {ACTIVE, NONE}, &end),
            {OP_HEAD_NORM, 1, 0, ACTIVE, NONE, VALUE_ATTN_IN},
            {OP_HEAD, 1, 0, VALUE_ATTN_IN, NONE, NONE},
        };
        step.op = ops.data(), step.num_ops = static_cast<int64_t>(ops.size());
    }

    static HsOp own(const char* kind, int32_t layer, std::array<int32_t, 2> in,
                    std::array<int32_t, 2> out, const void* weights) {
        return {
            hs_operation_kind(kind), layer, 0, in[0], in[1], out[0], 1.0f, 1.0f, NONE, out[1], weights};
    }

    bool is_refused() const { return hs_step_bytes(&step) < 0; }

    // True if the step is refused with another number in this place.
    template <class Number>
    bool refuses(Number& place, Number wrong) {
        std::swap(place, wrong);
        const bool found = is_refused();
        std::swap(place, wrong);
        return found;
    }
};

// True if a step of several rows gives each the bits of a step of its own, and if wrong values, sizes and
// weights are refused.
bool own_operations(int32_t kind) {
    using O = OwnOperations;
    O own(kind);
    const int64_t size = hs_step_bytes(&own.step);
    if (size < 0) return false;
    own.step.workspace = aligned(size);
    float *logits = floats(O::R * O::V), *together = floats(O::R * O::V);
    HsRow rows[O::R];
    for (int64_t t = 0; t < O::R; ++t) {
        rows[t] = {t, t, 0, 1, -1, 0};
        if (hs_step(&own.step, &rows[t], 1, logits + t * O::V)) return false;
    }
    if (hs_step(&own.step, rows, O::R, together)) return false;
    if (std::memcmp(together, logits, O::R * O::V * sizeof(float))) return false;
    own.inputs.table.num_rows = 3;
    if (hs_step(&own.step, rows, O::R, together) != STATUS_INDEX_OUT_OF_RANGE) return false;
    for (int64_t* place : {&own.step.x_size, &own.step.own_size[0], &own.step.own_size[1],
                           &own.predict.router.matrix.num_rows, &own.begin.num_planes,
                           &own.end.num_planes, &own.add.num_planes, &own.low_rank.left.num_rows,
                           &own.inputs.size, &own.draft.join.num_columns})
        for (int64_t wrong : {int64_t{-1}, *place + 1})
            if (!own.refuses(*place, wrong)) return false;
    for (HsOp& op : own.ops) {
        if (op.kind < NUM_OP_KINDS) continue;
        for (int32_t HsOp::* field :
             {&HsOp::kind, &HsOp::layer, &HsOp::in, &HsOp::in_2, &HsOp::in_3, &HsOp::out, &HsOp::out_2})
            for (int32_t wrong : {-1, 100, static_cast<int32_t>(VALUE_NAMED)})
                if (!own.refuses(op.*field, wrong)) return false;
        if (!own.refuses(op.weights, static_cast<const void*>(nullptr))) return false;
    }
    return own.refuses(own.per_layer.index, static_cast<int32_t>(O::L)) && !own.is_refused() &&
           hs_operation_kind("no such operation") == -1;
}

// A model of one layer whose tokens read selected keys, in a cache for two sequences.
struct Selecting {
    static constexpr int64_t D = 32, F = 5, H = 4, K = 2, V = 7, ROWS = 9;
    HsLayer layer = {};
    HsBlock block = {};
    HsStep step = {};
    double frequency[64];
    HsRotary rotary = {};
    std::vector<int32_t> table;
    HsTable blocks;
    std::vector<HsOp> ops;

    Selecting(int32_t cache_kind, int64_t W, int64_t C) {
        layer.norm = norms(D, false), layer.num_norms = 2;
        HsAttention& attention = layer.attention;
        HsFeedForward& feed_forward = layer.feed_forward;
        attention.input[0] = matrix(KIND_F32, H * W, D, false);
        for (int i : {1, 2}) attention.input[i] = matrix(KIND_F32, K * W, D, false);
        attention.output = matrix(KIND_F32, D, H * W, false);
        block.gate = block.down = matrix(KIND_F32, F, D, false);
        block.num_neurons = F;
        feed_forward.block = &block, feed_forward.num_blocks = 1, feed_forward.num_neurons = F;
        for (int64_t i = 0; i < W / 2; ++i) frequency[i] = 1.0 / static_cast<double>(i + 1);
        step.embedding = step.head = matrix(KIND_F32, V, D, false);
        rotary = {frequency, 1.0, W, 0, 0};
        step.output_norm = norm(D, false), step.rotary = &rotary, step.num_rotaries = 1;
        step.layer = &layer, step.num_layers = 1, step.width = D, step.num_neurons = F;
        attention.num_heads = H, attention.num_kv_heads = K, attention.head_dim = W;
        attention.num_kv_projections = 2;
        attention.scores.scale = 1.0f / std::sqrt(static_cast<float>(W));
        feed_forward.gate.activation = ACTIVATION_RELU;
        step.context_length = C, step.max_rows = ROWS, step.embedding_scale = 1.0f;
        step.key_kind = step.value_kind = cache_kind;
        ops = operations(step), step.op = ops.data(), step.num_ops = static_cast<int64_t>(ops.size());
    }

    // Allocates a cache in blocks of `length`, in reverse order, and a workspace. The cache and its
    // tables are filled with the byte `fill`; 255 makes unwritten keys, values, units and factors
    // NaN. False if hs_step_bytes() refuses the step.
    bool keep(int64_t length, int fill) {
        const int64_t W = layer.attention.head_dim, N = (step.context_length + length - 1) / length;
        const HsSelect& rule = step.select;
        const int64_t heads = 2 * N * K;
        const int64_t tables = rule.block ? heads * ((length + rule.block - 1) / rule.block) : 0;
        auto filled = [&](int64_t count) {
            uint8_t* data = bytes(count);
            std::memset(data, fill, count);
            return data;
        };
        layer.attention.key = filled(heads * length * cache_row_bytes(step.key_kind, W));
        layer.attention.value = filled(heads * length * cache_row_bytes(step.value_kind, W));
        layer.attention.summary = filled(tables * summary_width(rule, W));
        layer.attention.summary_unit = reinterpret_cast<float*>(filled(tables * 4));
        if (rule.is_coded) {
            layer.attention.code = filled(tables * rule.block * (select_width(W) / 4));
            layer.attention.code_factor = reinterpret_cast<float*>(filled(tables * rule.block * 4));
        }
        table.resize(2 * N);
        for (int64_t i = 0; i < 2 * N; ++i) table[i] = static_cast<int32_t>(2 * N - 1 - i);
        blocks = {table.data(), 2, N, length, 2 * N, 0};
        step.table = &blocks, step.num_tables = 1;
        const int64_t size = hs_step_bytes(&step);
        if (size < 0) return false;
        step.workspace = aligned(size);
        return true;
    }

    // Writes to `logits` those of the last token of a text that is computed `rows` tokens at a
    // time. The second sequence copies all keys and values; false if its last token gives other
    // logits.
    bool write(int64_t rows, float* logits) {
        const int64_t C = step.context_length;
        for (int64_t begin = 0; begin < C; begin += rows) {
            const int64_t count = std::min(rows, C - begin);
            HsRow row[2 * ROWS];
            for (int64_t i = 0; i < count; ++i) {
                const int64_t at = begin + i;
                row[i] = {at * at % V, at, 0, at == C - 1, -1, 0};
                row[count + i] = {at * at % V, at, 1, 0, static_cast<int32_t>(i), 0};
            }
            if (hs_step(&step, row, 2 * count, logits)) return false;
        }
        float again[V];
        const HsRow last = {(C - 1) * (C - 1) % V, C - 1, 1, 1, -1, 0};
        return !hs_step(&step, &last, 1, again) && !std::memcmp(again, logits, sizeof(again));
    }
};

// True if selected keys give the same logits, bit for bit, in steps of one token and of several and
// for blocks of three lengths, and if those logits differ from the logits with all keys.
bool selects(int32_t cache_kind, int64_t W, const HsSelect& rule, int64_t C) {
    Selecting model(cache_kind, W, C);
    model.step.is_key_rotated = model.step.is_value_rotated = cache_kind >= KIND_Q8_0;
    float all_keys[Selecting::V], want[Selecting::V], got[Selecting::V];
    if (!model.keep(C, 0) || !model.write(Selecting::ROWS, all_keys)) return false;
    model.step.select = rule;
    if (!model.keep(C, 0) || !model.write(1, want)) return false;
    if (!std::memcmp(all_keys, want, sizeof(want))) return false;
    for (int64_t length : {C, int64_t{32}, int64_t{64}})
        if (!model.keep(length, 255) || !model.write(Selecting::ROWS, got) ||
            std::memcmp(got, want, sizeof(want)))
            return false;
    return true;
}

bool selections() {
    const struct {
        int32_t kind;
        int64_t W, C;
        HsSelect rule;
    } cases[] = {{KIND_F32, 24, 109, {16, 16, 16, 32, 2, 0, SUMMARY_BOUNDS, 1}},
                 {KIND_BF16, 64, 93, {16, 0, 32, 16, 1, 0, SUMMARY_MEAN, 1}},
                 {KIND_Q8_0, 96, 93, {16, 16, 16, 16, 1, 0, SUMMARY_BOUNDS, 1}},
                 {KIND_Q4_0, 32, 149, {32, 32, 32, 32, 1, 0, SUMMARY_BOUNDS, 0}},
                 {KIND_BF16, 64, 141, {16, 16, 32, 32, 2, 77, SUMMARY_BOUNDS, 1}},
                 // More keys than a part has: up to 301 without a selection, 288 selected ones.
                 {KIND_F16, 24, 389, {16, 16, 32, 16, 1, 301, SUMMARY_MEAN, 1}},
                 {KIND_F16, 24, 389, {32, 0, 32, 288, 1, 0, SUMMARY_BOUNDS, 1}}};
    for (const auto& c : cases)
        if (!selects(c.kind, c.W, c.rule, c.C)) return false;
    all.clear();
    return true;
}

bool copies() {
    constexpr int64_t COUNT = 9, SIZE = 4097;
    HsCopy rows[COUNT];
    HsCopies all_rows = {rows, COUNT};
    for (HsCopy& row : rows)
        row = {reinterpret_cast<uint8_t*>(floats(SIZE)), bytes(4 * SIZE), 4 * SIZE};
    hs_copy_rows(&all_rows);
    for (const HsCopy& row : rows)
        if (std::memcmp(row.from, row.to, row.num_bytes)) return false;
    all.clear();
    return true;
}

struct Step {
    bool computes_all, is_named, is_gated;
    int64_t rank;
};

std::vector<Step> all_steps() {
    std::vector<Step> found;
    for (bool computes_all : {false, true})
        for (bool is_named : {false, true})
            for (bool is_gated : {false, true})
                for (int64_t rank : {0, 32, 256})
                    if (is_named || rank < 256)
                        found.push_back({computes_all, is_named, is_gated, rank});
    return found;
}

// These call every kernel of a level; in what order steps call them is the same at every level.
const std::vector<Step> FEW_STEPS = {{true, false, true, 0},
                                     {false, true, true, 32},
                                     {false, false, false, 0},
                                     {true, true, false, 256}};

bool level(const std::vector<Step>& which) {
    for (int32_t kind : {KIND_F32, KIND_Q8_0, KIND_Q4_K_TILED})
        if (!deltas(kind, 20) || !deltas(kind, 32) || !own_operations(kind)) return false;
    for (int32_t kind = 0; kind < NUM_KINDS; ++kind) {
        const int64_t values = block_values(kind);
        for (int64_t D : {32, 96, 128, 160, 512, 576, 768})
            if (is_grouped(kind) && !(groups_at(kind, D, 64) && groups_at(kind, D, 192))) return false;
        for (int64_t D : {1, 31, 32, 33, 65, 96, 128, 160, 256, 768})
            for (int64_t A : {1, 2, 3, 4, 5, 9, 16, 48})
                if (D % values == 0 && A % rows_together(kind) == 0 && !kernels_at(kind, D, A))
                    return false;
        for (const Step& step : which)
            if (step.rank % values == 0 &&
                !steps(kind, step.computes_all, step.is_named, step.is_gated, step.rank))
                return false;
        for (int form = 0; form < 3; ++form)
            if (rows_together(kind) == 1 && !mixtures(kind, form == 2, form > 0)) return false;
        all.clear();
    }
    return true;
}

}  // namespace

void faults(const Rows&, const Input&, float*, int64_t, int64_t, int64_t) { __builtin_trap(); }

// Right only for the first vector.
void errs(const Rows& rows, const Input& x, float* y, int64_t y_stride, int64_t a0, int64_t a1) {
    kernels_generic.dot_rows[KIND_F32](rows, x.part(0, 1), y, y_stride, a0, a1);
    for (int64_t t = 1; t < x.count; ++t)
        for (int64_t a = a0; a < a1; ++a) y[t * y_stride + a] = 0.0f;
}

void weighs_nothing(const AttendPart& a) {
    for (int64_t g = 0; g < a.num_queries; ++g) a.top[g] = a.total[g] = 0.0f;
}

void mixes_nothing(const AttendPart& a) { a.out[0] += 1.0f; }

// True if the probe accepts the generic kernels, and rejects them if products fault, if those of any
// kind of weights err, or if attention over any kind of cached values does; test_probe.py lets each
// kernel do nothing.
bool probes() {
    if (!runs_here(kernels_generic, kernels_generic)) return false;
    auto rejects = [](const auto& change) {
        Kernels kernels = kernels_generic;
        change(kernels);
        return !runs_here(kernels, kernels_generic);
    };
    // Which kind faults makes no difference: any fault ends the process that tries the kernels.
    if (!rejects([](Kernels& k) { k.dot_rows[KIND_F32] = faults; })) return false;
    for (int32_t kind = 0; kind < NUM_KINDS; ++kind)  // grouped rows are not multiplied
        if (!is_grouped(kind) && !rejects([&](Kernels& k) { k.dot_rows[kind] = errs; })) return false;
    for (int32_t kind = 0; kind < NUM_CACHE_KINDS; ++kind)
        if (!rejects([&](Kernels& k) { k.weigh_keys[kind] = weighs_nothing; }) ||
            !rejects([&](Kernels& k) { k.mix_values[kind] = mixes_nothing; }))
            return false;
    return true;
}

int main(int argc, char** argv) {
    if (argc > 1) planted = argv[1];
    volatile int32_t shift = has_fault("a shift too far") ? 40 : 0;
    if (1 << shift == 3 || !copies()) {
        std::printf("copies are wrong\n");
        return 1;
    }
    for (const char* name :
         {"generic", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "amx"}) {
        if (hs_set_level(name) != STATUS_OK) continue;
        // Work is divided by the same code at every level: one level with one thread is enough.
        for (int threads : {1, 3}) {
            const bool is_last = threads > 1;
            if (!is_last && std::strcmp(name, "avx2") != 0) continue;
            if (hs_set_threads(threads, 2) != STATUS_OK || !level(is_last ? FEW_STEPS : all_steps()) ||
                (is_last && !selections())) {
                std::printf("%s with %d threads: wrong\n", name, threads);
                return 1;
            }
        }
        std::printf("%s: fine\n", name);
    }
    if (!probes()) {
        std::printf("the probe is wrong\n");
        return 1;
    }
    return 0;
}
