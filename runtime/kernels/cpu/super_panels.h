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

// Multiplies rows begin .. end-1 of R tiles by up to PANEL_TOKENS vectors.
template <class F, int R, class Tile>
void dot_super_panel(const Tile* tile, int64_t n, const Input& input, float* y, int64_t y_stride,
                     int64_t begin, int64_t end) {
    const PackedBlocks<Q8_0> x(input, n);
    Floats part[PANEL_TOKENS][8][R];
    __builtin_memset(part, 0, input.count * sizeof part[0]);
    SuperPanel<F, R> panel;
    for (int64_t block = 0; block < n; block += 8) {
        for (int i = 0; i < R; ++i) {
            tile[i].factors(block / 8, panel.factors[i]);
            Ints above[F::BITS_BYTES / 4 + 1];
            tile[i].bits(block / 8, above);
#pragma GCC unroll 4
            for (int pair = 0; pair < 4; ++pair) {
                Ints quants[8], bytes[2][8];
                tile[i].quants(block / 8, pair, quants);
                bytes_of_pair<F>(quants, above, pair, bytes[0], bytes[1]);
                const Parts parts = F::parts(pair);
                byte_weights<Q8_0>(bytes[0], panel.weights[parts.first][i]);
                byte_weights<Q8_0>(bytes[1], panel.weights[parts.second][i]);
            }
        }
        for_vectors(input.count, [&](auto count, int64_t t) {
            multiply_super_panel<F, R, decltype(count)::VALUE>(panel, block, x, t, part);
        });
    }
    for (int64_t t = 0; t < input.count; ++t) {
        alignas(64) float sums[R * LANES];
        for (int i = 0; i < R; ++i) {
            Floats sum[4];
            for (int q = 0; q < 4; ++q) sum[q] = add_floats(part[t][2 * q][i], part[t][2 * q + 1][i]);
            store_floats(sums + i * LANES,
                         add_floats(add_floats(sum[0], sum[1]), add_floats(sum[2], sum[3])));
        }
        __builtin_memcpy(y + t * y_stride, sums + begin, (end - begin) * sizeof(float));
    }
}

// Multiplies rows by several vectors; returns the first row that is left.
template <class F>
int64_t dot_super_panels(const Rows& rows, const Input& x, float* y, int64_t y_stride, int64_t a0,
                         int64_t a1) {
    const int64_t n = rows.D / BLOCK;
    return for_tiles_of_rows(
        rows, a0, a1,
        [&](auto count, int64_t a, const uint8_t* const* row, const uint8_t* const* next) {
        constexpr int R = decltype(count)::VALUE;
        const int64_t valid = a1 - a < R * LANES ? a1 - a : R * LANES;
        for (int64_t t = 0; t < x.count; t += PANEL_TOKENS) {
            const int64_t end = t + PANEL_TOKENS < x.count ? t + PANEL_TOKENS : x.count;
            SuperRows<F> tile[R];
            for (int i = 0; i < R; ++i) tile[i] = {row + i * LANES, t == 0 ? next[i] : row[i * LANES]};
            dot_super_panel<F, R>(tile, n, x.part(t, end), y + t * y_stride + a, y_stride, 0, valid);
        }
    });
}
