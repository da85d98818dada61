// The planes of a row's hidden state, [P, D]; model/planes.py has the formulas, ops/planes.py the reference.
//
// Letters: P planes, D model width.
#include <cmath>

#include "operation.h"

// What chooses by the active plane.
struct HsPlaneRouter {
    HsNorm norm;      // [D]
    HsMatrix matrix;  // [P, D]
};

struct HsPredictPlanes {
    HsPlaneRouter router;
    const float* mix;  // [P P, P]
};

struct HsCorrectPlanes {
    HsPlaneRouter router;
    const float* mix;    // [P, P]
    const float* scale;  // [D]
};

struct HsAddToPlanes {
    int64_t num_planes;
};

// What makes the other planes from the first, or adds them to it.
struct HsPlaneEnds {
    const HsMatrix* other;  // [P - 1] matrices [D, D]
    int64_t num_planes;
};

namespace {

constexpr int64_t MOST_PLANES = 8;
constexpr float LEAST_SQUARE = 1e-5f;  // the least mean square that a magnitude is divided by

bool are_planes(int64_t P, int64_t D, int64_t size) {
    return P > 1 && P <= MOST_PLANES && D > 0 && size == P * D;
}

bool router_fits(const HsPlaneRouter& r, int64_t D, int64_t size) {
    const int64_t P = r.matrix.num_rows;
    return are_planes(P, D, size) && fits(r.matrix, P, D) && r.norm.weight;
}

struct RouterRoom {
    template <class Weights>
    RouterRoom(const Weights& l, Arena& arena, int64_t max_rows)
        : input(arena.operand(l.router.matrix.num_columns, max_rows, form_bit(l.router.matrix))),
          choice(arena.take<float>(max_rows * l.router.matrix.num_rows)) {}

    // The router's choice, by the first D values of each row of `x`.
    void choose(const HsPlaneRouter& router, const Operand& x, const OperationCall& call) {
        const int64_t P = router.matrix.num_rows, D = router.matrix.num_columns;
        call.rows(D, [&](int64_t t) {
            float* y = input.row(t);
            apply(router.norm, x.row(t), D, y);
            for (int64_t d = 0; d < D; ++d) y[d] /= static_cast<float>(D);
        });
        call.multiply(router.matrix, input, choice);
        for (float* c = choice; c < choice + call.num_rows * P; ++c) *c = std::tanh(*c);
    }

    Operand input;  // what the router reads
    float* choice;  // [max_rows, P]
};

// y = W x, of W [rows, columns].
void multiply_small(const float* weight, const float* x, int64_t rows, int64_t columns, float* y) {
    for (int64_t r = 0; r < rows; ++r) {
        y[r] = 0.0f;
        for (int64_t c = 0; c < columns; ++c) y[r] += weight[r * columns + c] * x[c];
    }
}

// Estimates the planes in place; copies the first to `active`.
class PredictPlanes final : public OperationOf<HsPredictPlanes, RouterRoom> {
  public:
    PredictPlanes() : OperationOf("predict planes", 1, 2) {}

    bool fits(const HsPredictPlanes& l, const OperationValues& v) const override {
        return router_fits(l.router, v.written_size[0], v.read_size[0]) && v.read[0] == v.written[1] &&
               l.mix;
    }

    void compute(const HsPredictPlanes& l, RouterRoom& room, const OperationCall& call) const override {
        const int64_t P = l.router.matrix.num_rows, D = l.router.matrix.num_columns;
        room.choose(l.router, *call.read[0], call);
        call.rows(2 * P * D, [&](int64_t t) {
            predict(l, P, D, room.choice + t * P, call.read[0]->row(t), call.written[0]->row(t));
        });
    }

  private:
    static void predict(const HsPredictPlanes& l, int64_t P, int64_t D, const float* choice, float* x,
                        float* active) {
        float mix[MOST_PLANES * MOST_PLANES];
        multiply_small(l.mix, choice, P * P, P, mix);
        for (int64_t d = 0; d < D; ++d) {
            float old[MOST_PLANES];
            for (int64_t i = 0; i < P; ++i) old[i] = x[i * D + d];
            for (int64_t i = 0; i < P; ++i) {
                float sum = 0.0f;
                for (int64_t j = 0; j < P; ++j) sum += mix[i * P + j] * old[j];
                x[i * D + d] = old[i] + sum;
            }
        }
        std::memcpy(active, x, D * sizeof(float));
    }
};

// Corrects the planes in place by what the layer made of the active one, which becomes the corrected one times
// the scale.
class CorrectPlanes final : public OperationOf<HsCorrectPlanes, RouterRoom> {
  public:
    CorrectPlanes() : OperationOf("correct planes", 2, 2) {}

    bool fits(const HsCorrectPlanes& l, const OperationValues& v) const override {
        return router_fits(l.router, v.read_size[0], v.read_size[1]) && v.read[0] == v.written[0] &&
               v.read[1] == v.written[1] && l.mix && l.scale;
    }

    void compute(const HsCorrectPlanes& l, RouterRoom& room, const OperationCall& call) const override {
        const int64_t P = l.router.matrix.num_rows, D = l.router.matrix.num_columns;
        room.choose(l.router, *call.read[0], call);
        call.rows(2 * P * D, [&](int64_t t) {
            correct(l, P, D, room.choice + t * P, call.read[1]->row(t), call.read[0]->row(t));
        });
    }

