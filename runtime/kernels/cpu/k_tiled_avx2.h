// Products of a whole tile of K-quants with one vector at the levels avx2 and avxvnni, as in tiled_avx2.h. Included
// by k_tiled.h.

// The terms of a part (see k_products.h) of half a tile's rows, from the exact products of its ranges.
template <class F>
struct HalfTerms {
    Floats d, m;
    const uint8_t* number;  // of half of the rows

    Floats term(int p, const Ints* products, int32_t sum, int32_t first_sum) const {
        Floats of[2], by[2], least[2], less[2];
        for (int r = 0; r < F::RANGES; ++r) {
            const int at = F::RANGES * p + r;
            of[r] = to_floats(products[r]), by[r] = mul(load_i8(number + TILE_ROWS * at), d);
            if constexpr (F::HAS_MINIMA) {
                least[r] = mul(load_i8(number + TILE_ROWS * (F::NUM_FACTORS + at)), m);
                less[r] = to_floats(Ints{} - sum_of_range<F>(r, sum, first_sum));
            }
        }
        return term_of<F>(by, of, least, less);
    }
};

// y[0 .. TILE_ROWS-1]. Not inlined: products of q6_K would take 1.07 times as long (level avx2, gcc 12).
template <class F>
__attribute__((noinline)) void dot_whole_tile(const SuperTile<F>& tile, const Input& input, float* y) {
    const PackedBlocks<Q8_0> x(input, 8 * tile.n);
    Floats part[8][2];
    for (auto& halves : part) halves[0] = halves[1] = zero();
#pragma GCC unroll 1
    for (int64_t s = 0; s < tile.n; ++s) {
        const SuperPlace place = super_place(tile.SHAPE, tile.n, s);
        alignas(64) typename SuperTile<F>::Numbers numbers;
        const uint8_t* number = tile.numbers(s, numbers);
        HalfTerms<F> terms[2];
        for (int i = 0; i < 2; ++i) {
            const uint8_t* halves = tile.tile + place.halves + 2 * LANES * i;
            terms[i] = {load_f16(halves), F::HAS_MINIMA ? load_f16(halves + 2 * TILE_ROWS) : zero(),
                        number + LANES * i};
        }
#pragma GCC unroll 4
        for (int pair = 0; pair < 4; ++pair) {
            tile.ask(s, pair);
            const Parts both = F::parts(pair);
            const int p[2] = {both.first, both.second};
            const uint8_t* values[2];
            Ints products[2][2][2];  // of a part, half of the rows and range
            for (int j = 0; j < 2; ++j) values[j] = x.values + (8 * s + p[j]) * x.stride;
            const uint8_t* quants = tile.tile + place.quants;
            constexpr int LENGTH = 8 / F::RANGES;
#pragma GCC unroll 2
            for (int range = 0; range < F::RANGES; ++range) {
                auto start = [&](int j) {
                    const int64_t b = 8 * s + p[j];
                    return Ints{} - F::LESS * sum_of_range<F>(range, x.sum[b], x.first_sum[b]);
                };
#pragma GCC unroll 2
                for (int j = 0; j < 2;
                     ++j) {  // one part at a time: two would need more registers than there are
                    HalfSums<false> sums[2] = {HalfSums<false>(start(j)), HalfSums<false>(start(j))};
#pragma GCC unroll 8
                    for (int v = LENGTH * range; v < LENGTH * (range + 1); ++v) {
                        const int from = F::SHARES_HALVES ? 4 * j + v % 4 : v;
                        const int which = F::SHARES_HALVES ? v / 4 : j;
#pragma GCC unroll 2
                        for (int i = 0; i < 2; ++i) {
                            const int64_t at = 4 * LANES * i;
                            const Ints bytes =
                                load_in_order(quants + 4 * TILE_ROWS * F::quants_at(pair, from) + at);
                            Ints above = {}, of[2];
                            if constexpr (F::BITS_BYTES > 0)
                                above = load_ints(tile.tile + place.bits +
                                                  4 * TILE_ROWS * F::above_at(pair, from) + at);
                            F::four(bytes, above, pair, of[0], of[1]);
                            sums[i].add(of[which], values[j], v);
                        }
                    }
                    for (int i = 0; i < 2; ++i) products[j][i][range] = sums[i].total();
                }
            }
            for (int j = 0; j < 2; ++j) {
                const int64_t b = 8 * s + p[j];
                const Floats by = broadcast(x.scale[b]);
                for (int i = 0; i < 2; ++i)
                    part[p[j]][i] =
                        fused(by, terms[i].term(p[j], products[j][i], x.sum[b], x.first_sum[b]),
                              part[p[j]][i]);
            }
        }
    }
    for (int i = 0; i < 2; ++i) {
        Floats sum[4];
        for (int q = 0; q < 4; ++q) sum[q] = add_floats(part[2 * q][i], part[2 * q + 1][i]);
        store_floats(y + i * LANES, sum_of_four(sum));
    }
}
