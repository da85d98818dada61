// The kernels, written once in terms of a few vector operations. Included at the end of each
// rows_<level>.cpp, inside its anonymous namespace, so that every level has copies of its own;
// otherwise the linker could keep the AVX-512 copy for all levels.
//
// The including file defines LEVEL_AVX512 on all levels with AVX-512 and LEVEL_AVX2 on avx2 and avxvnni (the
// compiler's macros do not tell, because flags for all files may allow more), and
//   LANES, Floats                  a vector of LANES floats, LANES divides 32
//   zero() broadcast(f) mul(a, b) multiply_add(a, b, c) = a*b+c  sum(v)
//   load_f32(p) load_f16(p) load_bf16(p) load_i8(p)     LANES values from an unaligned address
//   store_f32(p, v)
//   unpack_q4(p, w)                16 bytes of nibbles -> w[VECTORS], in the order of kernels.h
//   f16_to_float(p)                one f16
//   scale_f16(p)                   one f16, broadcast; may read 8 bytes
//   scale_many(p, m, c, y)         y[i] = c * f16 number i, for i < m <= 16; may set y[i] to 0
//                                  for m <= i < 16
//   fused(a, b, c)                 a*b+c, rounded once
//   add_floats(a, b)
// and what the headers included below need.

constexpr int VECTORS = BLOCK / LANES;

// A format unpacks BLOCK values into w. Those of planar_template.h must still be multiplied by scale(). VALUE_BYTES is the
// size of a value, 0 or absent if SCALED: only float kinds allow D % 32 != 0.

template <class Format, int64_t BYTES>
struct FloatFormat {
    static constexpr int64_t BLOCK_BYTES = BLOCK * BYTES, VALUE_BYTES = BYTES;
    static constexpr bool SCALED = false, IS_PLANAR = false;
    static inline void unpack(const uint8_t* block, Floats* w) {
        for (int v = 0; v < VECTORS; ++v) w[v] = Format::load(block + v * LANES * BYTES);
    }
};

struct F32 : FloatFormat<F32, 4> {
    static inline Floats load(const uint8_t* p) { return load_f32(p); }
    static inline float value(const uint8_t* p) {
        float f;
        __builtin_memcpy(&f, p, 4);
        return f;
    }
};

struct F16 : FloatFormat<F16, 2> {
    static inline Floats load(const uint8_t* p) { return load_f16(p); }
    static inline float value(const uint8_t* p) { return f16_to_float(p); }
};

struct BF16 : FloatFormat<BF16, 2> {
    static inline Floats load(const uint8_t* p) { return load_bf16(p); }
    static inline float value(const uint8_t* p) {
        uint16_t half;
        __builtin_memcpy(&half, p, 2);
        uint32_t bits = static_cast<uint32_t>(half) << 16;
        float f;
        __builtin_memcpy(&f, &bits, 4);
        return f;
    }
};

inline const uint8_t* row_of(const Rows& rows, int64_t a) {
    return rows.weight + (rows.index ? static_cast<int64_t>(rows.index[a]) : a) * rows.stride;
}

inline Floats load_floats(const float* p) { return load_f32(reinterpret_cast<const uint8_t*>(p)); }
inline void store_floats(float* p, Floats v) { store_f32(reinterpret_cast<uint8_t*>(p), v); }

// Keeps a value in a register. Otherwise gcc folds a load into every instruction that takes it, which repeats it
// (f32 with AVX-512: 33 GMAC/s instead of 45), or changes the order of additions, which can take more registers
// than there are.
template <class Vector>
inline Vector in_register(Vector v) {
#if defined(LEVEL_AVX512) || defined(LEVEL_AVX2)
    asm("" : "+v"(v));
#endif
    return v;
}