  private:
    static void correct(const HsCorrectPlanes& l, int64_t P, int64_t D, const float* choice, float* x,
                        float* active) {
        float share[MOST_PLANES];
        multiply_small(l.mix, choice, P, P, share);
        for (int64_t d = 0; d < D; ++d) {
            const float change = active[d] - x[d];
            for (int64_t i = 0; i < P; ++i) x[i * D + d] += (1.0f + share[i]) * change;
            active[d] = x[d] * l.scale[d];
        }
    }
};

// Adds a value to all planes but the first, in place.
class AddToPlanes final : public OperationOf<HsAddToPlanes, NoRoom> {
  public:
    AddToPlanes() : OperationOf("add to planes", 2, 1) {}

    bool fits(const HsAddToPlanes& l, const OperationValues& v) const override {
        return are_planes(l.num_planes, v.read_size[1], v.read_size[0]) && v.read[0] == v.written[0];
    }

    void compute(const HsAddToPlanes& l, NoRoom&, const OperationCall& call) const override {
        const int64_t P = l.num_planes, D = call.read[1]->size;
        call.rows(P * D, [&](int64_t t) {
            for (int64_t i = 1; i < P; ++i)
                kernels().add_to(call.read[0]->row(t) + i * D, call.read[1]->row(t), D);
        });
    }
};

float magnitude(const float* x, int64_t D, float least) {
    double sum = 0.0;
    for (int64_t d = 0; d < D; ++d) sum += static_cast<double>(x[d]) * x[d];
    const float mean = static_cast<float>(sum / static_cast<double>(D));
    return std::sqrt(mean < least ? least : mean);
}

// The factor that gives x the magnitude of `of`.
float like(const float* of, const float* x, int64_t D) {
    return magnitude(of, D, 0.0f) / magnitude(x, D, LEAST_SQUARE);
}

bool ends_fit(const HsPlaneEnds& e, int64_t D, int64_t size) {
    if (!are_planes(e.num_planes, D, size) || !e.other) return false;
    return std::all_of(e.other, e.other + e.num_planes - 1,
                       [=](const HsMatrix& m) { return fits(m, D, D); });
}

uint32_t forms_of_others(const HsPlaneEnds& e) {
    uint32_t forms = 0;
    for (int64_t i = 0; i < e.num_planes - 1; ++i) forms |= form_bit(e.other[i]);
    return forms;
}

struct EndsRoom {
    EndsRoom(const HsPlaneEnds& e, Arena& arena, int64_t max_rows)
        : plane(arena.operand(e.other->num_rows, max_rows, forms_of_others(e))),
          product(arena.take<float>(max_rows * e.other->num_rows)) {}

    Operand plane;   // one plane of each row
    float* product;  // [max_rows, D]
};

// All planes from the embedding, which is the first; the others have its magnitude.
class BeginPlanes final : public OperationOf<HsPlaneEnds, EndsRoom> {
  public:
    BeginPlanes() : OperationOf("begin planes", 1, 1) {}

    bool fits(const HsPlaneEnds& e, const OperationValues& v) const override {
        return ends_fit(e, v.read_size[0], v.written_size[0]);
    }

    uint32_t forms_of(const HsPlaneEnds& e, int) const override { return forms_of_others(e); }

    void compute(const HsPlaneEnds& e, EndsRoom& room, const OperationCall& call) const override {
        Operand &embedded = *call.read[0], &x = *call.written[0];
        const int64_t D = embedded.size;
        call.rows(D, [&](int64_t t) { std::copy_n(embedded.row(t), D, x.row(t)); });
        for (int64_t i = 1; i < e.num_planes; ++i) {
            call.multiply(e.other[i - 1], embedded, room.product);
            call.rows(4 * D, [&](int64_t t) {
                const float *y = room.product + t * D, factor = like(embedded.row(t), y, D);
                for (int64_t d = 0; d < D; ++d) x.row(t)[i * D + d] = factor * y[d];
            });
        }
    }
};

// One hidden state: the mean of the first plane and of products of the others with its magnitude.
class EndPlanes final : public OperationOf<HsPlaneEnds, EndsRoom> {
  public:
    EndPlanes() : OperationOf("end planes", 1, 1) {}

    bool fits(const HsPlaneEnds& e, const OperationValues& v) const override {
        return ends_fit(e, v.written_size[0], v.read_size[0]);
    }

    void compute(const HsPlaneEnds& e, EndsRoom& room, const OperationCall& call) const override {
        const Operand &x = *call.read[0], &out = *call.written[0];
        const int64_t D = out.size;
        call.rows(D, [&](int64_t t) { std::copy_n(x.row(t), D, out.row(t)); });
        for (int64_t i = 1; i < e.num_planes; ++i) {
            room.plane.changed();
            call.rows(D, [&](int64_t t) { std::copy_n(x.row(t) + i * D, D, room.plane.row(t)); });
            call.multiply(e.other[i - 1], room.plane, room.product);
            call.rows(4 * D, [&](int64_t t) {
                const float *y = room.product + t * D, factor = like(x.row(t), y, D);
                for (int64_t d = 0; d < D; ++d) out.row(t)[d] += factor * y[d];
            });
        }
        call.rows(D, [&](int64_t t) {
            for (float* y = out.row(t); y < out.row(t) + D; ++y) *y /= static_cast<float>(e.num_planes);
        });
    }
};

const PredictPlanes predict_planes;
const CorrectPlanes correct_planes;
const AddToPlanes add_to_planes;
const BeginPlanes begin_planes;
const EndPlanes end_planes;

}  // namespace
