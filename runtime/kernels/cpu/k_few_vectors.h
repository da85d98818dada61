// Products of R vectors of rows of K-quants in tiles with a few vectors of x, as in few_vectors.h. Included by k_tiled.h.

// The factors of a part (see k_products.h) of a vector of rows.
template <class F>
struct FewFactors {
    Floats by[2], least[2];

    // `number`: those of the rows; p: the part.
    __attribute__((always_inline)) FewFactors(Floats d, Floats m, const uint8_t* number, int p) {
        for (int r = 0; r < F::RANGES; ++r) {
            const int at = F::RANGES * p + r;
            by[r] = mul(load_i8(number + TILE_ROWS * at), d);
            if constexpr (F::HAS_MINIMA)
                least[r] = mul(load_i8(number + TILE_ROWS * (F::NUM_FACTORS + at)), m);
        }
    }
};

// y[t * y_stride .. + R * LANES - 1] for T vectors. Not inlined: products of q6_K would take 1.07 times as long (level
// avx2, gcc 12).
template <int R, int T, class F>
__attribute__((noinline)) void dot_few_vectors(const SuperTile<F>* tile, const Input& input, float* y,
                                               int64_t y_stride) {
    constexpr bool IS_ONE = LANES < TILE_ROWS;  // parts of one tile
    const int64_t n = tile->n;
    const PackedBlocks<Q8_0> x(input, 8 * n);
    Floats part[8][T][R];
    for (auto& vectors : part)
        for (auto& rows : vectors)
            for (Floats& sum : rows) sum = zero();
#pragma GCC unroll 1
    for (int64_t s = 0; s < n; ++s) {
        const SuperPlace place = super_place(tile->SHAPE, n, s);
        alignas(64) typename SuperTile<F>::Numbers numbers[R];
        const uint8_t *number[R], *quants[R], *above[R];
        Floats d[R], m[R];
#pragma GCC unroll 2
        for (int i = 0; i < R; ++i) {
            const int64_t lane = tile[i].lane;
            number[i] = i > 0 && IS_ONE ? number[0] - tile->lane : tile[i].numbers(s, numbers[i]);
            number[i] += lane;
            const uint8_t* halves = tile[i].tile + place.halves + 2 * lane;
            d[i] = d_of<F>(halves), m[i] = F::HAS_MINIMA ? load_f16(halves + 2 * TILE_ROWS) : zero();
            quants[i] = tile[i].tile + place.quants + 4 * lane;
            above[i] = tile[i].tile + place.bits + 4 * lane;
        }
#pragma GCC unroll 1
        for (int pair = 0; pair < 4; ++pair) {
            for (int i = 0; i < R; ++i) tile[i].ask(s, pair);
            // One part at a time: two would need more registers than there are.
#pragma GCC unroll 2
            for (int j = 0; j < 2; ++j) {
                const int p = j == 0 ? F::parts(pair).first : F::parts(pair).second;
                const int64_t b = 8 * s + p;
                const uint8_t* values = few_values(x, b);
                Ints products[R][T][2];  // of a range
                constexpr int LENGTH = 8 / F::RANGES;
#pragma GCC unroll 2
                for (int range = 0; range < F::RANGES; ++range) {
                    FewSums sums[R][T];
#pragma GCC unroll 8
                    for (int t = 0; t < T; ++t) {
                        const int64_t at = t * x.next_scale + b;
                        const Ints less = sum_of_range<F>(range, broadcast_int(x.sum + at),
                                                          broadcast_int(x.first_sum + at));
                        for (int i = 0; i < R; ++i) sums[i][t].set(Ints{} - F::LESS * less);
                    }
#pragma GCC unroll 8
                    for (int v = LENGTH * range; v < LENGTH * (range + 1); ++v) {
                        const int from = F::SHARES_HALVES ? 4 * j + v % 4 : v;
                        const int which = F::SHARES_HALVES ? v / 4 : j;
                        Ints bytes[R];
#pragma GCC unroll 2
                        for (int i = 0; i < R; ++i) {
                            const Ints both =
                                load_in_order(quants[i] + 4 * TILE_ROWS * F::quants_at(pair, from));
                            Ints upper = {}, of[2];
                            if constexpr (F::BITS_BYTES > 0)
                                upper = load_ints(above[i] + 4 * TILE_ROWS * F::above_at(pair, from));
                            F::four(both, upper, pair, of[0], of[1]);
                            bytes[i] = of[which];
                        }
                        add_bytes<Q8_0, false, R, T>(bytes, values, x.next_vector, v, sums);
                    }
#pragma GCC unroll 2
                    for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
                        for (int t = 0; t < T; ++t) products[i][t][range] = sums[i][t].total();
                }
                const FewFactors<F> factors[2] = {FewFactors<F>(d[0], m[0], number[0], p),
                                                  FewFactors<F>(d[R - 1], m[R - 1], number[R - 1], p)};
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) {
                    const int64_t at = t * x.next_scale + b;
                    const Ints sum = broadcast_int(x.sum + at),
                               first_sum = broadcast_int(x.first_sum + at);
                    const Floats scale = broadcast(x.scale[at]);
                    Floats less[2];
                    if constexpr (F::HAS_MINIMA)
                        for (int r = 0; r < F::RANGES; ++r)
                            less[r] = to_floats(Ints{} - sum_of_range<F>(r, sum, first_sum));
#pragma GCC unroll 2
                    for (int i = 0; i < R; ++i) {
                        Floats of[2];
                        for (int r = 0; r < F::RANGES; ++r) of[r] = to_floats(products[i][t][r]);
                        const Floats term = term_of<F>(factors[i].by, of, factors[i].least, less);
                        part[p][t][i] = fused(scale, term, part[p][t][i]);
                    }
                }
            }
        }
    }
    for (int t = 0; t < T; ++t)
        for (int i = 0; i < R; ++i) {
            Floats sum[4];
            for (int q = 0; q < 4; ++q) sum[q] = add_floats(part[2 * q][t][i], part[2 * q + 1][t][i]);
            store_floats(y + t * y_stride + i * LANES, sum_of_four(sum));
        }
}
