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
        Ints sum[R][T];
        Floats of_first[R][T];
        if constexpr (F::HAS_MINIMA) {
            panel_products<Q8_0, R, T>(panel.weights[p], values, [](int) { return Ints{}; }, sum);
        } else {
            panel_products<Q8_0, R, T, 0, 4>(panel.weights[p], values, [&](int j) {
                return Ints{} - 32 * x.first_sum[of + j * x.next_scale];
            }, sum);
            for (int i = 0; i < R; ++i)
                for (int j = 0; j < T; ++j)
                    of_first[i][j] =
                        mul(load_floats(panel.factors[i].factor[2 * p]), to_floats(sum[i][j]));
            panel_products<Q8_0, R, T, 4, 8>(panel.weights[p], values, [&](int j) {
                const int64_t at = of + j * x.next_scale;
                return Ints{} - 32 * (x.sum[at] - x.first_sum[at]);
            }, sum);
        }
        for (int j = 0; j < T; ++j) {
            const int64_t at = of + j * x.next_scale;
            const Floats scale = broadcast(x.scale[at]);
            for (int i = 0; i < R; ++i) {
                const SuperFactors<F>& factors = panel.factors[i];
                Floats term;
                if constexpr (F::HAS_MINIMA)
                    term = fused(load_floats(factors.factor[p]), to_floats(sum[i][j]),
                                 mul(load_floats(factors.minimum[p]), to_floats(Ints{} - x.sum[at])));
                else
                    term = fused(load_floats(factors.factor[2 * p + 1]), to_floats(sum[i][j]),
                                 of_first[i][j]);
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
        in_steps<4, 3, 2, 1>(0, input.count, [&](auto count, int64_t t) {
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
