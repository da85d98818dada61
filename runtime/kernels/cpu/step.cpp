// Runs a step of some rows, see step.h: the operations that step/program.py declares. Those of operation.h are in
// files of their own. runtime/ops has their references; results are equal up to rounding.
#include "step.h"

#include <algorithm>

#include "attention.h"
#include "experts.h"
#include "latent.h"
#include "operation.h"
#include "step_clock.h"

namespace {

// The most values between two matrices of a predictor.
int64_t largest_rank(const HsStep& step) {
    int64_t rank = 0;
    for (int64_t i = 0; i < step.num_layers; ++i)
        rank = std::max(rank, step.layer[i].predictor.down.num_rows);
    return rank;
}

uint32_t forms_of(const HsStep& step) {
    uint32_t forms = form_bit(step.head);
    for (int64_t i = 0; i < step.num_layers; ++i) {
        const HsLayer& l = step.layer[i];
        for (const HsMatrix& m : l.attention.input) forms |= form_bit(m);
        forms |= form_bit(l.attention.output) | form_bit(l.predictor.down) | form_bit(l.predictor.up);
        forms |= form_bit(l.route.router) | form_bit(l.shared_gate);
        for (const HsFeedForward* f : {&l.feed_forward, &l.shared}) {
            for (int64_t b = 0; b < f->num_blocks; ++b)
                forms |= forms_of(f->experts ? f->experts[b].first : f->block[b]);
        }
    }
    return forms;
}

uint32_t by_output_forms(const HsStep& step) {
    uint32_t forms = 0;
    for (const HsLayer* l = step.layer; l < step.layer + step.num_layers; ++l)
        for (const HsFeedForward* f : {&l->feed_forward, &l->shared})
            for (int64_t b = 0; b < f->num_blocks && !f->experts; ++b)
                forms |= by_output_forms(f->block[b]);
    return forms;
}

// True if a layer with neurons needs all of its gates.
bool needs_all_gates(const HsFeedForward& f) { return f.num_blocks && Gate{f.gate}.needs_all(); }
bool needs_all_gates(const HsStep& step) {
    return std::any_of(step.layer, step.layer + step.num_layers,
                       [](const HsLayer& l) { return needs_all_gates(l.feed_forward); });
}

int64_t most_experts(const HsStep& step) {
    int64_t found = 0;
    for (int64_t i = 0; i < step.num_layers; ++i)
        found = std::max(found, step.layer[i].route.router.num_rows);
    return found;
}

int64_t most_used(const HsStep& step) {
    int64_t found = 0;
    for (int64_t i = 0; i < step.num_layers; ++i) found = std::max(found, step.layer[i].route.num_used);
    return found;
}

// The largest size(attention) of a layer.
template <class Size>
int64_t most(const HsStep& s, const Size& size) {
    int64_t found = 0;
    for (int64_t i = 0; i < s.num_layers; ++i) found = std::max(found, size(s.layer[i].attention));
    return found;
}

int64_t size_of(const HsStep& s, int32_t value) {
    if (value == VALUE_QKV) return most(s, qkv_size);
    if (value == VALUE_NAMED) return s.num_neurons;
    if (value == VALUE_ROUTED) return 2 * most_used(s);
    if (value == VALUE_X && s.x_size) return s.x_size;
    if (value == VALUE_NONE) return 0;
    if (value >= VALUE_OWN) return s.own_size[value - VALUE_OWN];
    return value == VALUE_HEADS ? most(s, heads_size) : s.width;
}

// The values of a row of a shared value, of which a layer with fewer than others uses the beginning.
int64_t row_size(const HsStep& s, const HsLayer* layer, int32_t value) {
    if (layer && value == VALUE_QKV) return qkv_size(layer->attention);
    if (layer && value == VALUE_HEADS) return heads_size(layer->attention);
    if (layer && value == VALUE_ROUTED) return 2 * layer->route.num_used;
    return size_of(s, value);
}

int64_t most_pairs(const HsStep& s) {
    return most(s, [](const HsAttention& a) { return a.head_dim; }) / 2;
}

// Operations whose input is multiplied by matrices, and those that process each row separately.
bool is_product(const HsOp& op) {
    return op.kind == OP_ATTENTION || op.kind == OP_PREDICT || op.kind == OP_NEURONS ||
           op.kind == OP_ROUTE || op.kind == OP_SHARED || op.kind == OP_HEAD;
}
bool is_of_rows(const HsOp& op) {
    return op.kind == OP_NORM || op.kind == OP_ADD || op.kind == OP_ADD_BIAS;
}

std::array<int32_t, MOST_READ> read_by(const HsOp& op) { return {op.in, op.in_2, op.in_3}; }
std::array<int32_t, MOST_WRITTEN> written_by(const HsOp& op) { return {op.out, op.out_2}; }

// The values that a step uses, and the packed forms of each that products read.
struct UsedValues {
    explicit UsedValues(const HsStep& step) {
        const uint32_t all = forms_of(step);
        for (const HsOp* op = step.op; op < step.op + step.num_ops; ++op) {
            const Operation* own = operation(op->kind);
            const auto reads = read_by(*op);
            for (int i = 0; i < MOST_READ; ++i) {
                is_used[reads[i]] = true;
                if (own && i < own->num_read) forms[reads[i]] |= own->forms(op->weights, i);
            }
            for (int32_t value : written_by(*op)) is_used[value] = true;
            if (is_product(*op)) forms[op->in] |= all;
        }
    }

