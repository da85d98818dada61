// Sums of rows of small blocks for several vectors, all rows of a group at a time. The sums are
// bit-identical to those of many_template.h. Included by rows_template.h.
//
// The lanes of factors are eight vectors times two blocks, so that few vectors and short rows fill them
// too. Quants are split once for up to GATHERED vectors.

constexpr int64_t LANE_VECTORS = 8;
constexpr int64_t PAIRS = SUM_ROWS / 2;

template <class Format>
constexpr int64_t UNIT_BLOCKS = Format::UNIT / BLOCK;

// Factors of eight vectors, for a unit's blocks.
template <class Format>
struct UnitFactors {
    alignas(64) int32_t pair[PAIRS][UNIT_BLOCKS<Format>][LANE_VECTORS];  // of two rows, 16 bits each
    alignas(64) float scale[UNIT_BLOCKS<Format>][LANE_VECTORS];
};

// Broadcasts vector t's value for each block, stored LANE_VECTORS apart, to the lanes of its columns.
template <class Format, class Value>
inline Ints of_blocks(const Value* value, int64_t t) {
    const int32_t* at = reinterpret_cast<const int32_t*>(value) + t;
    __m512i all = _mm512_set1_epi32(at[0]);
    if constexpr (UNIT_BLOCKS<Format> == 2) {
        all = _mm512_mask_set1_epi32(all, 0xff00, at[LANE_VECTORS]);
    } else {
        all = _mm512_mask_set1_epi32(all, 0x00f0, at[LANE_VECTORS]);
        all = _mm512_mask_set1_epi32(all, 0x0f00, at[2 * LANE_VECTORS]);
        all = _mm512_mask_set1_epi32(all, 0xf000, at[3 * LANE_VECTORS]);
    }
    return ints(all);
}

// The coefficients of eight vectors, from the t-th gathered one on: eight values for each row of the group.
inline const float (*eight_of(const LaneFloats* c, int64_t t))[16] {
    return reinterpret_cast<const float (*)[16]>(&c[t / 16][0][t % 16]);
}

inline Floats twice(const float* eight) { return _mm512_broadcast_f32x8(_mm256_loadu_ps(eight)); }

// Scales of blocks b and b + 1 of a chunk, each broadcast to the lanes of eight vectors.
inline void spread_scales(const float (*scale)[CHUNK], int64_t k, int64_t b, LaneFloats& out) {
    const __m512i lanes = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m512i which = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(b)));
    for (int64_t r = 0; r < k; ++r)
        store_floats(out[r], _mm512_permutexvar_ps(which, load_floats(scale[r])));
}

// The factors of blocks b and b + 1 of a unit, as fill() computes them.
template <class Format>
inline void fill_lanes(const LaneFloats& scale, const float (*c)[16], int64_t k, int64_t b,
                       UnitFactors<Format>& factors) {
    auto exact = [&](int64_t r) { return mul(load_floats(scale[r]), twice(c[r])); };
    const FactorScale by = factor_scale(largest_bits(k, exact));
    for (int64_t r = 0; r < k; r += 2) {
        const Ints pair = factor_pair(exact(r), r + 1 < k ? exact(r + 1) : zero(), by.up);
        _mm512_store_si512(factors.pair[r / 2][b], bits(pair));
    }
    store_floats(factors.scale[b], by.scale);
}

// y[i] += the sums of vectors t + i, i < COUNT, over all pairs of rows, in the order of add_unit().
template <class Format, int COUNT>
inline void add_signed_unit(const Ints* split, int64_t pairs, const UnitFactors<Format>& factors,
                            int64_t t, float* const* y) {
    constexpr int VALUES = 2 * Format::PARTS;
    Ints sum[COUNT][VALUES] = {};
    for (int64_t r = 0; r < pairs; ++r, split += VALUES) {
        Ints w[VALUES];
        for (int v = 0; v < VALUES; ++v) w[v] = in_register(split[v]);
        for (int i = 0; i < COUNT; ++i) {
            const Ints factor = of_blocks<Format>(factors.pair[r][0], t + i);
            for (int v = 0; v < VALUES; ++v) sum[i][v] = add_pairs(sum[i][v], w[v], factor);
        }
    }
    for (int i = 0; i < COUNT; ++i) {
        const Floats scale = reinterpret_cast<Floats>(of_blocks<Format>(factors.scale[0], t + i));
        for (int v = 0; v < VALUES; ++v) {
            float* to = y[i] + v * LANES;
            store_floats(to, multiply_add(to_floats(sum[i][v]), scale, load_floats(to)));
        }
    }
}

