// Sums of grouped rows: all rows of a group of SUM_ROWS, stored in the order in which they are added, for
// one or several vectors of coefficients. Included by rows_template.h.
//
// Results are bit-identical to those of the same rows in other layouts. Lanes are columns of one block,
// which share their factors, and the lanes of a block's factors are rows, so quants need not be
// interleaved, sums are in column order, and memory is read sequentially.

constexpr int64_t PLACES = SUM_ROWS / 4;

// For each block of columns the scales of all rows, then for p = 0 .. PLACES-1 the quants of rows p,
// p + PLACES, p + 2 * PLACES and p + 3 * PLACES: four bytes for each byte of a row's block.
template <class Planar, class File>
struct Grouped : Planar {
    typedef File InFile;
    static constexpr bool IS_PLANAR = false;
    static constexpr int64_t ROWS = SUM_ROWS, TILE_BYTES = SUM_ROWS * Planar::BLOCK_BYTES;
    static constexpr int64_t SCALES_BYTES = 2 * SUM_ROWS, PLACE_BYTES = 4 * Planar::QUANT_BYTES;
    static constexpr int WORDS = PLACE_BYTES / (4 * LANES);  // vectors of a place

    static inline const uint8_t* tile(const uint8_t* group, int64_t b) {
        return group + b * TILE_BYTES;
    }
    // Block b of row r as in a file.
    static inline void copy_block(const uint8_t* group, int64_t, int64_t b, int64_t r, uint8_t* to) {
        const uint8_t* from = tile(group, b);
        __builtin_memcpy(to, from + 2 * r, 2);
        from += SCALES_BYTES + r % PLACES * PLACE_BYTES + r / PLACES;
        for (int64_t i = 0; i < Planar::QUANT_BYTES; ++i) to[2 + i] = from[4 * i];
    }
};

// The sums of LANES columns, or twice as many, from the sums of their parts; see split().
inline void join_parts(Bytes, const Ints* part, Ints* sum) { sum[0] = part[0] + part[1]; }
inline void join_parts(Nibbles, const Ints* part, Ints* sum) {
    sum[0] = part[0] + part[2];
    sum[1] = (part[1] >> 4) + part[3];
}

// The factors of a block's rows, with value = factor * scale: 16-bit pairs of rows p and p + 2 * PLACES,
// and of the two other rows of a place.
struct GroupFactors {
    alignas(64) int32_t even[PLACES], odd[PLACES];
    Ints offset;  // corrects for ZERO
    Floats scale;
};

struct Q8_0Grouped : Grouped<Q8_0Planar, Q8_0> {
    static constexpr int SUMS = 1;  // vectors of sums that belong to one vector of quants
    static inline Ints start(int64_t p, Ints offset) { return p == 0 ? offset : Ints{}; }
    static inline Ints zeros(Ints even, Ints) {
        return add_pairs(Ints{}, even, Ints{} + MINUS_ZEROS<Bytes>);
    }
};

struct Q4_0Grouped : Grouped<Q4_0Planar, Q4_0> {
    static constexpr int SUMS = 2;
    static inline Ints start(int64_t p, Ints offset) { return p == 0 || p == 3 ? offset : Ints{}; }
    static inline Ints zeros(Ints even, Ints odd) {
        const Ints zero = Ints{} + MINUS_ZEROS<Nibbles>;
        return add_pairs(add_pairs(Ints{}, even, zero), odd, zero);
    }
};

// The factors of a block's rows, as fill() computes them.
template <class F>
inline void fill_group(const uint8_t* scales, const float* c, GroupFactors& to) {
    constexpr int64_t V = SUM_ROWS / LANES, QUARTER = V / 4;
    Floats exact[V];
    Ints largest = {};
    for (int64_t v = 0; v < V; ++v) {
        exact[v] = mul(load_f16(scales + 2 * LANES * v), load_floats(c + LANES * v));
        largest = larger(largest, reinterpret_cast<Ints>(exact[v]) & 0x7fffffff);
    }
    const FactorScale by = factor_scale(over_lanes(largest, larger));
    Ints zeros = {};
    for (int64_t i = 0; i < QUARTER; ++i) {
        Ints factor[4];
        for (int64_t q = 0; q < 4; ++q) factor[q] = to_ints(mul(exact[q * QUARTER + i], by.up));
        const Ints even = (factor[0] & 0xffff) | factor[2] << 16;
        const Ints odd = (factor[1] & 0xffff) | factor[3] << 16;
        __builtin_memcpy(to.even + i * LANES, &even, sizeof even);
        __builtin_memcpy(to.odd + i * LANES, &odd, sizeof odd);
        zeros += F::zeros(even, odd);
    }
    to.offset = over_lanes(zeros, [](Ints a, Ints b) { return a + b; });
    to.scale = by.scale;
}

// True for a block after the last whole unit of a row, whose sums are rounded before they are added, as
// in add_part_of_unit().
template <class F>
inline bool is_behind_units(int64_t b, int64_t D) {
    return b * BLOCK >= D / F::UNIT * F::UNIT;
}