// Loads in program order: gcc would delay some, and a Zen 4 core would then read 9 GB/s of nibbles from
// memory instead of 26.
inline Ints load_in_order(const uint8_t* p) {
    Ints v = load_ints(p);
#if defined(LEVEL_AVX512) || defined(LEVEL_AVX2)
    asm volatile("" : "+v"(v));
#endif
    return v;
}

template <int N>
struct Count {
    static constexpr int VALUE = N;
    constexpr operator int() const { return N; }
};

// Calls use(Count<N>{}, i) for N indices at a time, i .. i + N - 1: as often as the first of SIZES fits
// between `begin` and `end`, then as often as the next one does. Returns the first index that is left.
template <int... SIZES, class Use>
__attribute__((always_inline)) inline int64_t in_steps(int64_t begin, int64_t end, const Use& use) {
    auto call = [&](auto count) {
        for (; begin + count <= end; begin += count) use(count, begin);
    };
    (call(Count<SIZES>{}), ...);
    return begin;
}

// The same for up to four indices at a time, of which none is alone if there are several.
template <class Use>
__attribute__((always_inline)) inline void in_fours(int64_t begin, int64_t end, const Use& use) {
    const bool is_one_left = end - begin > 4 && (end - begin) % 4 == 1;
    in_steps<3, 2, 1>(in_steps<4>(begin, is_one_left ? end - 5 : end, use), end, use);
}

// y[t * y_stride + i] += the sum over j < n, in order, of by(t, j) * w[i / LANES], for COUNT vectors y of VALUES *
// LANES columns; load(j, w) sets w.
template <int COUNT, int VALUES, class Vector = Floats, class Load, class Factor>
__attribute__((always_inline)) inline void add_weighted(float* y, int64_t y_stride, int64_t n,
                                                        const Load& load, const Factor& by) {
    float* to[COUNT];
    for (int t = 0; t < COUNT; ++t) to[t] = y + t * y_stride;
    Floats sum[COUNT][VALUES];
    for (int t = 0; t < COUNT; ++t)
        for (int v = 0; v < VALUES; ++v) sum[t][v] = load_floats(to[t] + v * LANES);
    for (int64_t j = 0; j < n; ++j) {
        Vector w[VALUES];
        load(j, w);
        for (int t = 0; t < COUNT; ++t) {
            const Vector factor = by(t, j);
            for (int v = 0; v < VALUES; ++v) sum[t][v] = multiply_add(w[v], factor, sum[t][v]);
        }
    }
    for (int t = 0; t < COUNT; ++t)
        for (int v = 0; v < VALUES; ++v) store_floats(to[t] + v * LANES, sum[t][v]);
}

#include "k_quants_template.h"
#include "planar_template.h"
#include "coded_blocks.h"
#if defined(LEVEL_AVX512) || defined(LEVEL_AVX2)
#include "lanes_x86.h"
#endif
#ifdef LEVEL_AVX512
#include "many_avx512.h"
#else
#include "many_template.h"
#endif

// Values of a block of the file.
template <class Format>
constexpr int64_t values_of() {
    if constexpr (IS_SUPER<Format>)
        return SUPER_BLOCK;
    else if constexpr (Format::SCALED)
        return BLOCK * Format::SPAN;
    else
        return BLOCK;
}
template <class Format>
constexpr int64_t VALUES_OF = values_of<Format>();

// Small blocks whose sums are those of planar_template.h.
template <class Format>
constexpr bool has_integer_sums() {
    if constexpr (IS_SUPER<Format> || !Format::SCALED)
        return false;
    else
        return !Format::IS_CODED;
}
template <class Format>
constexpr bool IS_BLOCKS = has_integer_sums<Format>();

// Unpacks 32 values of a row, from value 32 * b on.
template <class Format>
inline void unpack_32(const uint8_t* row, int64_t b, Floats* w) {
    if constexpr (Format::SCALED)
        Format::unpack(row, b, w);
    else
        Format::unpack(row + b * Format::BLOCK_BYTES, w);
}

#include "blocks_template.h"

