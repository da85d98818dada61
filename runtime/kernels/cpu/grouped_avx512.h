// Sums of grouped rows for several vectors, bit-identical to grouped_template.h, which includes this.
//
// Lanes of factors are four or eight vectors times some blocks, so the largest factor is found
// without a reduction over lanes. Quants are split into signed values once for these vectors: sums
// need no offsets, and the parts of a place that belong to the same columns share a sum.

// Factors of COUNT vectors for 16 / COUNT blocks.
struct LaneFactors {
    alignas(64) int32_t even[PLACES][16], odd[PLACES][16];
    alignas(64) float scale[16];
};

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

// The factors of a group's rows, as fill() computes them.
template <int COUNT>
inline void fill_grouped(const LaneFloats& scale, const float (*c)[16], LaneFactors& to) {
    auto exact = [&](int64_t r) { return mul(load_floats(scale[r]), repeated<COUNT>(c[r])); };
    Ints largest = {};
    for (int64_t r = 0; r < SUM_ROWS; ++r)
        largest = larger(largest, reinterpret_cast<Ints>(exact(r)) & 0x7fffffff);
    const FactorScale by = factor_scale(largest);
    auto pair = [&](int64_t r, int32_t* at) {
        const __m512i low = bits(to_ints(mul(exact(r), by.up)));
        const __m512i high = bits(to_ints(mul(exact(r + 2 * PLACES), by.up)));
        _mm512_store_si512(at, _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_slli_epi32(high, 16)));
    };
    for (int64_t p = 0; p < PLACES; ++p) pair(p, to.even[p]), pair(p + PLACES, to.odd[p]);
    store_floats(to.scale, by.scale);
}

// A place's quants as 16-bit values: those of rows with even factors, then those with odd ones, each in
// two vectors of columns.
inline void split_place(Bytes, const uint8_t* quants, Ints (*part)[2]) {
    for (int v = 0; v < 2; ++v) {
        const Ints words = load_in_order(quants + 4 * LANES * v);
        part[0][v] = high_bytes(ints(_mm512_slli_epi16(bits(words), 8)));
        part[1][v] = high_bytes(words);
    }
}
inline void split_place(Nibbles, const uint8_t* quants, Ints (*part)[2]) {
    const Ints words = load_in_order(quants);
    for (int v = 0; v < 4; ++v)
        part[v / 2][v % 2] =
            ints(_mm512_sub_epi16(bits(shift_words(words, 4 * v) & 0x000f000f), _mm512_set1_epi16(8)));
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
        Ints part[2][2];
        split_place(F(), quants, part);
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
        fill_grouped<COUNT>(scale, c, factors);
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
