// Products of a whole tile of K-quants with one vector at the levels avx2 and avxvnni, as in tiled_avx2.h. Included
// by k_tiled.h.

// The terms of a part (see k_products.h) of half a tile's rows, of which `first` and `last` are the exact products of
// its first and last sixteen values, or `last` that of all.
template <class F>
struct HalfTerms {
    Floats d, m;
    const uint8_t* number;  // of the scales of half of the rows; minima follow eight scales

    Floats factor(int i) const { return mul(load_i8(number + TILE_ROWS * i), d); }
    Floats term(int p, Ints first, Ints last, int32_t sum) const {
        if constexpr (F::HAS_MINIMA) {
            const Floats minimum = mul(load_i8(number + TILE_ROWS * (8 + p)), m);
            return fused(factor(p), to_floats(last), mul(minimum, to_floats(Ints{} - sum)));
        } else {
            return fused(factor(2 * p + 1), to_floats(last), mul(factor(2 * p), to_floats(first)));
        }
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
        alignas(64) uint8_t numbers[16][TILE_ROWS];
        const uint8_t* number = tile.numbers(s, numbers);
        HalfTerms<F> terms[2];
        for (int i = 0; i < 2; ++i) {
            const uint8_t* floats = tile.tile + place.floats + 2 * LANES * i;
            terms[i] = {load_f16(floats), F::HAS_MINIMA ? load_f16(floats + 2 * TILE_ROWS) : zero(),
                        number + LANES * i};
        }
#pragma GCC unroll 4
        for (int pair = 0; pair < 4; ++pair) {
            tile.ask(s, pair);
            const Parts both = F::parts(pair);
            const int p[2] = {both.first, both.second};
            const uint8_t* values[2];
            Ints first[2][2] = {}, last[2][2];
            for (int j = 0; j < 2; ++j) values[j] = x.values + (8 * s + p[j]) * x.stride;
            const uint8_t* quants = tile.tile + place.quants + 32 * TILE_ROWS * pair;
            constexpr int RANGES = F::HAS_MINIMA ? 1 : 2,
                          LENGTH = 8 / RANGES;  // q6_K has two scales a part
#pragma GCC unroll 2
            for (int range = 0; range < RANGES; ++range) {
                auto start = [&](int j) {
                    if constexpr (F::HAS_MINIMA) return Ints{};
                    const int64_t b = 8 * s + p[j];
                    return Ints{} - 32 * (range == 0 ? x.first_sum[b] : x.sum[b] - x.first_sum[b]);
                };
#pragma GCC unroll 2
                for (int j = 0; j < 2;
                     ++j) {  // one part at a time: two would need more registers than there are
                    HalfSums<false> sums[2] = {HalfSums<false>(start(j)), HalfSums<false>(start(j))};
#pragma GCC unroll 8
                    for (int v = LENGTH * range; v < LENGTH * (range + 1); ++v)
#pragma GCC unroll 2
                        for (int i = 0; i < 2; ++i) {
                            const int64_t at = 4 * LANES * i;
                            const Ints nibbles = load_in_order(quants + 4 * TILE_ROWS * v + at);
                            Ints above = {}, of[2];
                            if constexpr (F::BITS_BYTES > 0)
                                above = load_ints(tile.tile + place.bits +
                                                  4 * TILE_ROWS * F::above_at(pair, v) + at);
                            F::four(nibbles, above, pair, of[0], of[1]);
                            sums[i].add(of[j], values[j], v);
                        }
                    for (int i = 0; i < 2; ++i)
                        (range + 1 == RANGES ? last : first)[j][i] = sums[i].total();
                }
            }
            for (int j = 0; j < 2; ++j) {
                const int64_t b = 8 * s + p[j];
                const Floats by = broadcast(x.scale[b]);
                for (int i = 0; i < 2; ++i)
                    part[p[j]][i] = fused(by, terms[i].term(p[j], first[j][i], last[j][i], x.sum[b]),
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