// Calls use(Count<ROWS>, a, row, next, also) for rows a .. a+ROWS-1: for four rows at a time, then for two,
// then for one, so that x or y is read and written once for four rows. `use` prefetches the rows `next` and,
// unless it is null, `also`, because the hardware prefetcher stops at the end of a page and cannot know which
// row of a list comes next.
template <class Use>
inline void for_rows(const Rows& rows, int64_t a0, int64_t a1, const Use& use) {
    in_steps<4, 2, 1>(a0, a1, [&](auto count, int64_t a) {
        constexpr int ROWS = count;
        const uint8_t *row[ROWS], *next[ROWS], *also[ROWS];
        for (int r = 0; r < ROWS; ++r) {
            row[r] = row_of(rows, a + r);
            next[r] = rows.next               ? rows.next[a + r - a0]
                      : a + ROWS + r < rows.A ? row_of(rows, a + ROWS + r)
                                              : row[r];
        }
        const bool is_more = rows.queue && rows.queue->take(next, ROWS) &&
                             rows.queue->size() > a1 - a - ROWS && rows.queue->take(also, ROWS);
        use(count, a, row, next, is_more ? also : nullptr);
    });
}

#include "k_products.h"
#include "block_rows.h"
#include "floats_template.h"

// y[d0..d1) += c[r] * rows[r][d0..d1) for r = 0, 1, ... ROWS-1 in this order
template <class Format, int ROWS>
inline void add_block_rows(const uint8_t* const* rows, const uint8_t* const* next, const float* c,
                           float* y, int64_t d0, int64_t d1, const uint8_t* const* also, bool to_l2) {
    constexpr int64_t SPAN = VALUES_OF<Format> / BLOCK, BYTES = Format::BLOCK_BYTES / SPAN;
    int64_t d = d0;
    for (; d + BLOCK <= d1; d += BLOCK) {
        for (int r = 0; r < ROWS; ++r)
            for (int64_t at = 0; at < BYTES; at += 64)
                prefetch_row(next[r] + d / BLOCK * BYTES + at, to_l2);
        for (int r = 0; also && r < ROWS; ++r)
            for (int64_t at = 0; at < BYTES; at += 64)
                prefetch_row(also[r] + d / BLOCK * BYTES + at, to_l2);
        add_weighted<1, VECTORS>(y + d, 0, ROWS, [&](int64_t r, Floats* w) {
            unpack_32<Format>(rows[r], d / BLOCK, w);
        }, [&](int, int64_t r) { return broadcast(c[r]); });
    }
    if constexpr (!Format::SCALED)
        for (; d < d1; ++d)
            for (int r = 0; r < ROWS; ++r)
                y[d] += c[r] * Format::value(rows[r] + d * Format::VALUE_BYTES);
}

template <class Format, int ROWS>
inline void add_rows(const uint8_t* const* rows, const uint8_t* const* next, const float* c, float* y,
                     int64_t d0, int64_t d1, const uint8_t* const* also = nullptr, bool to_l2 = false) {
    if constexpr (IS_SUPER<Format>)
        add_super_rows<Format, ROWS>(rows, next, c, y, d0, d1, also, to_l2);
    else
        add_block_rows<Format, ROWS>(rows, next, c, y, d0, d1, also, to_l2);
}

