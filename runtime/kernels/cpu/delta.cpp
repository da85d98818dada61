// Gated delta nets; model/delta_net.py has the formula. A job is a head of one sequence, through all of the
// sequence's rows in the pass; kernels().delta_head has the arithmetic.
#include "state_spans.h"

// A gated delta net; model/delta_net.py has the formula. Letters: G key heads, V value heads, N and M values of a
// key and of a value head, A decays of a value head, J taps, C = 2 G N + V M channels, R rank.
struct HsDelta {
    // [C, D] of the convolution's inputs, [V, D] of beta, [V, D] of the decay, [V M, D] of the output's gates; if it is
    // by row, [G N, D] of queries, [G N, D] of keys, [V M, D] of values, [V, D] of beta
    HsMatrix input[4];
    HsMatrix low[2], high[2];  // if it is by row: [R, D], and [V A, R] of decays, [V M, R] of gates
    HsMatrix output;           // [D, V M]
    HsNorm norm;               // [M]
    const float *conv, *decay, *step_bias;  // [J, C], oldest first; [V]; [V, A]
    float* state;                           // [num_slots, V, N, M]
    float* inputs;                          // [num_slots, J - 1, C], of the last tokens, oldest first
    float* kept;  // [num_kept, C + V + V A], what the recurrence reads of rows
    int64_t num_key_heads, num_value_heads;
    int64_t key_width, value_width, num_taps, num_slots, num_kept;
    int32_t is_grouped;  // value head h reads key head h / (V / G), else h % G
    int32_t is_by_row;   // Kimi Delta Attention: A = N, else A = 1 (DeltaHead)
    // If it is not by row: gates by sigmoid, and the norm's weights are those of the model / PASSING_GATE.
    int32_t has_sigmoid_gates, unused;
};

// kernels().delta_head multiplies by SiLU of gates. That of this one is itself, since its sigmoid is 1 in f32, so that
// sigmoids can multiply afterwards; as a power of two it changes no bit of the norm's weights.
constexpr float PASSING_GATE = 32.0f;

namespace {

int64_t delta_channels(const HsDelta& l) {
    return 2 * l.num_key_heads * l.key_width + l.num_value_heads * l.value_width;
}
int64_t delta_outputs(const HsDelta& l) { return l.num_value_heads * l.value_width; }
int64_t delta_decays(const HsDelta& l) { return l.num_value_heads * (l.is_by_row ? l.key_width : 1); }
int64_t delta_kept(const HsDelta& l) { return delta_channels(l) + l.num_value_heads + delta_decays(l); }
// Values of a row's projections: what may be kept (inputs of the convolution, beta, alpha), and gates of the output.
int64_t delta_inputs(const HsDelta& l) { return delta_kept(l) + delta_outputs(l); }

struct DeltaRoom {
    DeltaRoom(const HsDelta& l, Arena& arena, int64_t max_rows)
        : projected(arena.take<float>(max_rows * delta_inputs(l))),
          heads(arena.operand(delta_outputs(l), max_rows, form_bit(l.output))) {
        for (int m = 0; l.is_by_row && m < 2; ++m)
            low[m] = arena.operand(l.low[m].num_rows, max_rows, form_bit(l.high[m]));
        gates = arena.take<float>(l.has_sigmoid_gates ? max_rows * delta_outputs(l) : 0);
    }

