// The products around experts that read a latent; model/latent_experts.py has the formulas.
#include "operation.h"

struct HsLatentProduct {
    HsMatrix matrix;
};

namespace {

class LatentProduct final : public OperationOf<HsLatentProduct, NoRoom> {
  public:
    explicit LatentProduct(const char* kind) : OperationOf(kind, 1, 1) {}

    bool fits(const HsLatentProduct& l, const OperationValues& v) const override {
        return ::fits(l.matrix, v.written_size[0], v.read_size[0]);
    }

    uint32_t forms_of(const HsLatentProduct& l, int) const override { return form_bit(l.matrix); }

    void compute(const HsLatentProduct& l, NoRoom&, const OperationCall& call) const override {
        call.multiply(l.matrix, *call.read[0], call.written[0]->f32);
    }
};

const LatentProduct to_latent("to latent"), from_latent("from latent");

}  // namespace