// add_rows() for rows of a float kind that were prefetched into L2; meanwhile prefetches `rows.then`.
template <class Format>
inline void add_close_rows(const Rows& rows, const float* c, float* y, int64_t a0, int64_t a1,
                           int64_t d0, int64_t d1) {
    constexpr int64_t BYTES = Format::BLOCK_BYTES;
    constexpr int LINES = BYTES > 64 ? 2 : 1;
    const uint8_t* list[SUM_ROWS];
    const int64_t k = a1 - a0;
    for (int64_t i = 0; i < k; ++i) list[i] = row_of(rows, a0 + i) + d0 * Format::VALUE_BYTES;
    AheadRows ahead(rows.then, rows.num_then, rows.then_bytes);
    in_steps<4, 1>(0, k, [&](auto count, int64_t i) {
        constexpr int ROWS = count;
        int64_t d = 0;
        for (; d + BLOCK <= d1 - d0; d += BLOCK)
            add_weighted<1, VECTORS>(y + d0 + d, 0, ROWS, [&](int64_t r, Floats* w) {
                ahead.template ask<LINES>();
                Format::unpack(list[i + r] + d / BLOCK * BYTES, w);
            }, [&](int, int64_t r) { return broadcast(c[a0 + i + r]); });
        for (; d < d1 - d0; ++d)
            for (int r = 0; r < ROWS; ++r)
                y[d0 + d] += c[a0 + i + r] * Format::value(list[i + r] + d * Format::VALUE_BYTES);
    });
}

template <class Format>
void accumulate_rows(const Rows& rows, const float* c, float* y, int64_t a0, int64_t a1, int64_t d0,
                     int64_t d1) {
    if constexpr (IS_BLOCKS<Format>) {
        for (int64_t a = a0; a < a1; a += SUM_ROWS) {
            const int64_t k = a1 - a < SUM_ROWS ? a1 - a : SUM_ROWS;
            const uint8_t *row[SUM_ROWS], *next[QUEUED_ROWS];
            for (int64_t r = 0; r < k; ++r) row[r] = row_of(rows, a + r);
            auto add = [&](auto ahead) {
                add_group<Format>(row, ahead, k, rows.D / BLOCK, c + a, y, d0, d1);
            };
            const int64_t first = d0 / BLOCK * Format::BLOCK_BYTES;
            const int64_t bytes = (d1 - d0) / BLOCK * Format::BLOCK_BYTES;
            if (rows.then) {
                add(AheadRows(rows.then, rows.num_then, rows.then_bytes));
                continue;
            }
            if (rows.queue && rows.queue->take(next, QUEUED_ROWS)) {
                for (const uint8_t*& begin : next) begin += first;
                add(Ahead<QUEUED_ROWS>(next, bytes, queue_to_l2));
                continue;
            }
            for (int64_t r = 0; r < 4; ++r)
                next[r] = first + (rows.next               ? rows.next[r]
                                   : a + SUM_ROWS + r < a1 ? row_of(rows, a + SUM_ROWS + r)
                                                           : row[0]);
            add(Ahead<4>(next, bytes, false));
        }
    } else {
        if constexpr (!Format::SCALED)
            if (rows.then) return add_close_rows<Format>(rows, c, y, a0, a1, d0, d1);
        if constexpr (!Format::SCALED)
            if (is_one_run(rows, rows.D * Format::VALUE_BYTES)) {
                for (int64_t a = a0; a < a1; ++a) {
                    const uint8_t* row = row_of(rows, a);
                    const uint8_t* next = row + RUN_AHEAD;
                    add_rows<Format, 1>(&row, &next, c + a, y, d0, d1);
                }
                return;
            }
        for_rows(rows, a0, a1,
                 [&](auto count, int64_t a, const uint8_t* const* row, const uint8_t* const* next,
                     const uint8_t* const* also) {
            add_rows<Format, count>(row, next, c + a, y, d0, d1, also, prefetches_to_l2(rows));
        });
    }
}

