// The low-rank projections of latent attention (MLA; DeepSeek-V2, arXiv 2405.04434), in the absorbed form: queries are
// multiplied by each head's part of the key's second matrix, so that the heads attend to the latents themselves, and
// each head's sum of latents by its part of the value's. Latent of src/hotsplit/model/latent.py has the formulas.
//
// Letters: T tokens, H heads, N and P values of a head's query that do not rotate and that do, C values of a latent,
// V values of a head's output, R rank of queries, W = P + C.
#pragma once
#include "operation.h"

class LatentProjections {
  public:
    LatentProjections(const HsStep& step, Arena& arena) : most_rows(step.max_rows) {
        int64_t most_low = 0, most_rank = 0, most_query = 0, most_values = 0, most_packed = 0;
        uint32_t rank_forms = 0, value_forms = 0;
        for (const HsLayer* layer = step.layer; layer < step.layer + step.num_layers; ++layer) {
            const HsAttention& l = layer->attention;
            if (!l.latent) continue;
            const HsLatent& a = *l.latent;
            most_low = std::max(most_low, low_size(l));
            most_rank = std::max(most_rank, a.query.num_columns);
            most_query = std::max(most_query, a.query.num_rows);
            most_values = std::max(most_values, a.value.num_rows);
            rank_forms |= form_bit(a.query), value_forms |= form_bit(l.output);
            for (const HsMatrix& m : {a.key, a.value})
                if (form_bit(m))
                    most_packed =
                        std::max(most_packed, vectors_at_once(l) * packed_room(m.num_columns));
        }
        low = arena.take<float>(most_rows * most_low);
        rank = arena.operand(most_rank, most_rows, rank_forms);
        query = arena.take<float>(most_rows * most_query);
        values = arena.operand(most_values, most_rows, value_forms);
        packed = arena.take<uint8_t>(most_packed);
    }

    // Writes absorbed queries and the key of each row: qkv [T, H W + W], in each head the values that rotate first.
    void project(const HsAttention& l, Operand& x, int64_t T, float* qkv) {
        const HsLatent& a = *l.latent;
        const int64_t H = l.num_heads, W = l.head_dim, C = l.value_width, P = W - C;
        const int64_t N = a.key.num_columns, L = low_size(l), S = H * W + W;
        multiply(l.input, 2, x, T, low, L);
        const float* queries = low;
        int64_t stride = L;
        if (a.query.data) {
            const int64_t R = a.query.num_columns;
            rank.size = R, rank.changed();
            for_rows(T, 2 * R, [&](int64_t t) { apply(a.query_norm, low + t * L, R, rank.row(t)); });
            multiply(&a.query, 1, rank, T, query, a.query.num_rows);
            queries = query, stride = a.query.num_rows;
        }
        for_rows(T, 4 * S, [&](int64_t t) {
            const float *own = queries + t * stride, *latent = low + t * L + l.input[0].num_rows;
            float* to = qkv + t * S;
            for (int64_t h = 0; h < H; ++h) std::copy_n(own + h * (N + P) + N, P, to + h * W);
            std::copy_n(latent + C, P, to + H * W);
            apply(a.key_norm, latent, C, to + H * W + P);
        });
        multiply_heads(a.key, l, T, {queries, stride, N + P}, {qkv + P, S, W});
    }

    // The outputs of the heads [T, H V] from their sums of latents [T, H C].
    Operand& outputs(const HsAttention& l, const Operand& heads, int64_t T) {
        const HsMatrix& m = l.latent->value;
        const int64_t C = l.value_width, V = m.num_rows / l.num_heads;
        values.size = m.num_rows, values.changed();
        multiply_heads(m, l, T, {heads.f32, heads.size, C}, {values.f32, values.size, V});
        return values;
    }

  private:
    // Vectors of each row and head: row t of head h begins at data + t * row + h * head.
    template <class Float>
    struct Vectors {
        Float* data;
        int64_t row, head;
    };

    // Outputs of the two matrices that multiply a layer's input.
    static int64_t low_size(const HsAttention& l) { return l.input[0].num_rows + l.input[1].num_rows; }

    // Vectors that are packed together: of all heads for a row, of one head for most rows.
    int64_t vectors_at_once(const HsAttention& l) const { return std::max(most_rows, l.num_heads); }

    // y of each head and row = the head's rows of the matrix times x of the head and row.
    void multiply_heads(const HsMatrix& m, const HsAttention& l, int64_t T, Vectors<const float> x,
                        Vectors<float> y) {
        const int64_t H = l.num_heads, own = m.num_rows / H, D = m.num_columns;
        const int64_t at_once = std::max<int64_t>(1, vectors_at_once(l) / T);
        Quantise* quantise = kernels().quantise[m.kind];
        for (int64_t first = 0; first < H; first += at_once) {
            const int64_t count = std::min(at_once, H - first);
            auto input = [&](int64_t i) {
                uint8_t* to = quantise ? packed + i * T * packed_room(D) : nullptr;
                return Input{const_cast<float*>(x.data) + (first + i) * x.head, to, x.row, T, 0, T};
            };
            if (quantise)
                split(16 * count * T * D, count, 1, 4, [&](int64_t i0, int64_t i1) {
                    for (int64_t i = i0; i < i1; ++i) quantise(input(i), D);
                });
            split(count * own * row_bytes(m) * T, count * own, T == 1 ? TILE_ROWS : 32, 16,
                  [&](int64_t begin, int64_t end) {
                for (int64_t i = begin / own; i * own < end; ++i) {
                    const int64_t a0 = std::max(begin - i * own, int64_t{0}),
                                  a1 = std::min(end - i * own, own);
                    HsMatrix part = m;
                    part.data += (first + i) * own * m.stride, part.num_rows = own;
                    kernels().dot_rows[m.kind](rows_of(part), input(i), y.data + (first + i) * y.head,
                                               y.row, a0, a1);
                }
            });
        }
    }

    int64_t most_rows;
    float *low, *query;    // [max_rows, low_size], [max_rows, H (N + P)]
    Operand rank, values;  // [max_rows, R], [max_rows, H V]
    uint8_t* packed;
};

// True if the matrices and norms of latent attention fit the heads.
inline bool latent_fits(const HsAttention& l, int64_t width) {
    const HsLatent& a = *l.latent;
    const int64_t H = l.num_heads, C = l.value_width, P = l.head_dim - C, N = a.key.num_columns;
    const int64_t V = a.value.num_rows / H, Q = H * (N + P), R = l.input[0].num_rows;
    if (l.num_kv_heads != 1 || C < 1 || N < 1 || V < 1 || l.is_gated || !a.key_norm.weight)
        return false;
    if (!fits(a.key, H * C, N) || !fits(a.value, H * V, C)) return false;
    if (C % rows_together(a.key.kind) || V % rows_together(a.value.kind)) return false;
    if (a.query.data ? !a.query_norm.weight || !fits(a.query, Q, R) : R != Q) return false;
    return fits(l.input[0], R, width) && fits(l.input[1], C + P, width) && fits(l.output, width, H * V);
}