    float* projected;       // [max_rows, delta_inputs]
    Operand heads, low[2];  // low: [max_rows, R]
    float* gates;           // [max_rows, V M], whose sigmoids multiply
};

// From the rows' projections to their heads' outputs.
void run_delta(const HsDelta& l, const DeltaRoom& room, const OperationCall& call) {
    const int64_t T = call.num_rows, V = l.num_value_heads, N = l.key_width, M = l.value_width;
    const int64_t of_state = V * N * M, of_kept = delta_kept(l);
    const float* x = room.projected;
    const HsRow* row = call.row;
    std::array<int64_t, MAX_ROWS + 1> begin;
    const int64_t num_runs = call.runs(begin);
    // Runs one head of rows t0 .. t1-1.
    auto run_head = [&](int64_t h, int64_t t0, int64_t t1) {
        DeltaHead head = {};
        const int64_t of_key = V / l.num_key_heads;  // value heads
        head.value_head = h, head.key_head = l.is_grouped ? h / of_key : h % l.num_key_heads;
        head.stores_key = l.is_grouped ? h % of_key == 0 : h < l.num_key_heads;
        head.G = l.num_key_heads, head.V = V, head.N = N, head.M = M;
        head.J = l.num_taps, head.C = delta_channels(l), head.R = of_kept;
        head.conv = l.conv, head.decay = l.decay, head.step_bias = l.step_bias;
        head.norm = l.norm.weight, head.epsilon = l.norm.epsilon, head.is_by_row = l.is_by_row;
        head.scratch = thread_scratch(delta_scratch(N, M));
        head.x = x, head.x_stride = delta_inputs(l);
        head.y = room.heads.row(0) + h * M, head.y_stride = room.heads.size;
        for_state_spans(head, {l.state, l.inputs, l.kept, of_state}, h * N * M, row, t0, t1,
                        kernels().delta_head);
    };
    const int64_t bytes = (num_runs + T) * of_state * static_cast<int64_t>(sizeof(float));
    split(bytes, num_runs * V, 1, 8, [&](int64_t i0, int64_t i1) {
        for (int64_t i = i0; i < i1; ++i) run_head(i % V, begin[i / V], begin[i / V + 1]);
    });
    call.rows(of_kept, [&](int64_t t) {
        if (row[t].keeps < 0) return;
        std::copy_n(x + t * delta_inputs(l), of_kept, l.kept + row[t].keeps * of_kept);
    });
}

class DeltaNet final : public OperationOf<HsDelta, DeltaRoom> {
  public:
    DeltaNet() : OperationOf("delta", 1, 1) {}

    bool fits(const HsDelta& l, const OperationValues& v) const override {
        for (int64_t size : {l.num_key_heads, l.num_value_heads, l.num_slots})
            if (size < 1 || size > INT32_MAX) return false;
        for (int64_t width : {l.key_width, l.value_width})
            if (width < 1 || width > MAX_HEAD_WIDTH) return false;
        if (l.num_value_heads % l.num_key_heads || l.num_taps < 1 || l.num_taps > MAX_TAPS)
            return false;
        const int64_t V = l.num_value_heads, D = v.read_size[0], keys = l.num_key_heads * l.key_width;
        const int64_t whole[] = {delta_channels(l), V, V, delta_outputs(l)},
                      by_row[] = {keys, keys, delta_outputs(l), V},
                      high[] = {delta_decays(l), delta_outputs(l)};
        for (int m = 0; m < 4; ++m)
            if (!::fits(l.input[m], (l.is_by_row ? by_row : whole)[m], D)) return false;
        for (int m = 0; l.is_by_row && m < 2; ++m)
            if (const int64_t R = l.low[m].num_rows;
                R < 1 || !::fits(l.low[m], R, D) || !::fits(l.high[m], high[m], R))
                return false;
        return ::fits(l.output, v.written_size[0], delta_outputs(l)) && l.norm.weight && !l.norm.bias &&
               l.conv && l.decay && l.step_bias && l.state && (l.inputs || l.num_taps == 1) &&
               fits_kept(l.kept, l.num_kept);
    }

    uint32_t forms_of(const HsDelta& l, int) const override {
        uint32_t forms = 0;
        for (const HsMatrix& m : l.input) forms |= form_bit(m);
        for (int m = 0; l.is_by_row && m < 2; ++m) forms |= form_bit(l.low[m]);
        return forms;
    }

    StateRooms rooms_of(const HsDelta& l) const override { return {l.num_slots, l.num_kept}; }

    void compute(const HsDelta& l, DeltaRoom& room, const OperationCall& call) const override {
        const int64_t stride = delta_inputs(l), alpha = delta_channels(l) + l.num_value_heads;
        call.multiply(l.input, 4, *call.read[0], room.projected, stride);
        for (int m = 0; l.is_by_row && m < 2; ++m) {
            call.multiply(l.low[m], *call.read[0], room.low[m].f32);
            call.multiply(&l.high[m], 1, room.low[m], room.projected + (m ? delta_kept(l) : alpha),
                          stride);
        }
        call.ended(TIMED_INPUTS);
        const int64_t size = delta_outputs(l);
        if (l.has_sigmoid_gates)
            call.rows(2 * size, [&](int64_t t) {
                float* own = room.projected + t * stride + delta_kept(l);
                std::copy_n(own, size, room.gates + t * size);
                std::fill_n(own, size, PASSING_GATE);
            });
        run_delta(l, room, call);
        if (l.has_sigmoid_gates)
            call.rows(16 * size, [&](int64_t t) {
                kernels().gate_by(room.heads.row(t), room.gates + t * size, size);
            });
        call.ended(TIMED_ATTEND);
        call.show_heads(room.heads);
        call.multiply(l.output, room.heads, call.written[0]->f32);
        call.ended(TIMED_OUTPUT);
    }
};

const DeltaNet delta_net;

}  // namespace
