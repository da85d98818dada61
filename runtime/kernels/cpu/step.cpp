// One decode step, see step.h. The order of a forward pass is that of decoder.py and attention.py,
// the feed-forward layer that of feed_forward.py; they are the reference, and their bits differ
// only where sums are taken in another order.
#include "step.h"

#include <algorithm>

#include "neurons.h"
#include "vector_math.h"

namespace {

int64_t largest_rank(const SparkStep& step) {
    int64_t rank = 0;
    for (int64_t i = 0; i < step.num_layers; ++i)
        rank = std::max(rank, step.layer[i].predictor_down.num_rows);
    return rank;
}

// Positions of the cache that are one piece of work.
constexpr int64_t PART = 256;

struct Work {
    Work(const SparkStep& step, uint8_t* memory)
        : arena(memory), neurons(arena, step.width, step.num_neurons) {
        const int64_t D = step.width, F = step.num_neurons, heads = step.num_heads;
        const int64_t values = (heads + 2 * step.num_kv_heads) * step.head_width;
        x = arena.take<float>(D);
        sum = arena.take<float>(D);
        attn_input = arena.operand(D);
        ffn_input[0] = arena.operand(D);
        ffn_input[1] = arena.operand(D);
        heads_out = arena.operand(heads * step.head_width);
        inner = arena.operand(largest_rank(step));
        qkv = arena.take<float>(values);
        attn_out = arena.take<float>(D);
        ffn_out = arena.take<float>(D);
        const int64_t parts = (step.context_length + PART - 1) / PART * heads;
        query = arena.take<float>(heads * padded_head(step.head_width));
        scores = arena.take<float>(parts * PART);
        top = arena.take<float>(parts);
        total = arena.take<float>(parts);
        mixed = arena.take<float>(parts * padded_head(step.head_width));
        cos = arena.take<float>(step.head_width);
        sin = arena.take<float>(step.head_width);
        named = arena.take<float>(F);
    }

    Arena arena;
    Neurons neurons;
    float *x, *sum, *qkv, *attn_out, *ffn_out, *cos, *sin, *named;
    float *query, *scores, *top, *total, *mixed;  // of attention
    Operand attn_input, ffn_input[2], heads_out, inner;
};

// y [num_rows] = W x + bias, for up to three matrices with outputs one after the other.
void multiply(const SparkMatrix* matrix, int count, Operand& x, float* y) {
    Input input[3];
    int64_t first[4] = {0}, bytes = 0;
    for (int m = 0; m < count; ++m) {
        input[m] = x.as(matrix[m].kind);
        first[m + 1] = first[m] + matrix[m].num_rows;
        bytes += num_bytes(matrix[m]);
    }
    split(bytes, first[count], 4, 16, [&](int64_t begin, int64_t end) {
        for (int m = 0; m < count; ++m) {
            const SparkMatrix& w = matrix[m];
            const int64_t a0 = std::max<int64_t>(begin - first[m], 0);
            const int64_t a1 = std::min(end - first[m], w.num_rows);
            if (a0 >= a1) continue;
            float* out = y + first[m];
            kernels().dot_rows[w.kind](rows_of(w), input[m], out, a0, a1);
            if (w.bias)
                for (int64_t a = a0; a < a1; ++a) out[a] += w.bias[a];
        }
    });
}

void add(float* x, const float* y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) x[i] += y[i];
}

void apply(const SparkNorm& norm, float epsilon, const float* x, int64_t n, float* y) {
    if (norm.bias)
        layer_norm(x, norm.weight, norm.bias, epsilon, n, y);
    else
        rms_norm(x, norm.weight, epsilon, n, y);
}

class Step {
  public:
    Step(SparkStep& step) : s(step), w(step, step.workspace), D(step.width) {}

    void run(int64_t token, int64_t position, float* logits) {
        embed(token, position);
        layers(0, s.num_layers, position);
        head(logits);
    }

    void run(const SparkPart& part) {
        Operand& last = w.ffn_input[(part.end + 1) % 2];
        const size_t bytes = D * sizeof(float);
        switch (part.part) {
            case PART_EMBED:
                embed(*part.token, *part.position);
                std::memcpy(part.x, w.x, bytes);
                break;
            case PART_LAYERS:
                enter(part);
                layers(part.begin, part.end, *part.position, part.is_first);
                std::memcpy(part.x, w.x, bytes);
                std::memcpy(part.ffn_input, last.f32, bytes);
                break;
            case PART_FRONT:
                enter(part);
                turn(*part.position);
                front(part.begin, *part.position);
                if (s.mode == MODE_PREDICTED) {
                    predict(s.layer[part.begin], named_by(part.begin, part.is_first));
                    pack_named(s.layer[part.begin], part.named);
                }
                std::memcpy(part.ffn_input, last.f32, bytes);
                break;
            case PART_BACK:
                std::fill_n(w.ffn_out, D, 0.0f);
                for (const float* out : part.ffn_out)
                    if (out) add(w.ffn_out, out, D);
                if (s.layer[part.begin].down_bias) add(w.ffn_out, s.layer[part.begin].down_bias, D);
                back(part.begin);
                std::memcpy(part.x, w.x, bytes);
                break;
            case PART_HEAD:
                std::memcpy(w.x, part.x, bytes);
                head(part.logits);
                break;
        }
    }

