// Mamba-2; model/mamba2.py has the formula. A job is a head of one sequence, through all of the sequence's rows in the
// pass; kernels().mamba2_head has the arithmetic.
#include "state_spans.h"

// Letters: H heads, P values of a head, G groups, N values of a state, J taps, C = H P + 2 G N channels.
struct HsMamba2 {
    HsMatrix input, output;         // [H P + C + H, D] z, inputs of the convolution, steps; [D, H P]
    HsNorm norm;                    // [H P], of the values of each group; without weights: none
    const float *conv, *conv_bias;  // [J, C], oldest first; [C]
    const float *decay, *step_bias, *skip;  // [H]
    float* state;                           // [num_slots, H, N, P]
    float* inputs;                          // [num_slots, J - 1, C], of the last tokens, oldest first
    float* kept;                            // [num_kept, C + H], what the recurrence reads of rows
    int64_t num_heads, head_width, num_groups, state_width, num_taps, num_slots, num_kept;
};

namespace {

int64_t mamba2_outputs(const HsMamba2& l) { return l.num_heads * l.head_width; }
int64_t mamba2_channels(const HsMamba2& l) {
    return mamba2_outputs(l) + 2 * l.num_groups * l.state_width;
}

struct Mamba2Room {
    Mamba2Room(const HsMamba2& l, Arena& arena, int64_t max_rows)
        : projected(arena.take<float>(max_rows * l.input.num_rows)),
          heads(arena.operand(mamba2_outputs(l), max_rows, form_bit(l.output))) {}

    float* projected;  // [max_rows, H P + C + H]
    Operand heads;
};

// From the rows' projections to their heads' outputs, times their gates.
void run_mamba2(const HsMamba2& l, const Mamba2Room& room, const OperationCall& call) {
    const int64_t H = l.num_heads, P = l.head_width, G = l.num_groups, N = l.state_width;
    const int64_t of_state = H * N * P, C = mamba2_channels(l), of_kept = C + H;
    const float* x = room.projected + H * P;
    std::array<int64_t, MAX_ROWS + 1> begin;
    const int64_t num_runs = call.runs(begin);
    auto run_head = [&](int64_t h, int64_t t0, int64_t t1) {
        Mamba2Head head = {};
        head.head = h, head.group = h / (H / G), head.stores_group = h % (H / G) == 0;
        head.H = H, head.G = G, head.N = N, head.P = P;
        head.J = l.num_taps, head.C = C, head.R = of_kept;
        head.conv = l.conv, head.conv_bias = l.conv_bias;
        head.decay = l.decay, head.step_bias = l.step_bias, head.skip = l.skip;
        head.scratch = thread_scratch(mamba2_scratch(N, P));
        head.x = x, head.x_stride = l.input.num_rows;
        head.y = room.heads.row(0) + h * P, head.y_stride = room.heads.size;
        for_state_spans(head, {l.state, l.inputs, l.kept, of_state}, h * N * P, call.row, t0, t1,
                        kernels().mamba2_head);
    };
    const int64_t bytes = (num_runs + call.num_rows) * of_state * static_cast<int64_t>(sizeof(float));
    split(bytes, num_runs * H, 1, 8, [&](int64_t i0, int64_t i1) {
        for (int64_t i = i0; i < i1; ++i) run_head(i % H, begin[i / H], begin[i / H + 1]);
    });
    call.rows(H * P, [&](int64_t t) {
        const int64_t width = H * P / G;
        float* y = room.heads.row(t);
        for (int64_t g = 0; l.norm.weight && g < G; ++g)
            kernels().rms_norm(y + g * width, l.norm.weight + g * width, l.norm.epsilon, width,
                               y + g * width);
        if (const int32_t keeps = call.row[t].keeps; keeps >= 0)
            std::copy_n(x + t * l.input.num_rows, of_kept, l.kept + keeps * of_kept);
    });
}

class Mamba2 final : public OperationOf<HsMamba2, Mamba2Room> {
  public:
    Mamba2() : OperationOf("mamba2", 1, 1) {}

    bool fits(const HsMamba2& l, const OperationValues& v) const override {
        for (int64_t size : {l.num_heads, l.num_groups, l.num_slots})
            if (size < 1 || size > INT32_MAX) return false;
        for (int64_t width : {l.head_width, l.state_width})
            if (width < 1 || width > MAX_HEAD_WIDTH) return false;
        if (l.num_heads % l.num_groups || l.num_taps < 1 || l.num_taps > MAX_TAPS) return false;
        const int64_t outputs = mamba2_outputs(l);
        return ::fits(l.input, outputs + mamba2_channels(l) + l.num_heads, v.read_size[0]) &&
               ::fits(l.output, v.written_size[0], outputs) && !l.norm.bias && l.conv && l.conv_bias &&
               l.decay && l.step_bias && l.skip && l.state && (l.inputs || l.num_taps == 1) &&
               fits_kept(l.kept, l.num_kept);
    }

    uint32_t forms_of(const HsMamba2& l, int) const override { return form_bit(l.input); }

    StateRooms rooms_of(const HsMamba2& l) const override { return {l.num_slots, l.num_kept}; }

    void compute(const HsMamba2& l, Mamba2Room& room, const OperationCall& call) const override {
        call.multiply(l.input, *call.read[0], room.projected);
        call.ended(TIMED_INPUTS);
        run_mamba2(l, room, call);
        call.ended(TIMED_ATTEND);
        call.show_heads(room.heads);
        call.multiply(l.output, room.heads, call.written[0]->f32);
        call.ended(TIMED_OUTPUT);
    }
};

const Mamba2 mamba2;

}  // namespace
