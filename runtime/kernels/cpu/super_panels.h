// Products of rows of K-quants with several vectors at level avx2, as in panels.h. Included by
// k_products.h.

template <class F, int R>
struct SuperPanel {
    Ints weights[8][R][TILE_WEIGHTS<Q8_0>];
    SuperFactors<F> factors[R];
};

// Adds the terms of one block of 256 values to part[t][p], for T vectors from t on.
template <class F, int R, int T>
inline void multiply_super_panel(const SuperPanel<F, R>& panel, int64_t block,
                                 const PackedBlocks<Q8_0>& x, int64_t t, Floats (*part)[8][R]) {
    for (int p = 0; p < 8; ++p) {
        const int64_t b = block + p, of = t * x.next_scale + b;
        const uint8_t* values = x.values + b * x.stride + t * 64;
        Ints sum[F::RANGES][R][T];
        auto start = [&](int range) {
            return [&x, of, range](int j) {
                const int64_t at = of + j * x.next_scale;
                return Ints{} - F::LESS * sum_of_range<F>(range, x.sum[at], x.first_sum[at]);
            };
        };
        panel_products<Q8_0, R, T, 0, 8 / F::RANGES>(panel.weights[p], values, start(0), sum[0]);
        if constexpr (F::RANGES == 2)
            panel_products<Q8_0, R, T, 4, 8>(panel.weights[p], values, start(1), sum[1]);
        for (int j = 0; j < T; ++j) {
            const int64_t at = of + j * x.next_scale;
            const Floats scale = broadcast(x.scale[at]);
            for (int i = 0; i < R; ++i) {
                const Ints products[2] = {sum[0][i][j], sum[F::RANGES - 1][i][j]};
                const Floats term =
                    panel.factors[i].term_of_products(p, products, x.sum[at], x.first_sum[at]);
                part[t + j][p][i] = fused(scale, term, part[t + j][p][i]);
            }
        }
    }
}

// Multiplies rows begin .. end-1 of R tiles by up to TILE_TOKENS vectors.
template <class F, int R, class Tile>
void dot_super_tile(const Tile* tile, int64_t n, const Input& input, float* y, int64_t y_stride,
                    int64_t begin, int64_t end) {
    const PackedBlocks<Q8_0> x(input, n);
    Floats part[TILE_TOKENS][8][R];
    __builtin_memset(part, 0, input.count * sizeof part[0]);
    SuperPanel<F, R> panel;
    for (int64_t block = 0; block < n; block += 8) {
        for (int i = 0; i < R; ++i) {
            tile[i].factors(block / 8, panel.factors[i]);
            for_parts<F>(tile[i], block / 8, [&](int p, const Ints* bytes) {
                byte_weights<Q8_0>(bytes, panel.weights[p][i]);
            });
        }
        in_fours(0, input.count, [&](auto count, int64_t t) {
            multiply_super_panel<F, R, count>(panel, block, x, t, part);
        });
    }
    for (int64_t t = 0; t < input.count; ++t) {
        alignas(64) float sums[R * LANES];
        for (int i = 0; i < R; ++i) {
            Floats sum[4];
            for (int q = 0; q < 4; ++q) sum[q] = add_floats(part[t][2 * q][i], part[t][2 * q + 1][i]);
            store_floats(sums + i * LANES, sum_of_four(sum));
        }
        __builtin_memcpy(y + t * y_stride, sums + begin, (end - begin) * sizeof(float));
    }
}