  private:
    void embed(int64_t token, int64_t position) {
        unpack_row(s.embedding, token, w.x);
        if (!s.positions.data) return;
        unpack_row(s.positions, position, w.sum);
        add(w.x, w.sum, D);
    }

    void unpack_row(const SparkMatrix& m, int64_t row, float* y) {
        kernels().unpack_rows[m.kind]({m.data + row * m.stride, m.stride, D, nullptr, 1},
                                      reinterpret_cast<uint8_t*>(y), 0, 1);
    }

    void turn(int64_t position) {
        if (!s.frequency) return;
        for (int64_t i = 0; i < s.head_width / 2; ++i) {
            const double angle = static_cast<double>(position) * s.frequency[i];
            w.cos[i] = static_cast<float>(std::cos(angle));
            w.sin[i] = static_cast<float>(std::sin(angle));
        }
    }

    // What the layer before left: the hidden state, and what its predictor may want.
    void enter(const SparkPart& part) {
        std::memcpy(w.x, part.x, D * sizeof(float));
        Operand& before = w.ffn_input[(part.begin + 1) % 2];
        before.changed();
        if (!part.is_first) std::memcpy(before.f32, part.ffn_input, D * sizeof(float));
    }

    void layers(int64_t begin, int64_t end, int64_t position, bool is_first = true) {
        turn(position);
        for (int64_t i = begin; i < end; ++i) {
            front(i, position);
            feed_forward(s.layer[i], w.ffn_input[i % 2], named_by(i, is_first && i == begin));
            back(i);
        }
    }

    void head(float* logits) {
        Operand& last = w.attn_input;
        if (s.output_norm.weight)
            apply(s.output_norm, s.epsilon, w.x, D, last.f32);
        else
            std::memcpy(last.f32, w.x, D * sizeof(float));
        last.changed();
        multiply(&s.head, 1, last, logits);
    }

    // What tells a layer's predictor which neurons fire.
    Operand& named_by(int64_t index, bool is_first) {
        return w.ffn_input[(index + (s.input_layer_offset && !is_first)) % 2];
    }

    // A layer up to the input of its feed-forward part, and what follows that: the three orders of
    // blocks, as in decoder.run_layer.
    void front(int64_t index, int64_t position) {
        const SparkLayer& l = s.layer[index];
        Operand& ffn_input = w.ffn_input[index % 2];
        ffn_input.changed();
        w.attn_input.changed();
        if (!l.ffn_norm.weight) {
            apply(l.attn_norm, s.epsilon, w.x, D, ffn_input.f32);
            Operand& own = l.attn_norm_2.weight ? w.attn_input : ffn_input;
            if (l.attn_norm_2.weight) apply(l.attn_norm_2, s.epsilon, w.x, D, own.f32);
            attention(l, own, position);
            add(w.x, w.attn_out, D);
        } else if (s.is_post_norm) {
            std::memcpy(w.attn_input.f32, w.x, D * sizeof(float));
            attention(l, w.attn_input, position);
            add(w.x, w.attn_out, D);
            apply(l.attn_norm, s.epsilon, w.x, D, ffn_input.f32);
        } else {
            apply(l.attn_norm, s.epsilon, w.x, D, w.attn_input.f32);
            attention(l, w.attn_input, position);
            add(w.x, w.attn_out, D);
            apply(l.ffn_norm, s.epsilon, w.x, D, ffn_input.f32);
        }
    }

    void back(int64_t index) {
        const SparkLayer& l = s.layer[index];
        if (!s.is_post_norm || !l.ffn_norm.weight) {
            add(w.x, w.ffn_out, D);
            return;
        }
        add(w.ffn_out, w.ffn_input[index % 2].f32, D);
        apply(l.ffn_norm, s.epsilon, w.ffn_out, D, w.x);
    }

    void pack_named(const SparkLayer& l, uint32_t* named) {
        std::fill_n(named, (s.num_neurons + 31) / 32, 0u);
        for (int64_t j = 0; j < s.num_neurons; ++j)
            named[j / 32] |= static_cast<uint32_t>(!(w.named[j] <= l.predictor_threshold)) << j % 32;
    }