template <class Format>
inline void unpack_row(const uint8_t* row, const uint8_t* next, int64_t D, float* out) {
    constexpr int64_t VALUES = VALUES_OF<Format>;
    for (int64_t b = 0; b < D / VALUES; ++b) {
        const uint8_t* block = row + b * Format::BLOCK_BYTES;
        const uint8_t* then = next + b * Format::BLOCK_BYTES;
        for (int64_t at = 0; at < Format::BLOCK_BYTES; at += 64) __builtin_prefetch(then + at);
        Floats w[VALUES / LANES];
        if constexpr (IS_SUPER<Format>) {
            alignas(
                64) float values[SUPER_BLOCK];  // -0, to which every value can be added, 0 and -0 too
            for (float& value : values) value = -0.0f;
            const float one = 1.0f;
            add_rows<Format, 1>(&block, &then, &one, values, 0, SUPER_BLOCK);
            for (int v = 0; v < VALUES / LANES; ++v) w[v] = load_floats(values + v * LANES);
        } else if constexpr (IS_BLOCKS<Format>) {
            const Floats scale = scale_f16(Format::scale(row, D / BLOCK, b));
            Format::unpack(Format::quants(row, D / BLOCK, b), w);
            for (int v = 0; v < VECTORS; ++v) w[v] = mul(w[v], scale);
        } else {
            for (int64_t i = 0; i < VALUES / BLOCK; ++i) unpack_32<Format>(block, i, w + i * VECTORS);
        }
        for (int v = 0; v < VALUES / LANES; ++v) store_floats(out + b * VALUES + v * LANES, w[v]);
    }
    if constexpr (!Format::SCALED)
        for (int64_t d = D / BLOCK * BLOCK; d < D; ++d)
            out[d] = Format::value(row + d * Format::VALUE_BYTES);
}

template <class Format>
void unpack_rows(const Rows& rows, float* out, int64_t a0, int64_t a1) {
    for (int64_t a = a0; a < a1; ++a) {
        const uint8_t* row = row_of(rows, a);
        const uint8_t* next = a + 1 < a1 ? row_of(rows, a + 1) : row;
        unpack_row<Format>(row, next, rows.D, out + a * rows.D);
    }
}

#include "tiled_template.h"
#include "k_tiled.h"
#ifdef LEVEL_GRIDS
#include "grid_formats.h"
#include "grid_tiles.h"
#endif
#include "tiled_rows.h"
#include "grouped_floats.h"
#include "grouped_template.h"
#include "row_factors.h"
#include "vectors_template.h"
#include "exponentials.h"
#include "attend_template.h"
#include "delta_template.h"
#include "mamba2_template.h"
#include "key_scores_template.h"
#include "sums_template.h"
#ifdef HAS_BF16_PAIRS
#include "bf16_pairs.h"
constexpr Quantise* QUANTISE_BF16 = quantise_bf16;
constexpr OrderSums* ORDER_BF16 = order_bf16_sums;
#else
constexpr Quantise* QUANTISE_BF16 = nullptr;
constexpr OrderSums* ORDER_BF16 = nullptr;
#endif

// The kernels of a kind. Each of these sets those of a type and of its layouts.
struct OfKind {
    DotRows* dot_rows;
    AccumulateRows* accumulate_rows;
    AccumulateMany* accumulate_many;
    UnpackRows* unpack_rows;
    Quantise* quantise = nullptr;
    OrderSums* order_sums = nullptr;
};

constexpr void set(Kernels& to, int32_t kind, const OfKind& of) {
    to.dot_rows[kind] = of.dot_rows, to.accumulate_rows[kind] = of.accumulate_rows;
    to.accumulate_many[kind] = of.accumulate_many, to.unpack_rows[kind] = of.unpack_rows;
    to.quantise[kind] = of.quantise, to.order_sums[kind] = of.order_sums;
}

template <class F>
constexpr void set_floats(Kernels& to, int32_t kind, Quantise* quantise = nullptr,
                          OrderSums* order_sums = nullptr) {
    set(to, kind,
        {dot_float_rows<F>, accumulate_rows<F>, by_window<FloatTile<F>, accumulate_many<F>>,
         unpack_rows<F>, quantise, order_sums});
}

template <class F>
constexpr void set_grouped_floats(Kernels& to, int32_t kind) {
    using Group = GroupedFloats<F>;
    set(to, kind,
        {nullptr, accumulate_grouped_floats<Group>, by_groups<accumulate_grouped_floats_many<Group>>,
         unpack_together<Group>});
}