    bool is_used[NUM_VALUES + 1] = {};
    uint32_t forms[NUM_VALUES + 1] = {};
};

// The most memory that an operation of operation.h needs.
int64_t most_scratch(const HsStep& step) {
    int64_t found = 0;
    for (const HsOp* op = step.op; op < step.op + step.num_ops; ++op)
        if (const Operation* own = operation(op->kind))
            found = std::max(found, own->scratch_bytes(op->weights, step.max_rows));
    return found;
}

struct Work {
    Work(const HsStep& step, uint8_t* memory)
        : arena(memory),
          neurons(arena, step.width, step.num_neurons, step.max_rows, by_output_forms(step),
                  needs_all_gates(step)),
          experts(arena, ExpertSizes(step), step.width, step.max_rows, neurons),
          attention(step, arena),
          latent(step, arena) {
        const int64_t D = step.width, R = step.max_rows;
        const uint32_t forms = forms_of(step);
        const UsedValues used(step);
        for (int32_t value = 0; value < NUM_VALUES; ++value)
            if (used.is_used[value])
                vector[value] =
                    arena.operand(size_of(step, value), R, used.forms[value], step.vector[value]);
        learned = arena.take<float>(step.positions.data ? R * D : 0);
        inner = arena.operand(largest_rank(step), R, forms);
        num_pairs = most_pairs(step);
        cos = arena.take<float>(step.num_rotaries * R * num_pairs);
        sin = arena.take<float>(step.num_rotaries * R * num_pairs);
        named = vector[VALUE_NAMED].f32;
        const int64_t E = most_experts(step);
        logits = arena.take<float>(R * E);
        choice = arena.take<float>(R * E);
        shared_gate = arena.take<float>(E ? R : 0);
        scratch = arena.used();
        heads_out = arena.operand(most(step, heads_size), R, forms);
        qkv = arena.take<float>(R * most(step, qkv_size));
        gates = arena.take<float>(R * most(step, gates_size));
        raw_keys = arena.take<float>(R * most(step, raw_keys_size));
    }

    Arena arena;
    Neurons neurons;
    Experts experts;
    Attention attention;
    LatentProjections latent;
    int64_t num_pairs;               // of the widest head
    float *qkv, *cos, *sin, *named;  // cos, sin: [num_rotaries, max_rows, num_pairs]
    float* gates;                    // [max_rows, H W]
    float* raw_keys;                 // [max_rows, K W] before their norm, as values
    float* learned;                  // positions
    float *logits, *choice;          // [max_rows, E] of a router
    float* shared_gate;              // [max_rows]
    int64_t scratch;  // where the memory of operations of operation.h begins, or of attention
    Operand vector[NUM_VALUES + 1] = {}, heads_out, inner;
};

void add(float* x, const float* y, int64_t n) { kernels().add_to(x, y, n); }

class Step {
  public:
    explicit Step(HsStep& step) : s(step), clock(step), w(step, step.workspace), D(step.width) {}

    void run(const HsRow* row, int64_t count, float* logits) {
        last_of_all = last_that_keeps();
        run(row, count, logits, nullptr, 0, s.num_ops);
    }

    void run(const HsPart& part) {
        run(part.row, *part.num_rows, part.logits, part.named, part.begin, part.end);
    }

  private:
    // Runs operations begin .. end-1. Adjacent ones of a layer that process each row separately share a
    // pass over the rows.
    void run(const HsRow* row, int64_t count, float* logits, uint32_t* named, int64_t begin,
             int64_t end) {
        w.attention.place(row, count);
        T = w.attention.num_rows();
        for (int64_t t = num_wanted = 0; t < T; ++t) {
            const HsRow& own = row[w.attention.number(t)];
            token[t] = own.token;
            if (own.has_logits) wanted[num_wanted++] = t;
        }
        for (int64_t i = begin, next; i < end; i = next) {
            const HsOp& op = s.op[i];
            clock.layer(op.layer);
            next = i + 1;
            if (!is_of_rows(op)) {
                run(op, row, logits, named);
                if (i == last_of_all) {
                    drop_rows();
                    if (!T) return;
                }
                continue;
            }
            while (next < end && is_of_rows(s.op[next]) && s.op[next].layer == op.layer) ++next;
            for (int64_t j = i; j < next; ++j) w.vector[s.op[j].out].changed();
            rows(D, [&](int64_t t) {
                for (int64_t j = i; j < next; ++j) run_row(s.op[j], t);
            });
            clock.ended(TIMED_OTHER);
        }
    }

    // The last operation that keeps something of every row, keys or states: later ones concern rows with
    // logits alone. The number of operations, if others read the hidden states.
    int64_t last_that_keeps() const {
        if (s.vector[VALUE_X]) return s.num_ops;
        int64_t last = s.num_ops - 1;
        bool is_read[NUM_VALUES + 1] = {};
        for (; last >= 0; --last) {
            const HsOp& op = s.op[last];
            const Operation* own = operation(op.kind);
            if (op.kind == OP_ATTENTION || op.kind == OP_ATTEND) break;
            if (own && own->rooms(op.weights).slots) break;
            for (int32_t value : written_by(op)) is_read[value] = false;
            for (int32_t value : read_by(op)) is_read[value] = true;
        }
        // Their rows are as long as a layer needs.
        const bool is_fixed = !is_read[VALUE_NAMED] && !is_read[VALUE_ROUTED];
        return is_fixed && last >= 0 ? last : s.num_ops;
    }

