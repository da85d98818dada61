// For grouped_lanes.h: lanes of factors are four or eight vectors times some blocks. Quants are split for these vectors.

// Each row's scales, repeated over the lanes of their blocks.
template <int COUNT>
inline void spread_grouped(const uint8_t* const* scales, LaneFloats& out) {
    constexpr int BLOCKS = 16 / COUNT, ROWS = 16 / BLOCKS;  // read together
    __m512i first = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    first = _mm512_and_si512(first, _mm512_set1_epi32(-ROWS));
    for (int64_t r = 0; r < SUM_ROWS; r += ROWS) {
        alignas(32) uint8_t some[32];
        for (int b = 0; b < BLOCKS; ++b)
            __builtin_memcpy(some + 2 * ROWS * b, scales[b] + 2 * r, 2 * ROWS);
        const Floats all = load_f16(some);
        for (int i = 0; i < ROWS; ++i) {
            const __m512i which = _mm512_add_epi32(first, _mm512_set1_epi32(i));
            store_floats(out[r + i], _mm512_permutexvar_ps(which, all));
        }
    }
}

template <int COUNT>
inline Floats repeated(const float* some) {
    if constexpr (COUNT == 8) return twice(some);
    return _mm512_broadcast_f32x4(_mm_loadu_ps(some));
}

// y + i * y_stride, BLOCK columns, += the sums over a block's rows with the factors in lane `lane` + i.
// The block after the next one is prefetched.
template <class F, int COUNT>
inline void add_lanes(const uint8_t* tile, const LaneFactors& factors, int64_t lane, bool is_behind,
                      float* y, int64_t y_stride) {
    Ints sum[COUNT][2] = {};
    const uint8_t* quants = tile + F::SCALES_BYTES;
    for (int64_t p = 0; p < PLACES; ++p, quants += F::PLACE_BYTES) {
        for (int64_t at = 0; at < F::PLACE_BYTES; at += 64)
            __builtin_prefetch(quants + 2 * F::TILE_BYTES + at);
        PlaceWords part;
        split_place<F>(quants, part);
        for (Ints* of : part)
            for (int v = 0; v < 2; ++v) of[v] = in_register(of[v]);
        for (int i = 0; i < COUNT; ++i) {
            const Ints even = in_register(Ints{} + factors.even[p][lane + i]);
            const Ints odd = in_register(Ints{} + factors.odd[p][lane + i]);
            for (int v = 0; v < 2; ++v) sum[i][v] = add_pairs(sum[i][v], part[0][v], even);
            for (int v = 0; v < 2; ++v) sum[i][v] = add_pairs(sum[i][v], part[1][v], odd);
        }
    }
    for (int i = 0; i < COUNT; ++i)
        for (int v = 0; v < 2; ++v)
            add_scaled(to_floats(sum[i][v]), broadcast(factors.scale[lane + i]), is_behind,
                       y + i * y_stride + v * LANES);
}

// Adds a group's sums to COUNT vectors from t on; c: their coefficients of each row.
template <class F, int COUNT>
inline void add_grouped(const uint8_t* group, int64_t D, const ManySums& s, int64_t t,
                        const float (*c)[16]) {
    constexpr int64_t BLOCKS = 16 / COUNT;
    const int64_t end = s.d1 / BLOCK;
    alignas(64) LaneFloats scale;
    LaneFactors factors;
    for (int64_t b0 = s.d0 / BLOCK; b0 < end; b0 += BLOCKS) {
        const uint8_t* tile[BLOCKS];
        for (int64_t i = 0; i < BLOCKS; ++i) tile[i] = F::tile(group, b0 + i < end ? b0 + i : end - 1);
        spread_grouped<COUNT>(tile, scale);
        fill_places([&](int64_t r) { return mul(load_floats(scale[r]), repeated<COUNT>(c[r])); },
                    factors);
        for (int64_t i = 0; i < BLOCKS && b0 + i < end; ++i)
            add_lanes<F, COUNT>(tile[i], factors, i * COUNT, is_behind_units<F>(b0 + i, D),
                                s.y + t * s.y_stride + (b0 + i) * BLOCK, s.y_stride);
    }
}

// Adds a group's sums to eight or four vectors at a time; returns the number of vectors that are
// done: all but at most the last three.
template <class F>
inline int64_t add_grouped_lanes(const uint8_t* group, int64_t D, const ManySums& s) {
    alignas(64) LaneFloats c[1];
    return in_steps<8, 4>(0, s.count, [&](auto count, int64_t t) {
        if (t % 16 == 0) gather_coefficients(s, t, t + 16 < s.count ? t + 16 : s.count, SUM_ROWS, c);
        add_grouped<F, count>(group, D, s, t, eight_of(c, t % 16));
    });
}