    void attention(const SparkLayer& l, Operand& x, int64_t position) {
        const int64_t W = s.head_width, H = s.num_heads, K = s.num_kv_heads;
        multiply(l.input, l.input[1].data ? 3 : 1, x, w.qkv);
        for (int64_t h = 0; h < H + K; ++h) {
            float* head = w.qkv + h * W;
            const SparkNorm& norm = h < H ? l.query_norm : l.key_norm;
            if (norm.weight) apply(norm, s.epsilon, head, W, head);
            if (s.frequency) rotate(head, w.cos, w.sin, W, s.is_adjacent);
        }
        append(l.key, w.qkv + H * W, position);
        append(l.value, w.qkv + (H + K) * W, position);
        attend(l, position + 1);
        w.heads_out.changed();
        multiply(&l.output, 1, w.heads_out, w.attn_out);
    }

    int64_t cache_bytes() const { return s.cache_kind == KIND_F32 ? 4 : 2; }

    void append(uint8_t* cache, const float* x, int64_t position) {
        const int64_t W = s.head_width;
        for (int64_t k = 0; k < s.num_kv_heads; ++k, x += W) {
            uint8_t* row = cache + (k * s.context_length + position) * W * cache_bytes();
            if (s.cache_kind == KIND_F32) {
                std::memcpy(row, x, W * sizeof(float));
                continue;
            }
            uint16_t* half = reinterpret_cast<uint16_t*>(row);
            for (int64_t i = 0; i < W; ++i) half[i] = to_f16(x[i]);
        }
    }

    // All heads over C cached positions, a part of them at a time, each with sums of its own. The
    // parts do not depend on the threads.
    void attend(const SparkLayer& l, int64_t C) {
        const int64_t W = s.head_width, H = s.num_heads, K = s.num_kv_heads, G = H / K;
        const int64_t padded = padded_head(W), num_parts = (C + PART - 1) / PART;
        for (int64_t h = 0; h < H; ++h) {
            std::copy_n(w.qkv + h * W, W, w.query + h * padded);
            std::fill_n(w.query + h * padded + W, padded - W, 0.0f);
        }
        split(2 * C * K * W * cache_bytes(), K * num_parts, 1, 4, [&](int64_t u0, int64_t u1) {
            for (int64_t u = u0; u < u1; ++u) attend_part(l, u / num_parts, u % num_parts, C);
        });
        for (int64_t h = 0; h < H; ++h) join(h, num_parts);
    }

    void attend_part(const SparkLayer& l, int64_t kv_head, int64_t part, int64_t C) {
        const int64_t W = s.head_width, G = s.num_heads / s.num_kv_heads, first = part * PART;
        const int64_t stride = W * cache_bytes();
        const int64_t start = (kv_head * s.context_length + first) * stride;
        const int64_t at = part * s.num_heads + kv_head * G, padded = padded_head(W);
        AttendPart a;
        a.key = l.key + start, a.value = l.value + start, a.stride = stride;
        a.n = std::min(PART, C - first), a.W = W, a.G = G;
        a.query = w.query + kv_head * G * padded;
        a.scale = 1.0f / std::sqrt(static_cast<float>(W));
        a.score = w.scores + at * PART;
        a.top = w.top + at, a.total = w.total + at, a.out = w.mixed + at * padded;
        kernels().attend[s.cache_kind](a);
    }

    // The parts of one head into its place in heads_out.
    void join(int64_t head, int64_t num_parts) {
        const int64_t W = s.head_width, H = s.num_heads, padded = padded_head(W);
        float top = w.top[head], total = 0.0f;
        for (int64_t p = 1; p < num_parts; ++p) top = std::max(top, w.top[p * H + head]);
        float* out = w.heads_out.f32 + head * W;
        std::fill_n(out, W, 0.0f);
        for (int64_t p = 0; p < num_parts; ++p) {
            const int64_t at = p * H + head;
            const float share = std::exp(w.top[at] - top);
            total += share * w.total[at];
            for (int64_t i = 0; i < W; ++i) out[i] += share * w.mixed[at * padded + i];
        }
        for (int64_t i = 0; i < W; ++i) out[i] /= total;
    }

    void feed_forward(const SparkLayer& l, Operand& x, Operand& named_by) {
        if (s.mode == MODE_PREDICTED) predict(l, named_by);
        const Gate gate = {s.activation, s.mode, l.threshold};
        const Named named = {nullptr, w.named, l.predictor_threshold};
        NeuronBytes read;
        for (int64_t b = 0; b < l.num_blocks; ++b) {
            const SparkBlock& block = l.block[b];
            float* out = b == 0 ? w.ffn_out : w.sum;
            if (s.mode == MODE_PREDICTED)
                w.neurons.run_named(block, gate, named, x, out, read);
            else
                w.neurons.run_all(block, gate, x, out, read);
            if (b > 0) add(w.ffn_out, w.sum, D);
        }
        if (l.down_bias) add(w.ffn_out, l.down_bias, D);
        s.gate_bytes += read.gate, s.up_bytes += read.up, s.down_bytes += read.down;
    }

