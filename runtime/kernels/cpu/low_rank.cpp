// A product of low rank; model/low_rank.py has the formula.
#include "operation.h"

struct HsLowRank {
    HsMatrix left, right;  // [R, D], [D, R]
};

namespace {

struct LowRankRoom {
    LowRankRoom(const HsLowRank& l, Arena& arena, int64_t max_rows)
        : inner(arena.operand(l.left.num_rows, max_rows, form_bit(l.right))) {}

    Operand inner;
};

class LowRank final : public OperationOf<HsLowRank, LowRankRoom> {
  public:
    LowRank() : OperationOf("low rank", 1, 1) {}

    bool fits(const HsLowRank& l, const OperationValues& v) const override {
        const int64_t R = l.left.num_rows;
        return ::fits(l.left, R, v.read_size[0]) && ::fits(l.right, v.written_size[0], R);
    }

    uint32_t forms_of(const HsLowRank& l, int) const override { return form_bit(l.left); }

    void compute(const HsLowRank& l, LowRankRoom& room, const OperationCall& call) const override {
        call.multiply(l.left, *call.read[0], room.inner.f32);
        call.multiply(l.right, room.inner, call.written[0]->f32);
    }
};

const LowRank low_rank;

}  // namespace