template <class F, AccumulateMany MANY>
constexpr void set_rows(Kernels& to, int32_t kind) {
    set(to, kind,
        {dot_blocks<F>, accumulate_rows<F>, MANY, unpack_rows<F>, quantise_blocks<F>, order_sums<F>});
}

template <class F>
constexpr void set_tiles(Kernels& to, int32_t kind) {
    set(to, kind, {dot_tiled<F>, nullptr, nullptr, unpack_together<F>, quantise_blocks<F>});
}

template <class F>
constexpr void set_groups(Kernels& to, int32_t kind) {
    set(to, kind,
        {nullptr, accumulate_grouped<F>, by_groups<accumulate_grouped_many<F>>, unpack_together<F>});
}

template <class F>
constexpr void set_super(Kernels& to, int32_t kind, int32_t tiled) {
    set(to, kind,
        {dot_super<F>, accumulate_rows<F>, by_groups<accumulate_many<F>>, unpack_rows<F>,
         quantise_blocks<Q8_0>});
    set(to, tiled,
        {dot_tiled<F>, nullptr, nullptr, unpack_together<SuperTile<F>>, quantise_blocks<Q8_0>});
}

template <class F>
constexpr void set_coded(Kernels& to, int32_t kind, int32_t tiled) {
    set(to, kind,
        {dot_blocks<F>, accumulate_rows<F>, by_groups<accumulate_many<F>>, unpack_rows<F>,
         quantise_blocks<F>});
    set_tiles<Tiled<F, F>>(to, tiled);
}

template <class F>
constexpr void set_with_factors(Kernels& to, int32_t kind, int32_t tiled) {
    using Tile = Tiled<F, F>;
    set(to, kind,
        {dot_with_factors<F, dot_blocks<F>>, accumulate_with_factors<F>,
         accumulate_many_with_factors<F>, unpack_with_factors<F, unpack_rows<F>>, quantise_blocks<F>});
    set(to, tiled,
        {dot_with_factors<Tile, dot_tiled<Tile>>, nullptr, nullptr,
         unpack_with_factors<Tile, unpack_together<Tile>>, quantise_blocks<F>});
}

#ifdef LEVEL_AVX512
template <class Planar>
constexpr AccumulateMany* MANY = by_window<BlockTile<Planar>, accumulate_many<Planar>>;
#else
template <class Planar>
constexpr AccumulateMany* MANY = by_groups<accumulate_many<Planar>>;
#endif

