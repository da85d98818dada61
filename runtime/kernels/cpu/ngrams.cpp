// Embeddings of n-grams; model/ngrams.py has the formulas.
//
// Letters: N the longest n-gram, G rows of a token for each length, W values of a row, E = (N - 1) G W, S streams, D
// model width, J taps.
#include <cmath>

#include "state_spans.h"

struct HsNgramRows {
    HsMatrix table;                 // [rows, W]
    const uint64_t* multiplier;     // [N]
    const uint64_t *size, *offset;  // [(N - 1) G], of the rows of each
    float* state;                   // [num_slots, N - 1], ids of the latest tokens, one higher; 0: none
    float* kept;                    // [num_kept], likewise
    int64_t length, per_length, end_token, num_slots, num_kept;  // N, G
};

struct HsNgramInputs {
    HsMatrix key, value;                             // [S D, E], [D, E]
    const float *key_norm, *query_norm, *conv_norm;  // [S D]
    const float* conv;                               // [J, S D], oldest first
    float* state;                                    // [num_slots, (J - 1) N, S D], oldest first
    float* kept;                                     // [num_kept, S D]
    int64_t num_streams, num_taps, distance, num_slots, num_kept;  // S, J, N
    float epsilon;
    int32_t unused;
};

namespace {

constexpr int64_t MOST_LENGTH = 8, MOST_STREAMS = 8;
constexpr float LEAST_PRODUCT = 1e-6f;
constexpr float MOST_ID = 1 << 24;  // in a state, which a file may have given

struct RowsRoom {
    RowsRoom(const HsNgramRows&, Arena& arena, int64_t max_rows) : ids(arena.take<float>(max_rows)) {}

    float* ids;  // [max_rows], one higher
};

class NgramRows final : public OperationOf<HsNgramRows, RowsRoom> {
  public:
    NgramRows() : OperationOf("n-gram rows", 0, 1) {}

    bool fits(const HsNgramRows& l, const OperationValues& v) const override {
        const int64_t N = l.length, count = (N - 1) * l.per_length;
        if (N < 2 || N > MOST_LENGTH || count < 1 || !l.multiplier || !l.size || !l.offset || !l.state)
            return false;
        const auto rows = static_cast<uint64_t>(l.table.num_rows);
        for (int64_t i = 0; i < count; ++i)
            if (!l.size[i] || l.size[i] > rows || l.offset[i] > rows - l.size[i]) return false;
        return l.table.num_rows <= INT32_MAX && l.num_slots > 0 &&
               v.written_size[0] == count * l.table.num_columns &&
               has_shape(l.table, l.table.num_rows, l.table.num_columns) && l.end_token >= 0 &&
               fits_kept(l.kept, l.num_kept);
    }

    int64_t tokens_of(const HsNgramRows&) const override { return (int64_t{1} << 24) - 1; }

    StateRooms rooms_of(const HsNgramRows& l) const override { return {l.num_slots, l.num_kept}; }

    void compute(const HsNgramRows& l, RowsRoom& room, const OperationCall& call) const override {
        const int64_t G = l.per_length, W = l.table.num_columns;
        for (int64_t t = 0; t < call.num_rows; ++t) room.ids[t] = static_cast<float>(call.token[t] + 1);
        const RowHistory ids(l.state, l.kept, room.ids, 1, l.length - 1, 1, call);
        call.rows(4 * call.written[0]->size, [&](int64_t t) {
            float* y = call.written[0]->row(t);
            uint64_t mixed = static_cast<uint64_t>(call.token[t]) * l.multiplier[0];
            bool is_over = false;  // an end, or the text's beginning, is between
            for (int64_t j = 1; j < l.length; ++j) {
                const float* id = is_over ? nullptr : ids.at(t, j);
                int64_t before =
                    id && *id >= 1.0f && *id <= MOST_ID ? static_cast<int64_t>(*id) - 1 : -1;
                is_over = before < 0 || before == l.end_token;
                if (is_over) before = l.end_token;
                mixed ^= static_cast<uint64_t>(before) * l.multiplier[j];
                for (int64_t i = (j - 1) * G; i < j * G; ++i, y += W)
                    unpack_row(l.table, static_cast<int64_t>(l.offset[i] + mixed % l.size[i]), y);
            }
            ids.store(t);
        });
    }
};

struct InputsRoom {
    InputsRoom(const HsNgramInputs& l, Arena& arena, int64_t max_rows)
        : keys(arena.take<float>(max_rows * l.key.num_rows)),
          values(arena.take<float>(max_rows * l.value.num_rows)),
          gated(arena.take<float>(max_rows * l.key.num_rows)),
          convolved(arena.take<float>(max_rows * l.key.num_rows)) {}

