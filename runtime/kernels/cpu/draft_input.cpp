// The input of a draft block's layer; model/draft_block.py has the formula.
#include "operation.h"

struct HsDraftInput {
    HsMatrix join;                             // [D, 2 D]
    HsNorm norm_of_embedding, norm_of_hidden;  // [D]
};

namespace {

struct DraftInputRoom {
    DraftInputRoom(const HsDraftInput& l, Arena& arena, int64_t max_rows)
        : joined(arena.operand(l.join.num_columns, max_rows, form_bit(l.join))) {}

    Operand joined;
};

class DraftInput final : public OperationOf<HsDraftInput, DraftInputRoom> {
  public:
    DraftInput() : OperationOf("draft input", 2, 1) {}

    bool fits(const HsDraftInput& l, const OperationValues& v) const override {
        const int64_t D = v.written_size[0];
        return v.read_size[0] == D && v.read_size[1] == D && ::fits(l.join, D, 2 * D) &&
               l.norm_of_embedding.weight && l.norm_of_hidden.weight;
    }

    void compute(const HsDraftInput& l, DraftInputRoom& room,
                 const OperationCall& call) const override {
        const int64_t D = l.join.num_rows;
        call.rows(4 * D, [&](int64_t t) {
            float* joined = room.joined.row(t);
            apply(l.norm_of_embedding, call.read[0]->row(t), D, joined);
            apply(l.norm_of_hidden, call.read[1]->row(t), D, joined + D);
        });
        call.multiply(l.join, room.joined, call.written[0]->f32);
    }
};

const DraftInput draft_input;

}  // namespace
