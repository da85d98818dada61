// What an assistant reads of its main model, and what it hands to its next guess; model/assistant.py
// has the formulas.
#include "operation.h"

struct HsAssistantInput {
    HsMatrix projection;  // [D, 2 M]
};

struct HsAssistantOutput {
    HsMatrix projection;  // [M, D]
    HsNorm norm;          // [D]
};

namespace {

class AssistantInput final : public OperationOf<HsAssistantInput, NoRoom> {
  public:
    AssistantInput() : OperationOf("assistant input", 2, 1) {}

    bool fits(const HsAssistantInput& l, const OperationValues& v) const override {
        return v.read_size[0] == v.written_size[0] &&
               ::fits(l.projection, v.written_size[0], v.read_size[1]);
    }

    uint32_t forms_of(const HsAssistantInput& l, int read) const override {
        return read == 1 ? form_bit(l.projection) : 0;
    }

    void compute(const HsAssistantInput& l, NoRoom&, const OperationCall& call) const override {
        call.multiply(l.projection, *call.read[1], call.written[0]->f32);
    }
};

struct OutputRoom {
    OutputRoom(const HsAssistantOutput& l, Arena& arena, int64_t max_rows)
        : normed(arena.operand(l.projection.num_columns, max_rows, form_bit(l.projection))) {}

    Operand normed;
};

class AssistantOutput final : public OperationOf<HsAssistantOutput, OutputRoom> {
  public:
    AssistantOutput() : OperationOf("assistant output", 1, 2) {}

    bool fits(const HsAssistantOutput& l, const OperationValues& v) const override {
        return v.read_size[0] == v.written_size[0] &&
               ::fits(l.projection, v.written_size[1], v.read_size[0]) && l.norm.weight;
    }

    void compute(const HsAssistantOutput& l, OutputRoom& room,
                 const OperationCall& call) const override {
        const int64_t D = l.projection.num_columns;
        call.rows(2 * D, [&](int64_t t) {
            apply(l.norm, call.read[0]->row(t), D, room.normed.row(t));
            std::copy_n(room.normed.row(t), D, call.written[0]->row(t));
        });
        call.multiply(l.projection, room.normed, call.written[1]->f32);
    }
};

const AssistantInput assistant_input;
const AssistantOutput assistant_output;

}  // namespace