    float* keys;       // [max_rows, S D], then what the convolution reads
    float* values;     // [max_rows, D]
    float* gated;      // [max_rows, S D], likewise
    float* convolved;  // [max_rows, S D]
};

class NgramInputs final : public OperationOf<HsNgramInputs, InputsRoom> {
  public:
    NgramInputs() : OperationOf("n-gram inputs", 2, 1) {}

    bool fits(const HsNgramInputs& l, const OperationValues& v) const override {
        const int64_t S = l.num_streams, size = v.read_size[0], E = v.read_size[1];
        return S > 0 && S <= MOST_STREAMS && size > 0 && size % S == 0 && v.read[0] == v.written[0] &&
               ::fits(l.key, size, E) && ::fits(l.value, size / S, E) && l.key_norm && l.query_norm &&
               l.conv_norm && l.conv && l.num_taps > 0 && l.num_taps <= MAX_TAPS && l.distance > 0 &&
               l.distance <= MOST_LENGTH && l.num_slots > 0 && l.num_slots <= INT32_MAX &&
               (l.state || l.num_taps == 1) && fits_kept(l.kept, l.num_kept);
    }

    uint32_t forms_of(const HsNgramInputs& l, int read) const override {
        return read == 1 ? form_bit(l.key) | form_bit(l.value) : 0;
    }

    StateRooms rooms_of(const HsNgramInputs& l) const override { return {l.num_slots, l.num_kept}; }

    void compute(const HsNgramInputs& l, InputsRoom& room, const OperationCall& call) const override {
        const int64_t S = l.num_streams, size = l.key.num_rows, D = size / S, J = l.num_taps;
        call.multiply(l.key, *call.read[1], room.keys);
        call.multiply(l.value, *call.read[1], room.values);
        call.rows(16 * size, [&](int64_t t) { gate(l, D, t, room, call.read[0]->row(t)); });
        const int64_t depth = (J - 1) * l.distance;
        const RowHistory inputs(l.state, l.kept, room.keys, size, depth, size, call);
        call.rows((J + 16) * size, [&](int64_t t) {
            float *y = room.convolved + t * size, *x = call.read[0]->row(t);
            std::fill_n(y, size, 0.0f);
            for (int64_t j = 0; j < J; ++j) {
                const float *c = inputs.at(t, (J - 1 - j) * l.distance), *factor = l.conv + j * size;
                for (int64_t i = 0; c && i < size; ++i) y[i] += factor[i] * c[i];
            }
            kernels().gate_by(y, y, size);
            kernels().add_to(x, room.gated + t * size, size);
            kernels().add_to(x, y, size);
            inputs.store(t);
        });
    }

  private:
    // The gated values of row t and, in place of its keys, their norm.
    static void gate(const HsNgramInputs& l, int64_t D, int64_t t, const InputsRoom& room,
                     const float* x) {
        const int64_t S = l.num_streams;
        float *key = room.keys + t * S * D, *gated = room.gated + t * S * D;
        const float* value = room.values + t * D;
        float product[MOST_STREAMS];
        for (int64_t s = 0; s < S; ++s) {
            float *k = key + s * D, *q = gated + s * D;
            kernels().rms_norm(k, l.key_norm + s * D, l.epsilon, D, k);
            kernels().rms_norm(x + s * D, l.query_norm + s * D, l.epsilon, D, q);
            double sum = 0.0;
            for (int64_t d = 0; d < D; ++d) sum += static_cast<double>(k[d]) * q[d];
            const float r = static_cast<float>(sum / std::sqrt(static_cast<double>(D)));
            const float root = std::sqrt(std::max(std::fabs(r), LEAST_PRODUCT));
            product[s] = r > 0.0f ? root : r < 0.0f ? -root : 0.0f * r;
        }
        float gates[MOST_STREAMS];
        std::fill_n(gates, S, 1.0f);
        kernels().gate_by(gates, product, S);
        for (int64_t s = 0; s < S; ++s) {
            float *k = key + s * D, *g = gated + s * D;
            for (int64_t d = 0; d < D; ++d) g[d] = gates[s] * value[d];
            kernels().rms_norm(g, l.conv_norm + s * D, l.epsilon, D, k);
        }
    }
};

const NgramRows ngram_rows;
const NgramInputs ngram_inputs;

}  // namespace
