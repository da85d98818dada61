// Products of rows of blocks with several vectors at level avx2, whose sixteen registers cannot hold an unpacked
// block. Included by blocks_template.h. Results are as defined there.
//
// A panel is up to PANEL_BLOCKS blocks of one or two tiles of LANES rows, unpacked to 16 bits once for up to
// TILE_TOKENS vectors. It stays in L1 and is multiplied by four vectors at a time, whose sums over a block stay
// in registers: a weight is loaded once for four vectors, and a pair of x once for two tiles. GMAC/s of a Zen 5
// core, rows of 2048 values in cache, with a tile by one vector at a time and with panels: q8_0 5 vectors 35 and
// 50, 64 vectors 55 and 92; q4_K 33 and 57, 51 and 85. Level avxvnni keeps an unpacked block in eight registers
// and gains nothing.

constexpr int64_t PANEL_BLOCKS = 16;

// sum[i][t] = start(t) + the products of tile i and vector t, which are 64 bytes apart, over values
// 4 * FIRST .. 4 * END - 1 of a block.
template <class F, int R, int T, int FIRST = 0, int END = 8, class Start>
__attribute__((always_inline)) inline void panel_products(const Ints (*w)[TILE_WEIGHTS<F>],
                                                          const uint8_t* x, const Start& start,
                                                          Ints (*sum)[T]) {
    static_assert(unit<F>() == 1, "packed vectors are 64 bytes apart");
    for (int t = 0; t < T; ++t)
        for (int i = 0; i < R; ++i) sum[i][t] = start(t);
#pragma GCC unroll 16
    for (int v = 2 * FIRST; v < 2 * END; ++v) {
        Ints weights[R];
        for (int i = 0; i < R; ++i) weights[i] = in_register(w[i][v]);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
            int32_t pair;
            __builtin_memcpy(&pair, x + 64 * t + 4 * v, 4);
#pragma GCC unroll 2
            for (int i = 0; i < R; ++i)
                sum[i][t] = in_register(add_pairs(sum[i][t], weights[i], Ints{} + pair));
        }
    }
}

template <class F, int R>
struct Panel {
    Ints weights[PANEL_BLOCKS][R][TILE_WEIGHTS<F>];
    RowNumbers<F::NUMBERS> numbers[PANEL_BLOCKS][R];
};

// Adds the products of m blocks from b0 on to acc[t][p], for T vectors from t on.
template <class F, int R, int T>
inline void multiply_panel(const Panel<F, R>& panel, int64_t b0, int64_t m, const PackedBlocks<F>& x,
                           int64_t t, Floats (*acc)[4][R]) {
    for (int64_t b = b0; b < b0 + m; ++b) {
        const int64_t p = b % 4, of = t * x.next_scale + b;
        const uint8_t* values = x.values + b * x.stride + t * 64;
        Ints sum[F::RANGES][R][T];
        auto start = [&x, of](int range) {
            return [&x, of, range](int j) {
                const int64_t at = of + j * x.next_scale;
                return Ints{} - OFFSET<F> * sum_of_range<F>(range, x.sum[at], x.first_sum[at]);
            };
        };
        panel_products<F, R, T, 0, 8 / F::RANGES>(panel.weights[b - b0], values, start(0), sum[0]);
        if constexpr (F::RANGES == 2)
            panel_products<F, R, T, 4, 8>(panel.weights[b - b0], values, start(1), sum[1]);
        for (int j = 0; j < T; ++j) {
            const int64_t at = of + j * x.next_scale;
            for (int i = 0; i < R; ++i) {
                Floats& to = acc[t + j][p][i];
                const Ints products[2] = {sum[0][i][j], sum[F::RANGES - 1][i][j]};
                to = add_term<F>(to, products, panel.numbers[b - b0][i], x.scale[at], x.sum[at]);
            }
        }
    }
}

// Multiplies rows begin .. end-1 of R tiles by up to TILE_TOKENS vectors.
template <class F, int R, class Tile>
void dot_tile(Tile* tile, int64_t n, const Input& input, float* y, int64_t y_stride, int64_t begin,
              int64_t end) {
    const PackedBlocks<F> x(input, n);
    Floats acc[TILE_TOKENS][4][R];
    __builtin_memset(acc, 0, input.count * sizeof acc[0]);
    Panel<F, R> panel;
    for (int64_t b0 = 0; b0 < n; b0 += PANEL_BLOCKS) {
        const int64_t m = n - b0 < PANEL_BLOCKS ? n - b0 : PANEL_BLOCKS;
        for (int64_t b = 0; b < m; ++b)
            for (int i = 0; i < R; ++i) {
                Ints quarter[F::QUANT_BYTES / 4];
                panel.numbers[b][i] = tile[i].load(b0 + b, quarter);
                tile_weights<F>(quarter, panel.weights[b][i]);
            }
        in_fours(0, input.count,
                 [&](auto count, int64_t t) { multiply_panel<F, R, count>(panel, b0, m, x, t, acc); });
    }
    for (int64_t t = 0; t < input.count; ++t) {
        alignas(64) float sums[R * LANES];
        for (int i = 0; i < R; ++i) {
            const Floats part[4] = {acc[t][0][i], acc[t][1][i], acc[t][2][i], acc[t][3][i]};
            store_floats(sums + i * LANES, sum_of_four(part));
        }
        __builtin_memcpy(y + t * y_stride, sums + begin, (end - begin) * sizeof(float));
    }
}