    // Scores of all neurons into `named`.
    void predict(const SparkLayer& l, Operand& x) {
        Operand* inner = &x;
        if (l.predictor_down.data) {
            inner = &w.inner;
            inner->size = l.predictor_down.num_rows;
            inner->changed();
            multiply(&l.predictor_down, 1, x, inner->f32);
            if (s.predictor_kind == PREDICTOR_RELU)
                for (int64_t r = 0; r < inner->size; ++r)
                    inner->f32[r] = inner->f32[r] < 0.0f ? 0.0f : inner->f32[r];
            s.predictor_bytes += num_bytes(l.predictor_down);
        }
        multiply(&l.predictor_up, 1, *inner, w.named);
        s.predictor_bytes += num_bytes(l.predictor_up);
        const Gate gate = {s.activation, s.mode, 0.0f};
        if (s.predictor_kind == PREDICTOR_GATE)
            for (int64_t j = 0; j < s.num_neurons; ++j)
                w.named[j] = std::fabs(gate.smooth(w.named[j]));
    }

    SparkStep& s;
    Work w;
    const int64_t D;
};

bool fits(const SparkLayer& l, const SparkStep& s) {
    const int64_t q = s.num_heads * s.head_width, kv = s.num_kv_heads * s.head_width;
    const bool is_fused = !l.input[1].data;
    if (is_fused && !fits(l.input[0], q + 2 * kv, s.width)) return false;
    if (!is_fused && !(fits(l.input[0], q, s.width) && fits(l.input[1], kv, s.width) &&
                       fits(l.input[2], kv, s.width)))
        return false;
    if (!fits(l.output, s.width, q) || !l.attn_norm.weight || !l.key || !l.value) return false;
    if (s.mode == MODE_PREDICTED) {
        const bool is_low_rank = l.predictor_down.data != nullptr;
        const int64_t rank = is_low_rank ? l.predictor_down.num_rows : s.width;
        if (is_low_rank && !fits(l.predictor_down, rank, s.width)) return false;
        if (!fits(l.predictor_up, s.num_neurons, rank)) return false;
    }
    for (int64_t b = 0; b < l.num_blocks; ++b)
        if (!fits(l.block[b], s.width, s.num_neurons, l.block[0].up.data != nullptr))
            return false;
    return true;
}

bool fits(const SparkStep& s) {
    const int64_t sizes[] = {s.width,        s.num_neurons, s.num_heads,
                             s.num_kv_heads, s.head_width,  s.context_length};
    for (int64_t size : sizes)
        if (size < 1 || size > INT32_MAX) return false;
    if (s.num_heads % s.num_kv_heads || (s.frequency && s.head_width % 2)) return false;
    if (s.head_width > MAX_HEAD_WIDTH) return false;
    if (s.cache_kind != KIND_F32 && s.cache_kind != KIND_F16) return false;
    if (s.activation < 0 || s.activation >= NUM_ACTIVATIONS) return false;
    if (s.num_layers < 0 || (s.num_layers > 0 && !s.layer)) return false;
    for (const SparkMatrix& m : {s.embedding, s.head})
        if (m.data && !fits(m, m.num_rows, s.width)) return false;
    if (s.positions.data && (s.positions.num_rows < s.context_length ||
                             !fits(s.positions, s.positions.num_rows, s.width)))
        return false;
    for (int64_t i = 0; i < s.num_layers; ++i)
        if (!fits(s.layer[i], s)) return false;
    return true;
}

// Whether every layer can be run from its beginning to its end.
bool is_whole(const SparkStep& s) {
    bool has_blocks = s.num_layers > 0;
    for (int64_t i = 0; i < s.num_layers; ++i) has_blocks &= s.layer[i].num_blocks > 0;
    return has_blocks && s.embedding.data && s.head.data;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int64_t spark_step_bytes(const SparkStep* step) {
    return fits(*step) && is_whole(*step) ? Work(*step, nullptr).arena.used() : -1;
}

EXPORT int64_t spark_parts_bytes(const SparkStep* step) {
    return fits(*step) ? Work(*step, nullptr).arena.used() : -1;
}

EXPORT void spark_part(void* data) {
    const SparkPart& part = *static_cast<const SparkPart*>(data);
    Step(*part.step).run(part);
}

EXPORT int32_t spark_step(SparkStep* step, int64_t token, int64_t position, float* logits) {
    if (token < 0 || token >= step->embedding.num_rows) return STATUS_INDEX_OUT_OF_RANGE;
    if (position < 0 || position >= step->context_length) return STATUS_INDEX_OUT_OF_RANGE;
    Step(*step).run(token, position, logits);
    return STATUS_OK;
}
