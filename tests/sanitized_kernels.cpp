// Runs every kernel of every usable level at sizes round the block edges, and a whole decode step, on
// buffers that end where they must not be read past. Compiled by test_sanitizers.py with the address and
// undefined-behaviour sanitizers, which end the program on an error.
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "../runtime/kernels/cpu/dispatch.h"
#include "../runtime/kernels/cpu/probe.h"
#include "../runtime/kernels/cpu/step.h"

namespace {

uint32_t state = 1;
uint32_t next() { return state = state * 1664525u + 1013904223u; }
float uniform() { return static_cast<float>(next() >> 8) / (1 << 23) - 1.0f; }

// Memory of exactly this many bytes, so that the sanitizer sees the first byte past it.
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

// Rows of any type with small finite values.
uint8_t* weights(int32_t kind, int64_t num_rows, int64_t D) {
    if (kind == KIND_Q4_0_PLANAR || kind == KIND_Q8_0_PLANAR) {
        const int32_t in_file = kind == KIND_Q4_0_PLANAR ? KIND_Q4_0 : KIND_Q8_0;
        const int64_t stride = row_bytes_of(kind, D);
        uint8_t* packed = bytes(num_rows * stride);
        const uint8_t* from = weights(in_file, num_rows, D);
        spark_pack_rows(in_file, 1, from, num_rows, D, nullptr, num_rows, packed, stride);
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
    const bool has_minima = kind == KIND_Q4_K || kind == KIND_Q5_K;
    for (uint8_t* block = data; block < data + size; block += stride) {
        (kind == KIND_Q6_K ? block + 208 : block)[1] = kind == KIND_BF16 ? 0x3d : 0x20;
        if (has_minima) block[3] = 0x20;
    }
    return data;
}

// index is all rows backwards.
bool unpacks(int32_t kind, const uint8_t* w, int64_t D, const int32_t* index, int64_t A) {
    const int64_t row_bytes = row_bytes_of(kind, D);
    float *all_rows = floats(A * D), *backwards = floats(A * D);
    if (spark_unpack_rows(kind, w, row_bytes, A, D, nullptr, A, all_rows) ||
        spark_unpack_rows(kind, w, row_bytes, A, D, index, A, backwards))
        return false;
    for (int64_t a = 0; a < A; ++a)
        if (std::memcmp(all_rows + a * D, backwards + (A - 1 - a) * D, D * 4)) return false;
    return true;
}

bool kernels_at(int32_t kind, int64_t D, int64_t A) {
    const uint8_t* w = weights(kind, A, D);
    const int64_t row_bytes = row_bytes_of(kind, D);
    constexpr int64_t T = 37;
    const float *x = floats(T * D), *c = floats(A);
    int32_t* index = reinterpret_cast<int32_t*>(bytes(A * 4));
    for (int64_t a = 0; a < A; ++a) index[a] = static_cast<int32_t>(A - 1 - a);
    float *y = floats(A), *backwards = floats(A), *z = floats(D), *many = floats(T * A);
    if (spark_dot_rows(kind, w, row_bytes, A, D, x, 1, nullptr, A, y)) return false;
    if (spark_dot_rows(kind, w, row_bytes, A, D, x, 1, index, A, backwards)) return false;
    if (spark_dot_rows(kind, w, row_bytes, A, D, x, T, index, A, many)) return false;
    for (int64_t a = 0; a < A; ++a)
        if (y[a] != backwards[A - 1 - a] || y[a] != many[A - 1 - a]) return false;
    return !spark_accumulate_rows(kind, w, row_bytes, A, D, c, nullptr, A, z) &&
           !spark_accumulate_rows(kind, w, row_bytes, A, D, c, index, A, z) &&
           unpacks(kind, w, D, index, A);
}

SparkMatrix matrix(int32_t kind, int64_t num_rows, int64_t D, bool has_bias) {
    return {weights(kind, num_rows, D), has_bias ? floats(num_rows) : nullptr, num_rows, D,
            row_bytes_of(kind, D), kind, 0};
}

SparkNorm norm(int64_t n, bool is_layer_norm) {
    return {floats(n, 1.0f), is_layer_norm ? floats(n) : nullptr};
}

// The parts of the step give the whole one's result for the last position.
bool parts(SparkStep& step, const float* want) {
    const int64_t D = step.width, V = step.head.num_rows, token = step.context_length - 1;
    SparkPart part = {};
    part.step = &step, part.token = part.position = &token;
    part.x = floats(D), part.ffn_input = floats(D), part.logits = floats(V);
    part.named = reinterpret_cast<uint32_t*>(bytes((step.num_neurons + 31) / 32 * 4));
    part.begin = 0, part.end = 1, part.is_first = true;
    for (int32_t number : {PART_EMBED, PART_LAYERS, PART_HEAD}) {
        part.part = number;
        spark_part(&part);
    }
    if (std::memcmp(part.logits, want, V * sizeof(float))) return false;
    float* out = floats(D);
    part.ffn_out[1] = out;
    for (int32_t number : {PART_EMBED, PART_FRONT, PART_BACK}) {
        part.part = number;
        spark_part(&part);
    }
    return true;
}

// Two sequences in blocks in any order: one row by row, the other in one step with rows of the first,
// and a third that takes over its prefix; all end in the same logits.
bool pages(SparkStep step, SparkLayer layer, const float* want) {
    constexpr int64_t LENGTH = 32;
    const int64_t C = step.context_length, V = step.head.num_rows, N = (C + LENGTH - 1) / LENGTH;
    const int64_t size = 3 * N * LENGTH * step.num_kv_heads * step.head_width * 2;
    layer.key = bytes(size), layer.value = bytes(size);
    step.layer = &layer;
    std::vector<int32_t> block(3 * N);
    for (int64_t i = 0; i < 3 * N; ++i) block[i] = static_cast<int32_t>((5 * i + 2) % (3 * N));
    step.table = {block.data(), 3, N, LENGTH, 3 * N};
    std::vector<float> logits(2 * V);
    for (int64_t position = 0; position < C; ++position) {
        const auto at = [&](int32_t sequence, int32_t source) {
            return SparkRow{position, position, sequence, source < 0, source, 0};
        };
        const SparkRow rows[] = {at(0, -1), at(1, -1), at(2, 1)};
        if (spark_step(&step, rows, 3, logits.data())) return false;
    }
    const SparkRow last[] = {{C - 1, C - 1, 2, 1, -1, 0}, {C - 1, C - 1, 1, 1, -1, 0}};
    if (std::memcmp(logits.data(), want, V * sizeof(float))) return false;
    if (std::memcmp(logits.data() + V, want, V * sizeof(float))) return false;
    if (spark_step(&step, last, 2, logits.data())) return false;
    const SparkRow wrong[] = {{0, 0, 3, 1, -1, 0}, {0, 0, 0, 1, 0, 0}};
    if (std::memcmp(logits.data(), want, V * sizeof(float))) return false;
    for (const SparkRow& row : wrong)
        if (spark_step(&step, &row, 1, logits.data()) != STATUS_BAD_ARGUMENT) return false;
    block[0] = static_cast<int32_t>(3 * N);
    const SparkRow astray = {0, 0, 0, 1, -1, 0};
    return spark_step(&step, &astray, 1, logits.data()) == STATUS_INDEX_OUT_OF_RANGE;
}

bool steps(int32_t kind, int32_t mode, bool is_gated, int64_t rank) {
    const bool is_wide = block_values(kind) > 32;
    const int64_t D = is_wide ? 256 : 96, W = is_wide ? 64 : 24;
    const int64_t F = 65, H = 4, K = 2, C = 18, V = 33, R = 5;
    SparkLayer layer = {};
    layer.attn_norm = norm(D, !is_gated), layer.ffn_norm = norm(D, !is_gated);
    layer.input[0] = matrix(kind, H * W, D, true), layer.input[1] = matrix(kind, K * W, D, true);
    layer.input[2] = matrix(kind, K * W, D, true), layer.output = matrix(kind, D, H * W, true);
    if (rank) layer.predictor_down = matrix(kind, rank, D, false);
    layer.predictor_up = matrix(kind, F, rank ? rank : D, true);
    layer.key = bytes(C * K * W * 2), layer.value = bytes(C * K * W * 2);
    layer.down_bias = floats(D);
    SparkBlock block = {};
    block.gate = matrix(kind, F, D, true), block.down = matrix(kind, F, D, false);
    if (is_gated) block.up = matrix(kind, F, D, true);
    block.num_neurons = F;
    layer.block = &block, layer.num_blocks = 1;
    double frequency[32];
    for (int64_t i = 0; i < W / 2; ++i) frequency[i] = 1.0 / static_cast<double>(i + 1);
    SparkStep step = {};
    step.embedding = matrix(kind, V, D, false), step.head = matrix(kind, V, D, false);
    step.output_norm = norm(D, false);
    step.layer = &layer, step.num_layers = 1, step.frequency = frequency;
    step.width = D, step.num_neurons = F, step.num_heads = H, step.num_kv_heads = K;
    step.head_width = W, step.context_length = C, step.max_rows = R;
    const int32_t one_block[] = {0};
    step.table = {one_block, 1, 1, C, 1};
    step.epsilon = 1e-5f, step.mode = mode;
    step.key_kind = step.value_kind = KIND_F16;
    step.activation = is_gated ? ACTIVATION_SILU : ACTIVATION_RELU;
    const int64_t size = spark_step_bytes(&step);
    if (size < 0) return false;
    uint8_t* memory = bytes(size + 63);
    step.workspace = memory + (64 - reinterpret_cast<uintptr_t>(memory) % 64) % 64;
    float *logits = floats(V), *together = floats(R * V);
    for (int64_t position = 0; position < C; ++position) {
        const SparkRow row = {position, position, 0, 1, -1, 0};
        if (spark_step(&step, &row, 1, logits)) return false;
    }
    SparkRow rows[R];
    for (int64_t t = 0; t < R; ++t) rows[t] = {C - R + t, C - R + t, 0, 1, -1, 0};
    std::vector<int64_t> times(2 * NUM_TIMED * (step.num_layers + 1));
    step.times = times.data();
    if (spark_step(&step, rows, R, together)) return false;
    step.times = nullptr;
    if (std::memcmp(together + (R - 1) * V, logits, V * sizeof(float))) return false;
    const SparkRow no_token = {V, 0, 0, 1, -1, 0}, no_position = {0, C, 0, 1, -1, 0};
    rows[1].position += 1;
    return spark_step(&step, &no_token, 1, together) == STATUS_INDEX_OUT_OF_RANGE &&
           spark_step(&step, &no_position, 1, together) == STATUS_INDEX_OUT_OF_RANGE &&
           spark_step(&step, rows, 3, together) == STATUS_BAD_ARGUMENT &&
           spark_step(&step, rows, R + 1, together) == STATUS_BAD_ARGUMENT && parts(step, logits) &&
           pages(step, layer, logits);
}

bool level() {
    for (int32_t kind = 0; kind < NUM_KINDS; ++kind) {
        const int64_t values = block_values(kind);
        for (int64_t D : {1, 31, 32, 33, 65, 96, 128, 160, 256, 768})
            for (int64_t A : {1, 2, 3, 4, 5, 9})
                if (D % values == 0 && !kernels_at(kind, D, A)) return false;
        for (int32_t mode : {MODE_DENSE, MODE_EXACT, MODE_PREDICTED})
            for (bool is_gated : {false, true})
                for (int64_t rank : {0, 32, 256})
                    if (rank % values == 0 && !steps(kind, mode, is_gated, rank)) return false;
        all.clear();
    }
    return true;
}

}  // namespace

void faults(const Rows&, const Input&, float*, int64_t, int64_t, int64_t) { __builtin_trap(); }

// Right for one vector alone.
void errs(const Rows& rows, const Input& x, float* y, int64_t y_stride, int64_t a0, int64_t a1) {
    kernels_generic.dot_rows[KIND_F32](rows, x.part(0, 1), y, y_stride, a0, a1);
    for (int64_t t = 1; t < x.count; ++t)
        for (int64_t a = a0; a < a1; ++a) y[t * y_stride + a] = 0.0f;
}

void unpacks_nothing(const Rows&, float*, int64_t, int64_t) {}
void adds_nothing(const Rows&, int64_t, int64_t, const ManySums&) {}

void weighs_nothing(const AttendPart& a) {
    for (int64_t g = 0; g < a.num_queries; ++g) a.top[g] = a.total[g] = 0.0f;
}

void mixes_nothing(const AttendPart& a) { a.out[0] += 1.0f; }

// The probe accepts working kernels and rejects those that fault or err, for any kind of weight.
bool probes() {
    if (!runs_here(kernels_generic, kernels_generic)) return false;
    for (int32_t kind = 0; kind < NUM_KINDS; ++kind)
        for (DotRows* wrong : {faults, errs}) {
            Kernels kernels = kernels_generic;
            kernels.dot_rows[kind] = wrong;
            if (runs_here(kernels, kernels_generic)) return false;
        }
    for (int32_t kind = 0; kind < NUM_KINDS; ++kind) {
        Kernels kernels = kernels_generic;
        kernels.unpack_rows[kind] = unpacks_nothing;
        if (runs_here(kernels, kernels_generic)) return false;
    }
    for (int32_t kind = 0; kind < NUM_CACHE_KINDS; ++kind) {
        Kernels weighs = kernels_generic, mixes = kernels_generic;
        weighs.weigh_keys[kind] = weighs_nothing, mixes.mix_values[kind] = mixes_nothing;
        if (runs_here(weighs, kernels_generic) || runs_here(mixes, kernels_generic)) return false;
    }
    for (int32_t kind = 0; kind < NUM_KINDS; ++kind) {
        Kernels kernels = kernels_generic;
        kernels.accumulate_many[kind] = adds_nothing;
        if (runs_here(kernels, kernels_generic)) return false;
    }
    return true;
}

int main() {
    if (!probes()) {
        std::printf("the probe is wrong\n");
        return 1;
    }
    for (const char* name : {"generic", "avx2", "avx512", "avx512vnni", "amx"}) {
        if (spark_set_level(name) != STATUS_OK) continue;
        for (int threads : {1, 3}) {
            if (spark_set_threads(threads) != STATUS_OK || !level()) {
                std::printf("%s with %d threads: wrong\n", name, threads);
                return 1;
            }
        }
        std::printf("%s: fine\n", name);
    }
    return 0;
}