// Adds a unit to eight vectors or fewer: in add_unit()'s order, or, if it is cut to its first n values, in
// column order.
template <class Format>
inline void add_unit_to_eight(const Ints* split, int64_t pairs, const UnitFactors<Format>& factors,
                              int64_t count, int64_t n, float* y, int64_t y_stride) {
    constexpr int64_t UNIT = Format::UNIT;
    constexpr int AT_ONCE = 8 / Format::PARTS;
    alignas(64) float sums[AT_ONCE][UNIT];
    for (int64_t t = 0; t < count; t += AT_ONCE) {
        float* to[AT_ONCE];
        for (int64_t i = 0; i < AT_ONCE; ++i) {
            const bool is_direct = n == UNIT && t + i < count;
            to[i] = is_direct ? y + (t + i) * y_stride : sums[i];
            if (!is_direct) __builtin_memset(sums[i], 0, sizeof sums[i]);
        }
        if (t + 1 == count)
            add_signed_unit<Format, 1>(split, pairs, factors, t, to);
        else
            add_signed_unit<Format, AT_ONCE>(split, pairs, factors, t, to);
        for (int64_t i = 0; n < UNIT && i < AT_ONCE && t + i < count; ++i) {
            add_in_order<Format>(sums[i], n, y + (t + i) * y_stride);
        }
    }
}

// Splits the quants of n values of k rows, from byte `at` on, and zero bytes up to a whole unit.
template <class Format>
inline void split_unit(const uint8_t* const* quants, int64_t at, int64_t k, int64_t n, Ints* to) {
    const __mmask64 there = ~0ull >> (64 - n * Format::QUANT_BYTES / BLOCK);
    for (int64_t r = 0; r < k; r += 2, to += 2 * Format::PARTS) {
        const Ints a = ints(_mm512_maskz_loadu_epi8(there, quants[r] + at));
        const Ints b = r + 1 < k ? ints(_mm512_maskz_loadu_epi8(there, quants[r + 1] + at)) : a;
        split_signed(Format(), interleave_low(a, b), to);
        split_signed(Format(), interleave_high(a, b), to + Format::PARTS);
    }
}

// Number of vectors whose coefficients are gathered together.
constexpr int64_t GATHERED = 64;

// Sums all k rows of a group for vectors t0 .. t1-1.
template <class Format>
inline void add_group_to_some(const uint8_t* const* rows, int64_t k, int64_t n, const ManySums& s,
                              int64_t t0, int64_t t1) {
    constexpr int64_t UNIT = Format::UNIT, BLOCKS = UNIT_BLOCKS<Format>;
    alignas(64) float scale[SUM_ROWS][CHUNK];
    alignas(64) LaneFloats lane_scale[BLOCKS / 2];
    alignas(64) LaneFloats c[GATHERED / 16];
    alignas(64) Ints split[PAIRS * 2 * Format::PARTS];
    UnitFactors<Format> factors;
    const uint8_t* quants[SUM_ROWS];
    alignas(64) uint8_t copy[Format::IS_PLANAR ? 1 : SUM_ROWS][CHUNK * 32];
    gather_coefficients(s, t0, t1, k, c);
    for (int64_t b0 = s.d0 / BLOCK, b1; b0 < s.d1 / BLOCK; b0 = b1) {
        b1 = b0 + CHUNK < s.d1 / BLOCK ? b0 + CHUNK : s.d1 / BLOCK;
        read_scales<Format>(rows, k, n, b0, b1 - b0, scale);
        find_quants<Format>(rows, k, n, b0, b1 - b0, copy, quants);
        for (int64_t b = 0; b < b1 - b0; b += BLOCKS) {
            const int64_t left = (b1 - b0 - b) * BLOCK, values = left < UNIT ? left : UNIT;
            split_unit<Format>(quants, b * Format::QUANT_BYTES, k, values, split);
            for (int64_t i = 0; i < BLOCKS; i += 2) spread_scales(scale, k, b + i, lane_scale[i / 2]);
            for (int64_t t = t0; t < t1; t += LANE_VECTORS) {
                const int64_t count = t1 - t < LANE_VECTORS ? t1 - t : LANE_VECTORS;
                const float (*own)[16] = eight_of(c, t - t0);
                for (int64_t i = 0; i < BLOCKS; i += 2)
                    fill_lanes<Format>(lane_scale[i / 2], own, k, i, factors);
                add_unit_to_eight<Format>(split, (k + 1) / 2, factors, count, values,
                                          s.y + t * s.y_stride + (b0 + b) * BLOCK, s.y_stride);
            }
        }
    }
}

template <class Format>
inline void add_group_to_many(const uint8_t* const* rows, int64_t k, int64_t n, const ManySums& s) {
    for (int64_t t = 0; t < s.count; t += GATHERED)
        add_group_to_some<Format>(rows, k, n, s, t, t + GATHERED < s.count ? t + GATHERED : s.count);
}