#ifdef LEVEL_GRIDS
template <class F>
constexpr void set_grid_tiles(Kernels& to, int32_t tiled) {
    set(to, tiled, {dot_tiled<F>, nullptr, nullptr, unpack_grid<F>, quantise_for_grids});
}
#else
constexpr Kernels all_kernels() {
    Kernels all = {};
    set_floats<F32>(all, KIND_F32);
    set_floats<F16>(all, KIND_F16);
    set_floats<BF16>(all, KIND_BF16, QUANTISE_BF16, ORDER_BF16);
    set_grouped_floats<F16>(all, KIND_F16_GROUPED);
    set_grouped_floats<BF16>(all, KIND_BF16_GROUPED);
    set_rows<Q8_0, by_groups<accumulate_many<Q8_0>>>(all, KIND_Q8_0);
    set_rows<Q4_0, by_groups<accumulate_many<Q4_0>>>(all, KIND_Q4_0);
    set_rows<Q8_0Planar, MANY<Q8_0Planar>>(all, KIND_Q8_0_PLANAR);
    set_rows<Q4_0Planar, MANY<Q4_0Planar>>(all, KIND_Q4_0_PLANAR);
    set_tiles<Tiled<Q8_0Planar, Q8_0>>(all, KIND_Q8_0_TILED);
    set_tiles<Tiled<Q4_0Planar, Q4_0>>(all, KIND_Q4_0_TILED);
    set_groups<Q8_0Grouped>(all, KIND_Q8_0_GROUPED);
    set_groups<Q4_0Grouped>(all, KIND_Q4_0_GROUPED);
    set_super<Q4_K>(all, KIND_Q4_K, KIND_Q4_K_TILED);
    set_super<Q5_K>(all, KIND_Q5_K, KIND_Q5_K_TILED);
    set_super<Q6_K>(all, KIND_Q6_K, KIND_Q6_K_TILED);
    set_super<Q3_K>(all, KIND_Q3_K, KIND_Q3_K_TILED);
    set_super<Q2_K>(all, KIND_Q2_K, KIND_Q2_K_TILED);
    set_super<IQ4_XS>(all, KIND_IQ4_XS, KIND_IQ4_XS_TILED);
    set_super<IQ1_Table>(all, KIND_IQ1_TABLE, KIND_IQ1_TABLE_TILED);
    set_super<IQ2_Table>(all, KIND_IQ2_TABLE, KIND_IQ2_TABLE_TILED);
    set_super<IQ3_XXS_Table>(all, KIND_IQ3_XXS_TABLE, KIND_IQ3_XXS_TABLE_TILED);
    set_super<IQ3_S_Table>(all, KIND_IQ3_S_TABLE, KIND_IQ3_S_TABLE_TILED);
    set_coded<MXFP4>(all, KIND_MXFP4, KIND_MXFP4_TILED);
    set_coded<IQ4_NL>(all, KIND_IQ4_NL, KIND_IQ4_NL_TILED);
    set_coded<Q5_0>(all, KIND_Q5_0, KIND_Q5_0_TILED);
    set_coded<Q4_1>(all, KIND_Q4_1, KIND_Q4_1_TILED);
    set_coded<Q5_1>(all, KIND_Q5_1, KIND_Q5_1_TILED);
    set_super<TQ2_0>(all, KIND_TQ2_0, KIND_TQ2_0_TILED);
    set_coded<Q2_0>(all, KIND_Q2_0, KIND_Q2_0_TILED);
    set_coded<Q1_0>(all, KIND_Q1_0, KIND_Q1_0_TILED);
    set_with_factors<NVFP4>(all, KIND_NVFP4_SCALED, KIND_NVFP4_SCALED_TILED);
    all.weigh_keys[KIND_F32] = weigh_keys<F32>, all.mix_values[KIND_F32] = mix_values<F32>;
    all.weigh_keys[KIND_F16] = weigh_keys<F16>, all.mix_values[KIND_F16] = mix_values<F16>;
    all.weigh_keys[KIND_BF16] = weigh_keys<BF16>, all.mix_values[KIND_BF16] = mix_values<BF16>;
    all.weigh_keys[KIND_Q8_0] = weigh_keys<Q8_0>, all.mix_values[KIND_Q8_0] = mix_values<Q8_0>;
    all.weigh_keys[KIND_Q4_0] = weigh_keys<Q4_0>, all.mix_values[KIND_Q4_0] = mix_values<Q4_0>;
    all.choose = choose, all.smooth = smooth, all.soft_cap = soft_cap;
    all.above = above, all.keep_only = keep_only, all.add_to = add_to, all.sum_parts = sum_parts;
    all.rms_norm = rms_norm, all.layer_norm = layer_norm, all.rotate = rotate;
    all.gate_by = gate_by, all.delta_head = delta_head, all.mamba2_head = mamba2_head;
    all.store_f16 = store_f16, all.dot_bytes = dot_bytes, all.dot_codes = dot_codes;
    all.scale_dots = scale_dots, all.share_mass = share_mass, all.choose_largest = choose_largest;
    return all;
}

constexpr Kernels ALL_KERNELS = all_kernels();
#endif
