// Gated short convolutions; model/short_conv.py has the formula. Each value of a row is computed in the same order
// whatever rows are beside it.
#include "state_spans.h"

struct HsShortConv {
    HsMatrix input, output;       // [3 D, D], [D, D]
    const float* conv;            // [J, D], oldest first
    float* state;                 // [num_slots, J - 1, D], the inputs of the last tokens, oldest first
    float* kept;                  // [num_kept, D], inputs of rows
    int64_t num_taps, num_slots;  // J
    int64_t num_kept;
};

namespace {

struct ShortConvRoom {
    ShortConvRoom(const HsShortConv& l, Arena& arena, int64_t max_rows)
        : projected(arena.take<float>(max_rows * l.input.num_rows)),
          mixed(arena.operand(l.output.num_columns, max_rows, form_bit(l.output))) {}

    float* projected;  // [max_rows, 3 D] b, c and u; then the convolution's inputs in place of b
    Operand mixed;
};

class ShortConv final : public OperationOf<HsShortConv, ShortConvRoom> {
  public:
    ShortConv() : OperationOf("short conv", 1, 1) {}

    bool fits(const HsShortConv& l, const OperationValues& v) const override {
        const int64_t D = l.output.num_columns;
        return D > 0 && D <= INT32_MAX && l.num_taps > 0 && l.num_taps <= MAX_TAPS && l.num_slots > 0 &&
               l.num_slots <= INT32_MAX && ::fits(l.input, 3 * D, v.read_size[0]) &&
               ::fits(l.output, v.written_size[0], D) && l.conv && (l.state || l.num_taps == 1) &&
               fits_kept(l.kept, l.num_kept);
    }

    uint32_t forms_of(const HsShortConv& l, int) const override { return form_bit(l.input); }

    StateRooms rooms_of(const HsShortConv& l) const override { return {l.num_slots, l.num_kept}; }

    void compute(const HsShortConv& l, ShortConvRoom& room, const OperationCall& call) const override {
        const int64_t D = l.output.num_columns, J = l.num_taps;
        call.multiply(l.input, *call.read[0], room.projected);
        call.ended(TIMED_INPUTS);
        call.rows(2 * D, [&](int64_t t) {
            float* b = room.projected + t * 3 * D;
            const float* u = b + 2 * D;
            for (int64_t d = 0; d < D; ++d) b[d] *= u[d];
        });
        const RowHistory inputs(l.state, l.kept, room.projected, 3 * D, J - 1, D, call);
        call.rows((J + 2) * D, [&](int64_t t) {
            float* y = room.mixed.row(t);
            std::fill_n(y, D, 0.0f);
            for (int64_t j = 0; j < J; ++j) {
                const float *x = inputs.at(t, J - 1 - j), *factor = l.conv + j * D;
                for (int64_t d = 0; x && d < D; ++d) y[d] += factor[d] * x[d];
            }
            const float* c = room.projected + t * 3 * D + D;
            for (int64_t d = 0; d < D; ++d) y[d] *= c[d];
            inputs.store(t);
        });
        call.ended(TIMED_ATTEND);
        call.show_heads(room.mixed);
        call.multiply(l.output, room.mixed, call.written[0]->f32);
        call.ended(TIMED_OUTPUT);
    }
};

const ShortConv short_conv;

}  // namespace