    // Drops the rows without logits.
    void drop_rows() {
        if (num_wanted == T) return;
        bool is_read[NUM_VALUES + 1] = {};
        for (const HsOp* op = s.op + last_of_all; op < s.op + s.num_ops; ++op)
            for (int32_t value : read_by(*op)) is_read[value] = true;
        for (int32_t value = 0; value < NUM_VALUES; ++value)
            if (is_read[value] && w.vector[value].f32) drop_rows(w.vector[value]);
        for (int64_t i = 0; i < num_wanted; ++i) token[i] = token[wanted[i]], wanted[i] = i;
        T = num_wanted;
    }

    void drop_rows(Operand& x) {
        for (int64_t i = 0; i < num_wanted; ++i)
            if (wanted[i] != i) std::memcpy(x.row(i), x.row(wanted[i]), x.size * sizeof(float));
        x.changed();
    }

    void run(const HsOp& op, const HsRow* row, float* logits, uint32_t* named) {
        if (const Operation* own = operation(op.kind)) return run(*own, op, row);
        Operand &in = w.vector[op.in], &out = w.vector[op.out];
        out.changed();
        switch (op.kind) {
            case OP_EMBED:
                rows(4 * D, [&](int64_t t) { embed(token[t], t, out.row(t)); });
                return clock.ended(TIMED_OTHER);
            case OP_ATTENTION:
                return attention(s.layer[op.layer].attention, in, out.f32, &op == s.op + last_of_all);
            case OP_ATTEND:
                turn(s.layer[op.layer].attention);
                clock.ended(TIMED_OTHER);
                return attend(s.layer[op.layer].attention, in.f32, out);
            case OP_PREDICT: {
                const HsLayer& l = s.layer[op.layer];
                const int64_t F = l.feed_forward.num_neurons;
                predict(l, in);
                if (s.seen_predicted) std::copy_n(w.named, T * F, s.seen_predicted);
                if (named) pack_named(l, named, words_of(F));
                return clock.ended(TIMED_PREDICTOR);
            }
            case OP_NEURONS:
                return op.in_2 == VALUE_ROUTED ? experts(op, in, out.f32) : neurons(op, in, out.f32);
            case OP_ROUTE:
                return route(s.layer[op.layer].route, in, out.f32);
            case OP_SHARED:
                return shared(s.layer[op.layer], in, out.f32);
            case OP_HEAD_NORM:
                for (int64_t t = 0; t < num_wanted; ++t) output_norm(in.row(wanted[t]), out.row(t));
                return clock.ended(TIMED_OTHER);
            case OP_HEAD:
                if (num_wanted) multiply(&s.head, 1, in, num_wanted, logits, s.head.num_rows);
                if (s.logit_cap > 0.0f) cap(logits, num_wanted * s.head.num_rows);
                return clock.ended(TIMED_HEAD);
        }
    }

    void run(const Operation& own, const HsOp& op, const HsRow* row) {
        int64_t* bytes = op.layer < s.num_layers ? &s.attention_bytes : nullptr;
        OperationCall call = {T,     s.max_rows, token.data(), row,
                              bytes, &clock,     s.seen_heads, Arena(s.workspace + w.scratch),
                              {},    {}};
        for (int i = 0; i < own.num_read; ++i) call.read[i] = &w.vector[read_by(op)[i]];
        for (int i = 0; i < own.num_written; ++i) call.written[i] = &w.vector[written_by(op)[i]];
        own.run(op.weights, call);
        for (int i = 0; i < own.num_written; ++i) call.written[i]->changed();
        clock.ended(TIMED_OTHER);
    }

    void cap(float* logits, int64_t n) {
        split(n * 4, n, LINE / 4, 4,
              [&](int64_t i0, int64_t i1) { kernels().soft_cap(logits + i0, i1 - i0, s.logit_cap); });
    }

    void run_row(const HsOp& op, int64_t t) {
        const float* in = w.vector[op.in].row(t);
        float* out = w.vector[op.out].row(t);
        const int64_t D = w.vector[op.out].size;
        if (op.kind == OP_NORM) return apply(s.layer[op.layer].norm[op.part], in, D, out);
        if (in != out) std::memcpy(out, in, D * sizeof(float));
        const float* by =
            op.kind == OP_ADD ? w.vector[op.in_2].row(t) : s.layer[op.layer].feed_forward.down_bias;
        if (op.kind == OP_ADD_BIAS || (op.factor == 1.0f && op.scale == 1.0f)) return add(out, by, D);
        for (int64_t d = 0; d < D; ++d) out[d] = op.scale * (out[d] + op.factor * by[d]);
    }

    template <class Body>
    void rows(int64_t values, const Body& body) {
        for_rows(T, values, body);
    }

    void embed(int64_t token, int64_t t, float* out) {
        unpack_row(s.embedding, token, out);
        if (s.embedding_scale != 1.0f)
            for (int64_t i = 0; i < D; ++i) out[i] *= s.embedding_scale;
        if (!s.positions.data) return;
        float* learned = w.learned + t * D;
        unpack_row(s.positions, w.attention.position(t), learned);
        add(out, learned, D);
    }

    // Cosines and sines of the positions in a layer's rotary embedding, computed once per call.
    void turn(const HsAttention& l) {
        if (!is_rotated(l) || is_turned[l.rotary]) return;
        is_turned[l.rotary] = true;
        const HsRotary& rotary = s.rotary[l.rotary];
        rows(100 * rotary.head_width, [&](int64_t t) {
            const auto position = static_cast<double>(w.attention.position(t) + rotary.ahead);
            const int64_t first = turn_at(l, t);
            for (int64_t i = 0; i < rotary.head_width / 2; ++i) {
                const double angle = position * rotary.frequency[i];
                w.cos[first + i] = static_cast<float>(rotary.magnitude * std::cos(angle));
                w.sin[first + i] = static_cast<float>(rotary.magnitude * std::sin(angle));
            }
        });
    }

