// The streams of a row's hidden state, [S, D]; model/streams.py has the formulas.
//
// Letters: S streams, D model width, R rank.
#include "operation.h"

struct HsStreamCount {
    int64_t num_streams;
};

// The mean of the streams that a block reads.
struct HsMeanOfStreams {
    HsMatrix input[2];  // down [R, S D], and inject [S, S D], without data for the head
    HsMatrix up;        // [S D, R]
    const float* norm;  // [S D]
    int64_t num_streams;
    float epsilon;
    int32_t unused;
};

namespace {

constexpr int64_t MOST_STREAMS = 8;

bool are_streams(int64_t S, int64_t D, int64_t size) {
    return S > 1 && S <= MOST_STREAMS && D > 0 && size == S * D;
}

// Copies of the embedding.
class BeginStreams final : public OperationOf<HsStreamCount, NoRoom> {
  public:
    BeginStreams() : OperationOf("begin streams", 1, 1) {}

    bool fits(const HsStreamCount& l, const OperationValues& v) const override {
        return are_streams(l.num_streams, v.read_size[0], v.written_size[0]);
    }

    void compute(const HsStreamCount& l, NoRoom&, const OperationCall& call) const override {
        const int64_t D = call.read[0]->size;
        call.rows(l.num_streams * D, [&](int64_t t) {
            for (int64_t s = 0; s < l.num_streams; ++s)
                std::copy_n(call.read[0]->row(t), D, call.written[0]->row(t) + s * D);
        });
    }
};

struct MeanRoom {
    MeanRoom(const HsMeanOfStreams& l, Arena& arena, int64_t max_rows)
        : normed(arena.operand(l.up.num_rows, max_rows, form_bit(l.input[0]) | form_bit(l.input[1]))),
          low(arena.operand(l.up.num_columns, max_rows, form_bit(l.up))),
          products(arena.take<float>(max_rows * (l.up.num_columns + l.num_streams))),
          weights(arena.take<float>(max_rows * l.up.num_rows)) {}

    Operand normed, low;  // [max_rows, S D], [max_rows, R]
    float* products;      // [max_rows, R + S], before their functions
    float* weights;       // [max_rows, S D], likewise
};

class MeanOfStreams final : public OperationOf<HsMeanOfStreams, MeanRoom> {
  public:
    MeanOfStreams(const char* kind, bool injects)
        : OperationOf(kind, 1, injects ? 2 : 1), injects(injects) {}

    bool fits(const HsMeanOfStreams& l, const OperationValues& v) const override {
        const int64_t S = l.num_streams, size = v.read_size[0], R = l.up.num_columns;
        return are_streams(S, v.written_size[0], size) && R > 0 && ::fits(l.input[0], R, size) &&
               ::fits(l.up, size, R) && l.norm && injects == (l.input[1].data != nullptr) &&
               (!injects || (::fits(l.input[1], S, size) && v.written_size[1] == S));
    }

    void compute(const HsMeanOfStreams& l, MeanRoom& room, const OperationCall& call) const override {
        const int64_t S = l.num_streams, size = l.up.num_rows, D = size / S, R = l.up.num_columns;
        const int64_t stride = R + (injects ? S : 0);
        const float share = 1.0f / static_cast<float>(S);
        call.rows(2 * size, [&](int64_t t) {
            const float* x = call.read[0]->row(t);
            for (int64_t s = 0; s < size; s += D)
                kernels().rms_norm(x + s, l.norm + s, l.epsilon, D, room.normed.row(t) + s);
        });
        call.multiply(l.input, injects ? 2 : 1, room.normed, room.products, stride);
        call.rows(16 * R, [&](int64_t t) {
            float *product = room.products + t * stride, *low = room.low.row(t);
            for (int64_t i = 0; i < stride; ++i) product[i] *= share;
            std::copy_n(product, R, low);
            kernels().gate_by(low, product, R);
            if (!injects) return;
            float* inject = call.written[1]->row(t);
            std::fill_n(inject, S, 2.0f);
            kernels().gate_by(inject, product + R, S);
        });
        call.multiply(l.up, room.low, room.weights);
        call.rows(16 * size, [&](int64_t t) {
            float *x = room.normed.row(t), *mean = call.written[0]->row(t);
            kernels().gate_by(x, room.weights + t * size, size);
            for (int64_t s = 1; s < S; ++s) kernels().add_to(x, x + s * D, D);
            for (int64_t d = 0; d < D; ++d) mean[d] = x[d] * share;
        });
    }

  private:
    const bool injects;
};

// Adds a block's output to the streams, in place.
class ToStreams final : public OperationOf<HsStreamCount, NoRoom> {
  public:
    explicit ToStreams(const char* kind) : OperationOf(kind, 3, 1) {}

    bool fits(const HsStreamCount& l, const OperationValues& v) const override {
        return are_streams(l.num_streams, v.read_size[1], v.read_size[0]) &&
               v.read_size[2] == l.num_streams && v.read[0] == v.written[0];
    }

    void compute(const HsStreamCount& l, NoRoom&, const OperationCall& call) const override {
        const int64_t S = l.num_streams, D = call.read[1]->size;
        call.rows(2 * S * D, [&](int64_t t) {
            float* x = call.read[0]->row(t);
            const float *y = call.read[1]->row(t), *inject = call.read[2]->row(t);
            for (int64_t s = 0; s < S; ++s, x += D)
                for (int64_t d = 0; d < D; ++d) x[d] += inject[s] * y[d];
        });
    }
};

const BeginStreams begin_streams;
const MeanOfStreams to_mixer("streams to mixer", true), to_neurons("streams to neurons", true),
    to_head("streams to head", false);
const ToStreams of_mixer("mixer to streams"), of_neurons("neurons to streams");

}  // namespace
