// Products and unpacking of tiles of the types in grid_formats.h.

// LANES rows of a tile, in the form that dot_super_tile() needs.
template <class F>
struct GridTile {
    static constexpr SuperShape SHAPE = super_shape(F::KIND);

    const uint8_t* tile;
    int64_t n;                // blocks of a row
    const TiledAhead* ahead;  // or null

    SuperPlace place(int64_t s) const { return super_place(SHAPE, n, s); }

    void factors(int64_t s, SuperFactors<F>& to) const {
        const SuperPlace at = place(s);
        const Floats d = F::d(tile, at);
        for (int p = 0; p < 8; ++p)
            for (int range = 0; range < F::RANGES; ++range)
                store_floats(to.factor[F::RANGES * p + range],
                             mul(to_floats(F::number(tile, at, p, range)), d));
    }

    // Prefetches what is due when part p of all rows is read.
    __attribute__((always_inline)) inline void ask(int64_t s, int p) const {
        constexpr int64_t BYTES = TILE_ROWS * F::BLOCK_BYTES / 4;  // of two parts, on average
        if (ahead && p % 2 == 0)
            ahead->ask(tile, s * TILE_ROWS * F::BLOCK_BYTES + p / 2 * BYTES, BYTES);
    }
};

template <class F, class Use>
__attribute__((always_inline)) inline void for_parts(const GridTile<F>& tile, int64_t s,
                                                     const Use& use) {
    const SuperPlace place = tile.place(s);
#pragma GCC unroll 1
    for (int p = 0; p < 8; ++p) {
        Ints bytes[8];
        tile.ask(s, p);
        F::entries(tile.tile, place, p, bytes);
        use(p, bytes);
    }
}

// y[t * y_stride .. + R * LANES - 1] for T vectors and R tiles, as in few_vectors.h.
template <int R, int T, class F>
__attribute__((noinline)) void dot_few_vectors(const GridTile<F>* tile, const Input& input, float* y,
                                               int64_t y_stride) {
    const int64_t n = tile->n;
    const PackedBlocks<Q8_0> x(input, 8 * n);
    Floats part[8][T][R];
    for (auto& vectors : part)
        for (auto& rows : vectors)
            for (Floats& sum : rows) sum = zero();
#pragma GCC unroll 1
    for (int64_t s = 0; s < n; ++s) {
        const SuperPlace place = tile->place(s);
        Floats d[R];
        for (int i = 0; i < R; ++i) d[i] = F::d(tile[i].tile, place);
#pragma GCC unroll 1
        for (int p = 0; p < 8; ++p) {
            const int64_t b = 8 * s + p;
            const uint8_t* values = few_values(x, b);
            Ints w[R][8];
            Floats factor[R][2];
#pragma GCC unroll 2
            for (int i = 0; i < R; ++i) {
                tile[i].ask(s, p);
#pragma GCC unroll 2
                for (int range = 0; range < F::RANGES; ++range)
                    factor[i][range] = mul(to_floats(F::number(tile[i].tile, place, p, range)), d[i]);
                F::entries(tile[i].tile, place, p, w[i]);
            }
            Ints products[F::RANGES][R][T];
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
                    Ints bytes[R];
                    for (int i = 0; i < R; ++i) bytes[i] = w[i][v];
                    add_bytes<Q8_0, false, R, T>(bytes, values, x.next_vector, v, sums);
                }
#pragma GCC unroll 2
                for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
                    for (int t = 0; t < T; ++t) products[range][i][t] = sums[i][t].total();
            }
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) {
                const Floats scale = broadcast(x.scale[t * x.next_scale + b]);
#pragma GCC unroll 2
                for (int i = 0; i < R; ++i) {
                    Floats of[2];
                    for (int range = 0; range < F::RANGES; ++range)
                        of[range] = to_floats(products[range][i][t]);
                    const Floats term = term_of<F>(factor[i], of, factor[i], of);
                    part[p][t][i] = fused(scale, term, part[p][t][i]);
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

template <class F>
void unpack_grid(const Rows& rows, float* out, int64_t a0, int64_t a1) {
    for (int64_t a = a0; a < a1; ++a) {
        const int64_t row = rows.index ? rows.index[a] : a, r = row % TILE_ROWS;
        const GridTile<F> tile = {rows.weight + (row - r) * rows.stride, rows.D / SUPER_BLOCK, nullptr};
        for (int64_t s = 0; s < tile.n; ++s) {
            SuperFactors<F> factors;
            tile.factors(s, factors);
            for_parts<F>(tile, s, [&](int p, const Ints* bytes) {
                float* to = out + a * rows.D + s * SUPER_BLOCK + p * BLOCK;
                for (int i = 0; i < BLOCK; ++i) {
                    const auto* four =
                        reinterpret_cast<const uint8_t*>(bytes + i / 16 * 4 + i % 4) + 4 * r;
                    const float by = factors.factor[F::RANGES * p + i / 16 % F::RANGES][r];
                    to[i] = static_cast<float>(four[i % 16 / 4] - F::LESS) * by;
                }
            });
        }
    }
}

// As quantise_blocks(), but each sixteen values are transposed as 4 x 4.
inline void quantise_for_grids(const Input& x, int64_t D) {
    quantise_blocks<Q8_0>(x, D);
    const int64_t n = D / BLOCK, units = (n + 1) / 2;
    const Bits order =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    for (int64_t t = 0; t < x.count; ++t) {
        const PackedBlocks<Q8_0> packed(x.part(t, t + 1), n);
        for (int64_t u = 0; u < units; ++u)
            for (int plane = 0; plane < 2; ++plane) {
                uint8_t* at = packed.values + u * packed.stride + 64 * plane;
                _mm512_storeu_si512(at, _mm512_shuffle_epi8(load_64_bytes(at), order));
            }
    }
}

// `codes`: those of `num_entries` entries, without signs; see grid_formats.h.
template <class F>
bool set_grid(const uint8_t* codes, int64_t num_entries) {
    if (num_entries != static_cast<int64_t>(sizeof F::grid[0])) return false;
    for (int64_t i = 0; i < num_entries; ++i, codes += F::PER_ENTRY)
        for (int t = 0; t < 2; ++t) {
            const uint8_t* c = codes + t * F::PER_ENTRY / 2;
            F::grid[t][i] =
                F::PER_ENTRY == 4 ? c[0] | c[1] << 4 : c[0] | c[2] << 2 | c[1] << 4 | c[3] << 6;
        }
    return true;
}

template <class F>
inline void dot_one(const GridTile<F>& tile, const Input& input, float* y) {
    dot_few_vectors<1, 1>(&tile, input, y, LANES);
}