    bool is_rotated(const HsAttention& l) const { return l.rotary >= 0; }

    // Where the cosines and sines of row t begin.
    int64_t turn_at(const HsAttention& l, int64_t t) const {
        return (l.rotary * s.max_rows + t) * w.num_pairs;
    }

    void output_norm(const float* x, float* y) {
        if (s.output_norm.weight)
            apply(s.output_norm, x, D, y);
        else
            std::memcpy(y, x, D * sizeof(float));
    }

    static int64_t words_of(int64_t num_neurons) { return (num_neurons + 31) / 32; }

    // Writes the bits of a layer's predicted neurons for all rows, `stride` words apart.
    void pack_named(const HsLayer& l, uint32_t* named, int64_t stride) {
        for (int64_t t = 0; t < T; ++t)
            pack_named(l, w.named + t * l.feed_forward.num_neurons, named + t * stride);
    }

    void pack_named(const HsLayer& l, const float* score, uint32_t* named) {
        const int64_t F = l.feed_forward.num_neurons;
        for (int64_t first = 0; first < F; first += 32) {
            const int64_t count = std::min<int64_t>(32, F - first);
            uint32_t word = 0;
            for (int64_t j = 0; j < count; ++j)
                word |= static_cast<uint32_t>(!(score[first + j] <= l.predictor.threshold)) << j;
            named[first / 32] = word;
        }
    }

    // `is_last`: only rows with logits attend.
    void attention(const HsAttention& l, Operand& input, float* out, bool is_last) {
        turn(l);
        clock.ended(TIMED_OTHER);
        if (l.latent)
            w.latent.project(l, input, T, w.qkv);
        else
            multiply(l.input, num_inputs(l), input, T, w.qkv, qkv_size(l));
        clock.ended(TIMED_INPUTS);
        attend(l, w.qkv, w.heads_out, is_last ? (num_wanted ? wanted[0] : T) : 0);
        if (is_last) {
            if (num_wanted < T) drop_rows(w.heads_out);
            drop_rows();
            if (!T) return;
        }
        Operand& heads = l.latent ? w.latent.outputs(l, w.heads_out, T) : w.heads_out;
        if (s.seen_heads) std::copy_n(heads.f32, T * heads.size, s.seen_heads);
        multiply(&l.output, 1, heads, T, out, D);
        s.attention_bytes += bytes_of_projections(l);
        clock.ended(TIMED_OUTPUT);
    }

    // Prepares the projections of each row in place, appends keys and values, and attends, rows from `first`
    // on.
    void attend(const HsAttention& l, float* qkv, Operand& heads, int64_t first = 0) {
        const int64_t num_values = qkv_size(l);
        w.attention.use(l);
        heads.size = heads_size(l);
        rows(4 * num_values, [&](int64_t t) {
            float* values = qkv + t * num_values;
            const float* own = prepare_heads(l, row_of_heads(l, t), values);
            if (own_heads(l)) w.attention.append(l, t, values + queries_size(l), own);
        });
        if (own_heads(l)) w.attention.summarise(l);
        w.attention.run(l, qkv, num_values, has_gates(l) ? w.gates : nullptr, heads, first);
        heads.changed();
        clock.ended(TIMED_ATTEND);
    }

    RowOfHeads row_of_heads(const HsAttention& l, int64_t t) const {
        const int64_t first = is_rotated(l) ? turn_at(l, t) : 0;
        return {w.attention.position(t),
                is_rotated(l) ? s.rotary + l.rotary : nullptr,
                w.cos + first,
                w.sin + first,
                s.is_key_rotated != 0,
                s.is_value_rotated != 0,
                w.gates + t * gates_size(l),
                w.raw_keys + t * raw_keys_size(l)};
    }

    // Bytes of attention's matrices.
    static int64_t bytes_of_projections(const HsAttention& l) {
        int64_t found = l.output.num_rows * row_bytes(l.output);
        for (const HsMatrix& m : l.input) found += m.data ? m.num_rows * row_bytes(m) : 0;
        if (!l.latent) return found;
        for (const HsMatrix& m : {l.latent->query, l.latent->key, l.latent->value})
            found += m.data ? m.num_rows * row_bytes(m) : 0;
        return found;
    }

    // Runs a block of a layer's neurons. The first one prepares the layer's bits.
    void neurons(const HsOp& op, Operand& input, float* out) {
        const HsLayer& l = s.layer[op.layer];
        const HsFeedForward& f = l.feed_forward;
        const HsBlock& block = f.block[op.part];
        const bool are_named = op.in_2 == VALUE_NAMED, is_first = op.part == 0;
        const Gate gate{f.gate};
        Named named[MAX_ROWS];
        for (int64_t t = 0; are_named && t < T; ++t)
            named[t] = {nullptr, w.named + t * f.num_neurons, l.predictor.threshold};
        NeuronBytes read;
        w.neurons.run(block, gate, are_named ? named : nullptr, input, T, out, read, {},
                      {s.seen_gate, s.seen_hidden, f.num_neurons, nullptr});
        count(read, is_first ? TIMED_NEURONS : TIMED_NEURONS_2);
    }

    // Writes the experts of each row and their weights, [T, 2 K].
    void route(const HsRoute& r, Operand& input, float* out) {
        const int64_t E = r.router.num_rows;
        multiply(&r.router, 1, input, T, w.logits, E);
        rows(E * r.num_used, [&](int64_t t) {
            Chooser(r, w.choice + t * E).run(w.logits + t * E, out + t * 2 * r.num_used);
        });
        s.predictor_bytes += num_bytes(r.router);
        clock.ended(TIMED_PREDICTOR);
    }

