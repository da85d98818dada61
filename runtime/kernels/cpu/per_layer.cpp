// The inputs that layers have of their own, and what a layer makes of its; model/per_layer.py has the formulas.
// Value `per_layer` has those of all layers, [T, L, P] of the T rows of a step.
//
// Letters: L layers, P values of an input, V vocabulary, D model width.
#include <cmath>

#include "gate.h"
#include "operation.h"

struct HsLayerInputs {
    HsMatrix table, projection;  // [V, L P], [L P, D]
    HsNorm norm;                 // [P]
    int64_t size;                // P
};

struct HsPerLayer {
    HsMatrix gate, output;  // [P, D], [D, P]
    HsGate rule;
    int32_t index;  // of the layer's input
};

namespace {

struct InputsRoom {
    InputsRoom(const HsLayerInputs& l, Arena& arena, int64_t max_rows)
        : projected(arena.take<float>(max_rows * l.projection.num_rows)),
          of_token(arena.take<float>(max_rows * l.projection.num_rows)) {}

    float *projected, *of_token;  // [max_rows, L P]
};

class LayerInputs final : public OperationOf<HsLayerInputs, InputsRoom> {
  public:
    LayerInputs() : OperationOf("layer inputs", 1, 1) {}

    bool fits(const HsLayerInputs& l, const OperationValues& v) const override {
        const int64_t size = v.written_size[0];
        return size > 0 && l.size > 0 && size % l.size == 0 &&
               has_shape(l.table, l.table.num_rows, size) &&
               ::fits(l.projection, size, v.read_size[0]) && l.norm.weight && !l.norm.bias;
    }

    uint32_t forms_of(const HsLayerInputs& l, int) const override { return form_bit(l.projection); }

    int64_t tokens_of(const HsLayerInputs& l) const override { return l.table.num_rows; }

    // (norm(D^-1/2 projection) + sqrt(P) row of the token) / sqrt(2), for each layer.
    void compute(const HsLayerInputs& l, InputsRoom& room, const OperationCall& call) const override {
        const int64_t size = l.projection.num_rows, P = l.size, L = size / P;
        const float shrink = 1.0f / std::sqrt(static_cast<float>(l.projection.num_columns));
        const float grow = std::sqrt(static_cast<float>(P)), half = std::sqrt(0.5f);
        float* out = call.written[0]->f32;
        call.multiply(l.projection, *call.read[0], room.projected);
        call.rows(8 * size, [&](int64_t t) {
            float *own = room.projected + t * size, *token = room.of_token + t * size;
            unpack_row(l.table, call.token[t], token);
            for (int64_t i = 0; i < size; ++i) own[i] *= shrink;
            for (int64_t i = 0; i < L; ++i) {
                float* y = out + t * size + i * P;
                apply(l.norm, own + i * P, P, y);
                for (int64_t p = 0; p < P; ++p) y[p] = half * (y[p] + grow * token[i * P + p]);
            }
        });
    }
};

struct PerLayerRoom {
    PerLayerRoom(const HsPerLayer& l, Arena& arena, int64_t max_rows)
        : inner(arena.operand(l.gate.num_rows, max_rows, form_bit(l.output))) {}

    Operand inner;
};

class PerLayer final : public OperationOf<HsPerLayer, PerLayerRoom> {
  public:
    PerLayer() : OperationOf("per layer", 2, 1) {}

    bool fits(const HsPerLayer& l, const OperationValues& v) const override {
        const int64_t P = l.gate.num_rows, size = v.read_size[1];
        const Gate gate{l.rule};
        return P > 0 && ::fits(l.gate, P, v.read_size[0]) && ::fits(l.output, v.written_size[0], P) &&
               l.index >= 0 && size % P == 0 && l.index < size / P && gate.is_valid() &&
               !gate.needs_all() && !gate.turns_ups();
    }

    uint32_t forms_of(const HsPerLayer& l, int read) const override {
        return read == 0 ? form_bit(l.gate) : 0;
    }

    void compute(const HsPerLayer& l, PerLayerRoom& room, const OperationCall& call) const override {
        const int64_t P = l.gate.num_rows, size = call.read[1]->size;
        const Gate gate{l.rule};
        const float* inputs = call.read[1]->f32 + l.index * P;
        call.multiply(l.gate, *call.read[0], room.inner.f32);
        call.rows(16 * P, [&](int64_t t) {
            float* y = room.inner.row(t);
            const float* own = inputs + t * size;
            gate.smooth(y, P);
            for (int64_t p = 0; p < P; ++p) gate.act(y[p]), y[p] *= own[p];
        });
        call.multiply(l.output, room.inner, call.written[0]->f32);
    }
};

const LayerInputs layer_inputs;
const PerLayer per_layer;

}  // namespace
