// For grouped_lanes.h: lanes of factors are eight vectors. A block's quants are split once for these vectors.

// y + i * y_stride, BLOCK columns, += the sums over a block's rows with the factors of vector `first` + i.
template <int COUNT>
inline void add_places(const PlaceWords* words, const LaneFactors& factors, int64_t first,
                       bool is_behind, float* y, int64_t y_stride) {
    Ints sum[COUNT][VECTORS] = {};
    for (int64_t p = 0; p < PLACES; ++p)
        for (int odd = 0; odd < 2; ++odd) {
            Ints factor[COUNT];
            for (int i = 0; i < COUNT; ++i)
                factor[i] = Ints{} + (odd ? factors.odd : factors.even)[p][first + i];
            for (int v = 0; v < VECTORS; ++v) {
                const Ints w = in_register(words[p][odd][v]);
                for (int i = 0; i < COUNT; ++i)
                    sum[i][v] = in_register(add_pairs(sum[i][v], w, factor[i]));
            }
        }
    for (int i = 0; i < COUNT; ++i)
        for (int v = 0; v < VECTORS; ++v)
            add_scaled(to_floats(sum[i][v]), broadcast(factors.scale[first + i]), is_behind,
                       y + i * y_stride + v * LANES);
}

// Adds a group's sums to eight vectors at a time; returns the number of vectors that are done: all but at most two.
template <class F>
inline int64_t add_grouped_lanes(const uint8_t* group, int64_t D, const ManySums& s) {
    alignas(64) LaneFloats c[1];
    alignas(64) float scale[SUM_ROWS];
    PlaceWords words[PLACES];
    LaneFactors factors;
    int64_t t = 0;
    for (int64_t count; s.count - t > 2; t += count) {
        count = s.count - t < LANES ? s.count - t : LANES;
        gather_coefficients(s, t, t + count, SUM_ROWS, c);
        for (int64_t b = s.d0 / BLOCK; b < s.d1 / BLOCK; ++b) {
            const uint8_t* tile = F::tile(group, b);
            for (int64_t r = 0; r < SUM_ROWS; r += LANES)
                store_floats(scale + r, load_f16(tile + 2 * r));
            fill_places([&](int64_t r) { return mul(broadcast(scale[r]), load_floats(c[0][r])); },
                        factors);
            for (int64_t p = 0; p < PLACES; ++p) {
                const uint8_t* quants = tile + F::SCALES_BYTES + p * F::PLACE_BYTES;
                for (int64_t at = 0; at < F::PLACE_BYTES; at += 64)
                    __builtin_prefetch(quants + 2 * F::TILE_BYTES + at);
                split_place<F>(quants, words[p]);
            }
            const bool is_behind = is_behind_units<F>(b, D);
            float* y = s.y + t * s.y_stride + b * BLOCK;
            in_steps<2, 1>(0, count, [&](auto some, int64_t i) {
                add_places<some>(words, factors, i, is_behind, y + i * s.y_stride, s.y_stride);
            });
        }
    }
    return t;
}