    void experts(const HsOp& op, Operand& input, float* out) {
        const HsLayer& l = s.layer[op.layer];
        const HsFeedForward& f = l.feed_forward;
        const Gate gate{f.gate};
        NeuronBytes read;
        w.experts.run(f.experts[op.part], gate, w.vector[VALUE_ROUTED].f32, l.route.num_used, input, T,
                      out, read, {s.seen_gate, s.seen_hidden, f.num_neurons, nullptr});
        count(read, op.part == 0 ? TIMED_NEURONS : TIMED_NEURONS_2);
    }

    void shared(const HsLayer& l, Operand& input, float* out) {
        const HsFeedForward& f = l.shared;
        const Gate gate{f.gate};
        NeuronBytes read;
        w.neurons.run(f.block[0], gate, nullptr, input, T, out, read, {},
                      {nullptr, s.seen_shared, f.num_neurons, nullptr});
        if (l.shared_gate.data) {
            multiply(&l.shared_gate, 1, input, T, w.shared_gate, 1);
            rows(D, [&](int64_t t) {
                const float factor = 1.0f / (1.0f + std::exp(-w.shared_gate[t]));
                for (float* y = out + t * D; y < out + (t + 1) * D; ++y) *y *= factor;
            });
        }
        count(read, TIMED_NEURONS);
    }

    // Adds the bytes that a block of neurons needed to the step's, and ends the timed part.
    void count(NeuronBytes& read, Timed part) {
        s.gate_bytes += read.gate, s.up_bytes += read.up, s.down_bytes += read.down;
        read = {};
        clock.ended(part);
    }

    // Writes scores of all neurons to `named`.
    void predict(const HsLayer& l, Operand& input) {
        const HsPredictor& p = l.predictor;
        const int64_t F = l.feed_forward.num_neurons;
        Operand* inner = &input;
        if (p.down.data) {
            inner = &w.inner;
            const int64_t rank = p.down.num_rows;
            inner->size = rank;
            inner->changed();
            multiply(&p.down, 1, input, T, inner->f32, rank);
            if (p.kind == PREDICTOR_RELU)
                for (int64_t i = 0; i < T * rank; ++i)
                    inner->f32[i] = inner->f32[i] < 0.0f ? 0.0f : inner->f32[i];
            s.predictor_bytes += num_bytes(p.down);
        }
        multiply(&p.up, 1, *inner, T, w.named, F);
        s.predictor_bytes += num_bytes(p.up);
    }