// y[0 .. LANES-1] += exact * scale; after the last whole unit, the product is rounded before it is added.
inline void add_scaled(Floats exact, Floats scale, bool is_behind, float* y) {
    const Floats old = load_floats(y), rounded = in_register(mul(exact, scale));
    store_floats(y, is_behind ? add_floats(old, rounded) : multiply_add(exact, scale, old));
}

#if defined(LEVEL_AVX512) || defined(LEVEL_AVX2)
#include "grouped_lanes.h"
#endif

// y[i * y_stride + d] += the sums over a block's rows with the factors of vector i, for d < BLOCK. `ahead`:
// where to prefetch as many bytes meanwhile, or null.
template <class F, int COUNT>
inline void add_group_block(const uint8_t* tile, const GroupFactors* factors, bool is_behind, float* y,
                            int64_t y_stride, const uint8_t* ahead = nullptr) {
    constexpr int PARTS = F::PARTS;
    Ints sum[COUNT][F::WORDS][PARTS];
    for (int i = 0; i < COUNT; ++i)
        for (int v = 0; v < F::WORDS; ++v)
            for (int p = 0; p < PARTS; ++p) sum[i][v][p] = F::start(p, factors[i].offset);
    const uint8_t* quants = tile + F::SCALES_BYTES;
    for (int64_t place = 0; place < PLACES; ++place, quants += F::PLACE_BYTES) {
        if (COUNT == 1 && ahead)
            for (int64_t at = 0; at < F::PLACE_BYTES; at += 64)
                __builtin_prefetch(ahead + place * F::PLACE_BYTES + at);
        for (int v = 0; v < F::WORDS; ++v) {
            Ints part[PARTS];
            F::split(load_in_order(quants + 4 * LANES * v), part);
            for (int i = 0; i < COUNT; ++i)
                for (int p = 0; p < PARTS; ++p) {
                    const int32_t* factor = p < PARTS / 2 ? factors[i].even : factors[i].odd;
                    sum[i][v][p] = add_pairs(sum[i][v][p], part[p], Ints{} + factor[place]);
                }
        }
    }
    for (int i = 0; i < COUNT; ++i)
        for (int v = 0; v < F::WORDS; ++v) {
            Ints total[F::SUMS];
            join_parts(F(), sum[i][v], total);
            for (int s = 0; s < F::SUMS; ++s)
                add_scaled(to_floats(total[s]), factors[i].scale, is_behind,
                           y + i * y_stride + v * LANES + s * (BLOCK / F::SUMS));
        }
}

// Whole groups of rows a0 .. a1-1. The factors of a block take as long as its sums and are computed
// one block ahead of them.
template <class F>
void accumulate_grouped(const Rows& rows, const float* c, float* y, int64_t a0, int64_t a1, int64_t d0,
                        int64_t d1) {
    GroupFactors factors[2];
    const int64_t b0 = d0 / BLOCK, b1 = d1 / BLOCK;
    const uint8_t* end = end_of_run(rows, a1);
    for (int64_t a = a0; a < a1; a += SUM_ROWS) {
        const uint8_t* group = rows.weight + a * rows.stride;
        fill_group<F>(F::tile(group, b0), c + a, factors[b0 % 2]);
        for (int64_t b = b0; b < b1; ++b) {
            if (b + 1 < b1) fill_group<F>(F::tile(group, b + 1), c + a, factors[(b + 1) % 2]);
            const uint8_t *tile = F::tile(group, b), *ahead = tile + stream_ahead;
            if (ahead >= end) ahead = rows.after ? rows.after + (ahead - end) : nullptr;
            add_group_block<F, 1>(tile, factors + b % 2, is_behind_units<F>(b, rows.D), y + b * BLOCK,
                                  0, stream_ahead > 0 ? ahead : nullptr);
        }
    }
}

// One group. A coefficient of 0 has no effect if weights are finite.
template <class F>
void accumulate_grouped_many(const Rows& rows, int64_t a0, int64_t, const ManySums& s) {
    const uint8_t* group = rows.weight + a0 * rows.stride;
    int64_t done = 0;
#if defined(LEVEL_AVX512) || defined(LEVEL_AVX2)
    done = add_grouped_lanes<F>(group, rows.D, s);
#endif
    for (int64_t b = s.d0 / BLOCK; b < s.d1 / BLOCK; ++b) {
        const uint8_t* tile = F::tile(group, b);
        in_steps<LANES == 16 ? 2 : 1, 1>(done, s.count, [&](auto count, int64_t t) {
            GroupFactors factors[count];
            for (int i = 0; i < count; ++i) fill_group<F>(tile, s.c + (t + i) * s.c_stride, factors[i]);
            add_group_block<F, count>(tile, factors, is_behind_units<F>(b, rows.D),
                                      s.y + t * s.y_stride + b * BLOCK, s.y_stride);
        });
    }
}