    HsStep& s;
    StepClock clock;
    Work w;
    const int64_t D;
    int64_t T = 1;  // computed rows of this step
    std::array<int64_t, MAX_ROWS> token;
    std::array<int64_t, MAX_ROWS> wanted;  // rows with logits
    int64_t num_wanted = 0;
    int64_t last_of_all = -1;  // the last operation of all rows, if later ones concern some alone
    std::array<bool, MAX_ROTARIES> is_turned = {};
};

bool attends(const HsLayer& l) { return l.attention.num_heads > 0; }

bool fits(const HsRotary& r) {
    return r.frequency && r.head_width > 0 && r.head_width % 2 == 0 && r.ahead >= 0;
}

bool fits(const HsAttention& l, const HsStep& s) {
    for (int64_t size : {l.num_heads, l.num_kv_heads, l.head_dim})
        if (size < 1 || size > INT32_MAX) return false;
    if (l.num_heads % l.num_kv_heads || l.num_heads / l.num_kv_heads > MAX_SHARED_HEADS) return false;
    if (l.head_dim > MAX_HEAD_WIDTH || l.window < 0) return false;
    if (l.table < 0 || l.table >= s.num_tables) return false;
    const int64_t kept = s.table[l.table].window;
    if (kept && (!l.window || l.window > kept)) return false;
    if (!heads_fit(l)) return false;
    for (int32_t kind : {s.key_kind, s.value_kind})
        if (l.head_dim % block_values(kind)) return false;
    if (value_size(l) % block_values(s.key_kind)) return false;
    if (l.rotary >= s.num_rotaries) return false;
    const int64_t rotated = l.rotary < 0 ? 0 : s.rotary[l.rotary].head_width;
    if (rotated > l.head_dim) return false;
    if (l.latent) return latent_fits(l, s.width) && l.key;
    const int64_t kv = l.num_kv_heads * l.head_dim;
    int64_t outputs[] = {num_inputs(l) == 1 ? qkv_size(l) : query_rows(l), kv, kv, kv};
    if (l.gate_width) outputs[1 + l.num_kv_projections] = l.num_heads * l.gate_width;
    for (int m = 0; m < num_inputs(l); ++m)
        if (!fits(l.input[m], outputs[m], s.width)) return false;
    if (l.input[0].data && !fits(l.output, s.width, heads_size(l))) return false;
    return l.key && (l.value || l.value_width);
}

bool fits(const HsPredictor& p, int64_t num_neurons, const HsStep& s) {
    if (!p.up.data) return true;
    const int64_t rank = p.down.data ? p.down.num_rows : s.width;
    return num_neurons > 0 && (!p.down.data || fits(p.down, rank, s.width)) &&
           fits(p.up, num_neurons, rank);
}

bool fits(const HsFeedForward& f, const HsStep& s) {
    if (f.num_neurons < (f.num_blocks > 0) || f.num_neurons > s.num_neurons) return false;
    if (!Gate{f.gate}.is_valid()) return false;
    if (needs_all_gates(f) && (f.experts || f.num_blocks != 1 || !has_all(*f.block, f.num_neurons)))
        return false;
    for (int64_t b = 0; b < f.num_blocks && !f.experts; ++b)
        if (!fits(f.block[b], s.width, f.num_neurons, f.block[0].up.data != nullptr,
                  f.gate.computes_all))
            return false;
    return true;
}

// True if the router and experts of a layer fit together.
bool fits_experts(const HsLayer& l, const HsStep& s) {
    const HsFeedForward& f = l.feed_forward;
    if (!f.experts) return fits(l.route, s.width);
    if (!l.route.router.data || !fits(l.route, s.width)) return false;
    for (const HsExperts* e = f.experts; e < f.experts + f.num_blocks; ++e)
        if (f.num_neurons != e->first.num_neurons || e->num_experts != l.route.router.num_rows ||
            e->first.gate.num_columns > s.width ||
            !fits(*e, l.route.num_used, e->first.gate.num_columns, f.gate.computes_all))
            return false;
    return true;
}

// Values of the input and of the output of these neurons: of experts perhaps fewer than of the hidden state.
int64_t width_of(const HsFeedForward& f, const HsStep& s) {
    return f.experts ? f.experts->first.gate.num_columns : s.width;
}

bool fits(const HsLayer& l, const HsStep& s) {
    return (!attends(l) || fits(l.attention, s)) && fits(l.feed_forward, s) && fits(l.shared, s) &&
           fits_experts(l, s) && (!l.shared_gate.data || fits(l.shared_gate, 1, s.width)) &&
           fits(l.predictor, l.feed_forward.num_neurons, s) &&
           !(needs_all_gates(l.feed_forward) && l.predictor.up.data) && !needs_all_gates(l.shared);
}

// True if this block of a layer can compute only some of its neurons.
bool takes_names(const HsBlock& block) { return !block.is_by_output && has_sums(block.down); }

// True if `count` values of an operation are vectors of their own sizes, and the others absent.
template <size_t N>
bool fit(const std::array<int32_t, N>& value, int count, const HsStep& s, int64_t* size) {
    for (size_t i = 0; i < N; ++i) {
        if (value[i] < 0 || value[i] > VALUE_NONE) return false;
        if ((static_cast<int>(i) < count) != (value[i] != VALUE_NONE)) return false;
        if (value[i] >= VALUE_QKV && value[i] <= VALUE_ROUTED) return false;
        size[i] = size_of(s, value[i]);
    }
    return true;
}

bool fits(const Operation& own, const HsOp& op, const HsStep& s) {
    const auto read = read_by(op);
    const auto written = written_by(op);
    OperationValues values = {};
    std::copy(read.begin(), read.end(), values.read);
    std::copy(written.begin(), written.end(), values.written);
    return op.layer >= 0 && op.layer <= s.num_layers && fit(read, own.num_read, s, values.read_size) &&
           fit(written, own.num_written, s, values.written_size) && own.accepts(op.weights, values);
}

bool fits(const HsOp& op, const HsStep& s) {
    if (const Operation* own = operation(op.kind)) return fits(*own, op, s);
    if (op.in_3 != VALUE_NONE || op.out_2 != VALUE_NONE) return false;
    for (int32_t value : {op.in, op.in_2, op.out}) {
        if (value < 0 || value > VALUE_NONE) return false;
        const bool has_own_size = value == VALUE_X || (value >= VALUE_OWN && value < VALUE_NONE);
        const bool has_any = op.kind == OP_ADD || op.kind == OP_NEURONS;  // see below
        if (has_own_size && !has_any && size_of(s, value) != s.width) return false;
        if ((value == VALUE_QKV || value == VALUE_HEADS) && op.kind != OP_ATTEND) return false;
    }
    if (op.in == VALUE_ROUTED || (op.in_2 == VALUE_ROUTED && op.kind != OP_NEURONS) ||
        (op.out == VALUE_ROUTED) != (op.kind == OP_ROUTE))
        return false;
    if (op.in == VALUE_NAMED || (op.in_2 == VALUE_NAMED && op.kind != OP_NEURONS) ||
        (op.out == VALUE_NAMED) != (op.kind == OP_PREDICT))
        return false;
    const bool is_outside = op.kind == OP_EMBED || op.kind == OP_HEAD_NORM || op.kind == OP_HEAD;
    if (op.layer < 0 || (is_outside ? op.layer != s.num_layers : op.layer >= s.num_layers))
        return false;
    const HsLayer* l = s.layer + op.layer;
    switch (op.kind) {
        case OP_EMBED:
            return s.embedding.data;
        case OP_NORM:
            return op.part >= 0 && op.part < l->num_norms && l->norm[op.part].weight;
        case OP_ADD_BIAS:
            return l->feed_forward.down_bias;
        case OP_ATTENTION:
            return attends(*l) && l->attention.input[0].data;
        case OP_ATTEND:
            return op.in == VALUE_QKV && op.out == VALUE_HEADS && attends(*l);
        case OP_PREDICT:
            return l->predictor.up.data;
        case OP_ROUTE:
            return l->route.router.data;
        case OP_SHARED:
            return l->shared.num_blocks == 1;
        case OP_ADD:
            return size_of(s, op.in) == size_of(s, op.out) && size_of(s, op.in_2) == size_of(s, op.out);
        case OP_NEURONS:
            for (int32_t value : {op.in, op.out})
                if (size_of(s, value) != width_of(l->feed_forward, s)) return false;
            if (op.part < 0 || op.part >= l->feed_forward.num_blocks) return false;
            if ((op.in_2 == VALUE_ROUTED) != (l->feed_forward.experts != nullptr)) return false;
            return op.in_2 == VALUE_ROUTED || op.in_2 == VALUE_NONE ||
                   (op.in_2 == VALUE_NAMED && takes_names(l->feed_forward.block[op.part]));
        case OP_HEAD:
            return s.head.data;
    }
    return op.kind == OP_HEAD_NORM;
}

bool fits(const HsTable& t, int64_t context_length) {
    if (!t.block || t.num_sequences < 1 || t.num_blocks < 1 || t.block_length < 1) return false;
    if (t.window < 0) return false;
    const bool is_whole = t.block_length >= context_length && t.blocks_per_sequence == 1;
    const bool is_paged = t.block_length >= LEAST_BLOCK && PART % t.block_length == 0;
    return (is_whole || is_paged) && t.blocks_per_sequence * t.block_length >= context_length;
}

bool fits(const HsSelect& c, const HsStep& s) {
    if (c.block == 0) return true;
    if (c.block < 1 || c.sinks < 0 || c.window < c.block || c.top < c.block || c.candidates < 1)
        return false;
    if (c.full < 0) return false;
    if (c.sinks % c.block || c.window % c.block || c.top % c.block) return false;
    if (c.summary != SUMMARY_MEAN && c.summary != SUMMARY_BOUNDS) return false;
    if (s.num_tables != 1) return false;
    if (s.table->blocks_per_sequence > 1 && s.table->block_length % c.block) return false;
    for (int64_t i = 0; i < s.num_layers; ++i) {
        const HsAttention& l = s.layer[i].attention;
        if (!attends(s.layer[i])) continue;
        if (l.window) return false;
        if (!l.summary || !l.summary_unit || (c.is_coded && (!l.code || !l.code_factor))) return false;
    }
    return true;
}

bool fits(const HsStep& s) {
    for (int64_t size : {s.width, s.num_neurons, s.context_length})
        if (size < 1 || size > INT32_MAX) return false;
    if (s.max_rows < 1 || s.max_rows > MAX_ROWS) return false;
    if (s.num_tables < 1 || !s.table) return false;
    if (s.x_size < 0 || s.x_size > INT32_MAX) return false;
    for (int64_t size : s.own_size)
        if (size < 0 || size > INT32_MAX) return false;
    for (const HsTable* t = s.table; t < s.table + s.num_tables; ++t)
        if (!fits(*t, s.context_length) || t->num_sequences != s.table->num_sequences) return false;
    for (int32_t kind : {s.key_kind, s.value_kind})
        if (kind < 0 || kind >= NUM_CACHE_KINDS) return false;
    if (s.num_rotaries < 0 || s.num_rotaries > MAX_ROTARIES || (s.num_rotaries > 0 && !s.rotary))
        return false;
    for (int64_t i = 0; i < s.num_rotaries; ++i)
        if (!fits(s.rotary[i])) return false;
    if (s.num_layers < 0 || (s.num_layers > 0 && !s.layer)) return false;
    if (s.num_ops < 0 || (s.num_ops > 0 && !s.op)) return false;
    for (const HsMatrix& m : {s.embedding, s.head})
        if (m.data && !fits(m, m.num_rows, s.width)) return false;
    if (s.positions.data &&
        (s.positions.num_rows < s.context_length || !fits(s.positions, s.positions.num_rows, s.width)))
        return false;
    for (int64_t i = 0; i < s.num_layers; ++i)
        if (!fits(s.layer[i], s)) return false;
    for (int64_t i = 0; i < s.num_ops; ++i)
        if (!fits(s.op[i], s)) return false;
    return fits(s.select, s);
}

}  // namespace

EXPORT int64_t hs_step_bytes(const HsStep* step) {
    if (!fits(*step)) return -1;
    const Work work(*step, nullptr);
    return std::max(work.arena.used(), work.scratch + most_scratch(*step));
}

EXPORT void hs_part(void* data) {
    const HsPart& part = *static_cast<const HsPart*>(data);
    HsStep& whole = *part.step;
    const int64_t count = *part.num_rows, most = whole.max_rows;
    if (count <= most) {
        Step(whole).run(part);
        return;
    }
    // Rows of a shared value are as long as the part's layer needs.
    const HsOp& begin = whole.op[part.begin];
    const HsLayer* layer = begin.layer < whole.num_layers ? &whole.layer[begin.layer] : nullptr;
    float* logits = part.logits;
    for (int64_t first = 0; first < count; first += most) {
        const int64_t num_rows = std::min(count - first, most);
        HsStep step = whole;
        step.gate_bytes = step.up_bytes = step.down_bytes = 0;
        step.predictor_bytes = step.attention_bytes = 0;
        for (int32_t value = 0; value < NUM_VALUES; ++value)
            if (step.vector[value]) step.vector[value] += first * row_size(whole, layer, value);
        HsPart own = part;
        own.step = &step, own.row += first, own.num_rows = &num_rows, own.logits = logits;
        if (part.named)
            own.named += first * (((layer ? layer->feed_forward.num_neurons : 0) + 31) / 32);
        Step(step).run(own);
        for (const HsRow* row = own.row; logits && row < own.row + num_rows; ++row)
            logits += row->has_logits ? whole.head.num_rows : 0;
        whole.gate_bytes += step.gate_bytes, whole.up_bytes += step.up_bytes;
        whole.down_bytes += step.down_bytes, whole.predictor_bytes += step.predictor_bytes;
        whole.attention_bytes += step.attention_bytes;
    }
}

namespace {

// Room of the layers' states; nothing without any.
StateRooms state_rooms(const HsStep& s) {
    StateRooms found = {0, 0};
    for (const HsOp* op = s.op; op < s.op + s.num_ops; ++op) {
        const Operation* own = operation(op->kind);
        const StateRooms rooms = own ? own->rooms(op->weights) : StateRooms{0, 0};
        if (!rooms.slots) continue;
        const bool is_first = !found.slots;
        found.slots = is_first ? rooms.slots : std::min(found.slots, rooms.slots);
        found.kept = is_first ? rooms.kept : std::min(found.kept, rooms.kept);
    }
    return found;
}

// True if rows are all computed, and what they write is read by none of them and written once.
bool states_fit(const HsRow* row, int64_t count, const StateRooms& rooms) {
    auto begins = [=](int64_t i) { return i == 0 || row[i - 1].sequence != row[i].sequence; };
    for (int64_t i = 0; i < count; ++i) {
        const HsRow& r = row[i];
        if (r.source >= 0 || r.writes >= rooms.slots || r.keeps >= rooms.kept) return false;
        if (begins(i)) {
            if (r.reads >= rooms.slots || r.begins >= rooms.slots) return false;
            if (r.begins >= 0 && (r.begins == r.writes || !r.num_again)) return false;
            if (r.num_again < 0 || (r.num_again && (r.again < 0 || r.again > rooms.kept - r.num_again)))
                return false;
        }
        for (int64_t j = 0; j < count; ++j) {
            const HsRow& other = row[j];
            const int32_t begun = begins(j) ? other.begins : -1;
            for (int32_t slot : {r.writes, begins(i) ? r.begins : -1}) {
                if (slot < 0) continue;
                if (begins(j) && other.reads == slot) return false;
                if (j != i && (other.writes == slot || begun == slot)) return false;
            }
            if (r.keeps < 0) continue;
            const int64_t again = r.keeps - other.again;
            if (begins(j) && again >= 0 && again < other.num_again) return false;
            if (j != i && other.keeps == r.keeps) return false;
        }
    }
    return true;
}

// True if a row's sequence has the blocks that the row attends to, or its own alone.
bool has_blocks(const HsTable& t, const HsRow& r, bool is_next) {
    const int64_t own = r.position / t.block_length;
    const int64_t begin = t.window ? std::max<int64_t>(0, r.position + 1 - t.window) : 0;
    for (int64_t b = is_next ? own : begin / t.block_length; b <= own; ++b) {
        const int32_t block = t.block[r.sequence * t.blocks_per_sequence + b];
        if (block < 0 || block >= t.num_blocks) return false;
    }
    return true;
}

// Checks tokens, positions, sources, cache blocks and slots of the rows, and that the computed rows of
// each sequence are consecutive.
int32_t check_rows(const HsStep& s, const HsRow* row, int64_t count) {
    if (count < 1 || count > MAX_STEP_ROWS) return STATUS_BAD_ARGUMENT;
    const StateRooms rooms = state_rooms(s);
    if (rooms.slots && !states_fit(row, count, rooms)) return STATUS_BAD_ARGUMENT;
    int64_t num_tokens = s.embedding.num_rows, num_computed = 0;
    for (const HsOp* op = s.op; op < s.op + s.num_ops; ++op)
        if (const Operation* own = op->layer == s.num_layers ? operation(op->kind) : nullptr)
            num_tokens = std::min(num_tokens, own->num_tokens(op->weights));
    const HsRow* last = nullptr;          // the last computed row
    std::array<int32_t, MAX_ROWS> begun;  // the sequences seen so far
    int64_t num_begun = 0;
    for (int64_t i = 0; i < count; ++i) {
        const HsRow& r = row[i];
        if (r.token < 0 || r.token >= num_tokens) return STATUS_INDEX_OUT_OF_RANGE;
        if (r.position < 0 || r.position >= s.context_length) return STATUS_INDEX_OUT_OF_RANGE;
        if (r.sequence < 0 || r.sequence >= s.table->num_sequences) return STATUS_BAD_ARGUMENT;
        const bool is_next = i > 0 && row[i - 1].sequence == r.sequence;
        for (const HsTable* t = s.table; t < s.table + s.num_tables; ++t)
            if (!has_blocks(*t, r, is_next)) return STATUS_INDEX_OUT_OF_RANGE;
        if (r.source >= 0) {
            const bool is_copy = r.source < i && row[r.source].source < 0 && !r.has_logits &&
                                 row[r.source].position == r.position;
            if (!is_copy) return STATUS_BAD_ARGUMENT;
            continue;
        }
        if (++num_computed > s.max_rows) return STATUS_BAD_ARGUMENT;
        if (!last || last->sequence != r.sequence) {
            for (int64_t b = 0; b < num_begun; ++b)
                if (begun[b] == r.sequence) return STATUS_BAD_ARGUMENT;
            begun[num_begun++] = r.sequence;
        } else if (last->position + 1 != r.position) {
            return STATUS_BAD_ARGUMENT;
        }
        last = &r;
    }
    return num_computed ? STATUS_OK : STATUS_BAD_ARGUMENT;
}

}  // namespace

EXPORT int32_t hs_step(HsStep* step, const HsRow* row, int64_t count, float* logits) {
    const int32_t status = check_rows(*step, row, count);
    if (status == STATUS_OK) Step(*step).run(row, count, logits);
    return status;
}
