// Products of rows of small blocks, in the file's layout and planar, with vectors of 16-bit
// integers. Included by rows_template.h.
//
// Results are bit-identical at every level and for any number of vectors. With I(b) the sum of a
// block's 32 products, an exact integer,
//   part[p] = the sum over b = p, p + 4, p + 8, ... of I(b) * (row's scale * x's scale),
//             each term added by one fused multiply-add, in order
//   product = (part[0] + part[1]) + (part[2] + part[3])
// In types whose blocks have a minimum, a part adds minimum * (x's scale * the sum of x's integers) before I(b). In those
// whose halves have scales s0 and s1, with the sums I0(b) and I1(b) over the halves, it adds x's scale * (s1 * I1(b) +
// s0 * I0(b)), where the second product is rounded and each other added by one fused multiply-add.
//
// There are two kernels. One takes FEW rows and one vector, four blocks per step; its lanes are
// pairs of a row and a block. The other takes LANES rows and up to TILE_TOKENS vectors; its lanes
// are rows, and a block of weights is unpacked once for all vectors (level avx2: panels.h). A level defines, in
// blocks_madd.h, blocks_vnni.h or blocks_avxvnni.h,
//   unit<F>()                         the number of blocks in a unit of packed x
//   quantise_unit<F>(value, to)       packs the int16 values of a unit
//   few_products<F>(quants, m, x, stride)   I of FEW rows and four blocks, of which m exist; units
//                                           of x are `stride` bytes apart
//   few_lane(r, p)                    the lane of row r and block p
//   tile_weights<F>(quarter, w)       unpacks a block of LANES rows to TILE_WEIGHTS<F> vectors
//   tile_products<F, FIRST, END>(w, x, b, start)   start + I of LANES rows over values 4 * FIRST ..
//                                           4 * END - 1, by default all; x: the unit with block b
//   OFFSET<F>                         added to quants to make them non-negative, so I is too large
//                                           by OFFSET<F> times the sum of x; 0: they stay signed
// and in its rows_<level>.cpp FEW;
//   few_corrections(four), few_factors(scale, m, x_scale)   four sums of x, and scales times x_scale, in
//                                           the lanes of few_products; factors are 0 from block m on
//   few_numbers(number)                     four numbers of each of FEW rows in these lanes
//   transpose_16(p, out)              16 bytes of LANES rows as four vectors of 32 bits per row
//   fused(a, b, c)                    see rows_template.h

constexpr int64_t TILE_TOKENS = 128;

// True for kinds whose rows are in tiles: see tiled_template.h.
template <class F>
constexpr bool IS_TILED = false;

// n blocks of a packed vector, padded to whole_fours(n).
template <class F>
struct PackedBlocks {
    PackedBlocks(const Input& x, int64_t n) {
        const int64_t n4 = whole_fours(n), C = x.capacity, t = x.first;
        values = x.packed + t * unit<F>() * 64;
        stride = C * unit<F>() * 64;
        scale = reinterpret_cast<float*>(x.packed + n4 * 64 * C) + t * n4;
        sum = reinterpret_cast<int32_t*>(x.packed + n4 * 68 * C) + t * n4;
        first_sum = reinterpret_cast<int32_t*>(x.packed + n4 * 72 * C) + t * n4;
        next_vector = unit<F>() * 64;
        next_scale = n4;
    }
    uint8_t* values;     // of the first vector; units are `stride` bytes apart
    float* scale;        // of each block
    int32_t* sum;        // of each block's values
    int32_t* first_sum;  // of each block's first sixteen
    int64_t stride, next_vector, next_scale;
};

// The numbers before the quants of LANES rows' blocks.
template <int64_t NUMBERS>
struct RowNumbers {
    Floats scale;
};
template <>
struct RowNumbers<2> {
    Floats scale, second;  // the minimum, or the scale of the last 16 values
};

// LANES numbers from p on, of which row r's is `number_bytes` bytes after that of row r - 1.
template <class F>
inline Floats numbers_at(const uint8_t* p) {
    if constexpr (F::RANGES == 2)
        return halved_e4m3(p);
    else if constexpr (F::NUMBER_BYTES == 1)
        return powers_of_two(p);
    else
        return load_f16(p);
}

// acc + the term of a block, from its products over each range; x_scale and x_sum: of x's block.
template <class F>
__attribute__((always_inline)) inline Floats add_term(Floats acc, const Ints* products,
                                                      const RowNumbers<F::NUMBERS>& rows, float x_scale,
                                                      int32_t x_sum) {
    if constexpr (F::RANGES == 2) {
        const Floats first = mul(rows.scale, to_floats(products[0]));
        return fused(broadcast(x_scale), fused(rows.second, to_floats(products[1]), first), acc);
    }
    if constexpr (F::NUMBERS == 2)
        acc = fused(rows.second, broadcast(static_cast<float>(x_sum) * x_scale), acc);
    return fused(to_floats(products[0]), mul(rows.scale, broadcast(x_scale)), acc);
}

// add_four() for types whose blocks are unpacked to bytes first.
template <class F>
__attribute__((always_inline)) inline Floats add_four_coded(const uint8_t* const* rows, int64_t n,
                                                            int64_t b, int64_t m,
                                                            const PackedBlocks<F>& x, Floats acc) {
    alignas(64) uint8_t bytes[FEW][4 * BLOCK];
    alignas(64) float number[F::NUMBERS][FEW][4] = {};  // 0 from block m on
    const uint8_t* quants[FEW];
    for (int r = 0; r < FEW; ++r) {
        quants[r] = bytes[r];
        for (int64_t i = 0; i < m; ++i) {
            const uint8_t* head = F::scale(rows[r], n, b + i);
            F::signed_bytes(F::quants(rows[r], n, b + i), bytes[r] + i * BLOCK);
            number[0][r][i] = number_at<F, 0>(head);
            if constexpr (F::NUMBERS == 2) number[1][r][i] = number_at<F, 1>(head);
        }
    }
    const Ints sums = few_corrections(x.sum + b);
    auto multiply = [&] {
        Ints products = few_products<Q8_0>(quants, m, x.values + b / unit<F>() * x.stride, x.stride);
        if constexpr (OFFSET<Q8_0> != 0) products -= OFFSET<Q8_0> * sums;
        return to_floats(products);
    };
    const Floats by =
        reinterpret_cast<Floats>(few_corrections(reinterpret_cast<const int32_t*>(x.scale + b)));
    if constexpr (F::RANGES == 2) {  // zeros replace the other half of each block
        alignas(64) uint8_t all[FEW][4 * BLOCK];
        __builtin_memcpy(all, bytes, sizeof all);
        auto half = [&](int64_t place) {
            for (int r = 0; r < FEW; ++r)
                for (int64_t i = 0; i < m; ++i) {
                    uint8_t* to = bytes[r] + i * BLOCK;
                    __builtin_memset(to, 0, BLOCK);
                    __builtin_memcpy(to + place, all[r] + i * BLOCK + place, BLOCK / 2);
                }
            return multiply();
        };
        const Floats first = mul(few_numbers(number[0]), half(0));
        return fused(by, fused(few_numbers(number[1]), half(BLOCK / 2), first), acc);
    }
    const Floats products = multiply();
    if constexpr (F::NUMBERS == 2) acc = fused(few_numbers(number[1]), mul(to_floats(sums), by), acc);
    return fused(products, mul(few_numbers(number[0]), by), acc);
}

// acc + the products of FEW rows and blocks b .. b + m - 1 times their scales, m <= 4.
template <class F>
__attribute__((always_inline)) inline Floats add_four(const uint8_t* const* rows, int64_t n, int64_t b,
                                                      int64_t m, const PackedBlocks<F>& x, Floats acc) {
    if constexpr (F::IS_CODED) {
        return add_four_coded<F>(rows, n, b, m, x, acc);
    } else {
        constexpr int64_t Q = F::QUANT_BYTES;
        const uint8_t *quants[FEW], *scale[FEW];
        alignas(64) uint8_t copy[FEW][4 * Q + 8];
        for (int r = 0; r < FEW; ++r) {
            if (F::IS_PLANAR) {  // four scales can be read, because quants follow them
                quants[r] = F::quants(rows[r], n, b), scale[r] = F::scale(rows[r], n, b);
                continue;
            }
            for (int64_t i = 0; i < m; ++i) {
                __builtin_memcpy(copy[r] + i * Q, F::quants(rows[r], n, b + i), Q);
                __builtin_memcpy(copy[r] + 4 * Q + 2 * i, F::scale(rows[r], n, b + i), 2);
            }
            quants[r] = copy[r], scale[r] = copy[r] + 4 * Q;
        }
        Ints products = few_products<F>(quants, m, x.values + b / unit<F>() * x.stride, x.stride);
        if constexpr (OFFSET<F> != 0) products -= OFFSET<F> * few_corrections(x.sum + b);
        return fused(to_floats(products), few_factors(scale, m, x.scale + b), acc);
    }
}

// Adds the products of QUADS times FEW rows with one vector to acc. Meanwhile AHEAD rows are
// prefetched: in each step the whole lines that four blocks fill, the remaining lines before the
// first step. Always inlined, as is add_four(): gcc 12 would otherwise call them and keep the pointers to
// rows in memory, which takes 1.2 times as long.
template <class F, int QUADS, int AHEAD>
__attribute__((always_inline)) inline void add_few(const uint8_t* const* rows,
                                                   const uint8_t* const* next, int64_t n,
                                                   const PackedBlocks<F>& x, Floats* acc, bool to_l2) {
    constexpr int64_t LINES = AHEAD > 0 ? 4 * F::BLOCK_BYTES / F::SPAN / 64 : 0;
    const int64_t bytes = n / F::SPAN * F::BLOCK_BYTES;
    Ahead<AHEAD> ahead(next, bytes, to_l2);
    const int64_t fours = n / 4 * 4;
    for (int64_t at = fours / 4 * LINES * 64; AHEAD > 0 && at < bytes; at += 64) ahead.ask();
    for (int64_t b = 0; b < fours; b += 4) {
        for (int64_t line = 0; line < LINES; ++line) ahead.ask();
        for (int i = 0; i < QUADS; ++i) acc[i] = add_four<F>(rows + i * FEW, n, b, 4, x, acc[i]);
    }
    for (int i = 0; i < QUADS && fours < n; ++i)
        acc[i] = add_four<F>(rows + i * FEW, n, fours, n - fours, x, acc[i]);
}

// Multiplies QUADS times FEW rows (pointers may repeat) by one vector: y[0 .. QUADS * FEW - 1]. Prefetches
// `num_next` rows: none, as many as are read, or twice as many.
template <class F, int QUADS>
inline void dot_few(const uint8_t* const* rows, const uint8_t* const* next, int num_next, int64_t n,
                    const PackedBlocks<F>& x, float* y, bool to_l2 = false) {
    Floats acc[QUADS];
    for (Floats& sums : acc) sums = zero();
    if (num_next == 0)
        add_few<F, QUADS, 0>(rows, next, n, x, acc, to_l2);
    else if (num_next == QUADS * FEW)
        add_few<F, QUADS, QUADS * FEW>(rows, next, n, x, acc, to_l2);
    else
        add_few<F, QUADS, 2 * QUADS * FEW>(rows, next, n, x, acc, to_l2);
    for (int i = 0; i < QUADS; ++i, y += FEW) {
        alignas(64) float part[LANES];
        store_floats(part, acc[i]);
        for (int r = 0; r < FEW; ++r)
            y[r] = (part[few_lane(r, 0)] + part[few_lane(r, 1)]) +
                   (part[few_lane(r, 2)] + part[few_lane(r, 3)]);
    }
}

// Multiplies rows a0 .. a1-1 by one vector, two times FEW at a time, and prefetches rows of the queue.
template <class F>
inline void dot_queued(const Rows& rows, const PackedBlocks<F>& x, int64_t n, float* y, int64_t a0,
                       int64_t a1) {
    auto dot = [&](auto quads, int64_t a) {
        constexpr int QUADS = decltype(quads)::VALUE, ROWS = QUADS * FEW;
        const int64_t valid = a1 - a < ROWS ? a1 - a : ROWS;
        const uint8_t *row[ROWS], *then[2 * ROWS];
        for (int64_t r = 0; r < ROWS; ++r) row[r] = row_of(rows, r < valid ? a + r : a);
        int num_then = rows.queue->take(then, ROWS) ? ROWS : 0;
        if (rows.queue->size() > a1 - a - valid && rows.queue->take(then + ROWS, ROWS))
            num_then = 2 * ROWS;
        float sums[ROWS];
        dot_few<F, QUADS>(row, then, num_then, n, x, sums, queue_to_l2);
        __builtin_memcpy(y + a, sums, valid * sizeof(float));
    };
    int64_t a = a0;
    for (; a1 - a > FEW; a += 2 * FEW) dot(Count<2>{}, a);
    if (a < a1) dot(Count<1>{}, a);
}

// A number of up to 16 blocks from b0 on (0: their scales), one vector of LANES rows per block.
template <class F, int NUMBER = 0>
inline void tile_scales(const uint8_t* const* rows, int64_t n, int64_t b0, float (*out)[LANES]) {
    static_assert(CHUNK == 16, "read_scales() reads a chunk");
    alignas(64) float scale[LANES][CHUNK];
    read_scales<F, NUMBER>(rows, LANES, n, b0, n - b0 < CHUNK ? n - b0 : CHUNK, scale);
    for (int64_t i = 0; i < 16; i += 4) {
        const uint8_t* four[LANES];
        for (int r = 0; r < LANES; ++r) four[r] = reinterpret_cast<const uint8_t*>(scale[r] + i);
        Ints vectors[4];
        transpose_16(four, vectors);
        __builtin_memcpy(out[i], vectors, sizeof vectors);
    }
}

// The quants of block b of LANES rows, four bytes of each at a time.
template <class F>
inline void gather_quants(const uint8_t* const* rows, int64_t n, int64_t b, Ints* quarter) {
    constexpr int64_t FIRST = F::QUANT_BYTES % 16;  // bytes before whole transpositions
    for (int64_t v = 0; v < FIRST / 4; ++v) {
        int32_t four[LANES];
        for (int r = 0; r < LANES; ++r) __builtin_memcpy(four + r, F::quants(rows[r], n, b) + 4 * v, 4);
        __builtin_memcpy(quarter + v, four, sizeof four);
    }
    for (int q = 0; q < F::QUANT_BYTES / 16; ++q) {
        const uint8_t* at[LANES];
        for (int r = 0; r < LANES; ++r) at[r] = F::quants(rows[r], n, b) + FIRST + 16 * q;
        transpose_16(at, quarter + FIRST / 4 + 4 * q);
    }
}

// Levels with TILES_AT_ONCE 2 define it, see blocks_vnni.h.
template <class F, int N, int FIRST, int END>
inline void products_of_tiles(const Ints (*w)[TILE_WEIGHTS<F>], const uint8_t* x, int64_t b, Ints start,
                              Ints* out);

// The products of N tiles' weights w with a block of x over each range: out[range][tile]. X: the type as which x is
// packed; `offset` is added to the weights.
template <class X, int RANGES, int N>
__attribute__((always_inline)) inline void products_of_ranges(const Ints (*w)[TILE_WEIGHTS<X>],
                                                              const uint8_t* values, int64_t b,
                                                              int32_t offset, int32_t sum,
                                                              int32_t first_sum, Ints (*out)[N]) {
    auto range = [&](auto first, auto last, int32_t of_x, Ints* to) {
        const Ints start = Ints{} - offset * of_x;
        if constexpr (N == 1)
            to[0] = tile_products<X, first, last>(w[0], values, b, start);
        else
            products_of_tiles<X, N, first, last>(w, values, b, start, to);
    };
    range(Count<0>{}, Count<8 / RANGES>{}, RANGES == 1 ? sum : first_sum, out[0]);
    if constexpr (RANGES == 2) range(Count<4>{}, Count<8>{}, sum - first_sum, out[1]);
}

// LANES rows (pointers may repeat) in the form that dot_tile() needs; `next` is prefetched.
template <class F>
struct RowsTile {
    const uint8_t* const* rows;
    const uint8_t* next;
    int64_t n;
    alignas(64) float scales[F::NUMBERS][16][LANES];

    void set(const uint8_t* const* of_rows, const uint8_t* then, int64_t blocks) {
        rows = of_rows, next = then, n = blocks;
    }

    // Loads the quants of block b as gather_quants() does; returns its scales and minima.
    inline RowNumbers<F::NUMBERS> load(int64_t b, Ints* quarter) {
        if (b % 16 == 0) {
            tile_scales<F>(rows, n, b, scales[0]);
            if constexpr (F::NUMBERS == 2) tile_scales<F, 1>(rows, n, b, scales[1]);
        }
        const uint8_t* ahead = next + b * LANES / F::SPAN * F::BLOCK_BYTES;
        for (int64_t at = 0; at < LANES * F::BLOCK_BYTES / F::SPAN; at += 64)
            __builtin_prefetch(ahead + at, 0, 2);
        gather_quants<F>(rows, n, b, quarter);
        if constexpr (F::NUMBERS == 2)
            return {load_floats(scales[0][b % 16]), load_floats(scales[1][b % 16])};
        else
            return {load_floats(scales[0][b % 16])};
    }
};

// The sum of a product's four parts.
inline Floats sum_of_four(const Floats* part) {
    return add_floats(add_floats(part[0], part[1]), add_floats(part[2], part[3]));
}

#ifdef HAS_PANELS
#include "panels.h"
#else
// Multiplies rows begin .. end-1 of N tiles of LANES rows each by up to TILE_TOKENS vectors.
template <class F, int N, class Tile>
inline void dot_tile(Tile* tile, int64_t n, const Input& input, float* y, int64_t y_stride,
                     int64_t begin, int64_t end) {
    const PackedBlocks<F> x(input, n);
    const int64_t T = input.count;
    alignas(64) float acc[TILE_TOKENS][4][N][LANES];
    __builtin_memset(acc, 0, T * sizeof acc[0]);
    for (int64_t b = 0; b < n; ++b) {
        // Keeps gcc from holding the row pointers in vector registers, which are needed for sums.
        asm volatile("" ::: "memory");
        Ints w[N][TILE_WEIGHTS<F>];
        RowNumbers<F::NUMBERS> numbers[N];
        for (int i = 0; i < N; ++i) {
            Ints quarter[F::QUANT_BYTES / 4];
            numbers[i] = tile[i].load(b, quarter);
            tile_weights<F>(quarter, w[i]);
        }
        const uint8_t* values = x.values + b / unit<F>() * x.stride;
        const float* x_scale = x.scale + b;
        const int32_t *x_sum = x.sum + b, *first_sum = x.first_sum + b;
        const int64_t p = b % 4;
        for (int64_t t = 0; t < T; ++t) {
            const int64_t of = t * x.next_scale;
            Ints products[F::RANGES][N];
            products_of_ranges<F, F::RANGES, N>(w, values + t * x.next_vector, b, OFFSET<F>, x_sum[of],
                                                first_sum[of], products);
            for (int i = 0; i < N; ++i) {
                float* sum = acc[t][p][i];
                const Ints of_tile[2] = {products[0][i], products[F::RANGES - 1][i]};
                store_floats(
                    sum, add_term<F>(load_floats(sum), of_tile, numbers[i], x_scale[of], x_sum[of]));
            }
        }
    }
    for (int64_t t = 0; t < T; ++t) {
        alignas(64) float sums[N][LANES];
        for (int i = 0; i < N; ++i) {
            Floats part[4];
            for (int p = 0; p < 4; ++p) part[p] = load_floats(acc[t][p][i]);
            store_floats(sums[i], sum_of_four(part));
        }
        __builtin_memcpy(y + t * y_stride, sums[0] + begin, (end - begin) * sizeof(float));
    }
}
#endif

#ifdef LEVEL_AMX
#include "blocks_amx.h"
#endif

template <class F>
void quantise_blocks(const Input& x, int64_t D) {
    constexpr int64_t U = unit<F>();
    const int64_t n = D / BLOCK, n4 = whole_fours(n);
    for (int64_t t = 0; t < x.count; ++t) {
        const PackedBlocks<F> to(x.part(t, t + 1), n);
        for (int64_t b = 0; b < n4; b += 4) {
            alignas(64) int16_t value[4 * BLOCK];
            const float* from = x.vector(t) + b * BLOCK;
            alignas(64) float padded[4 * BLOCK];
            if (n - b < 4) {
                __builtin_memset(padded, 0, sizeof padded);
                __builtin_memcpy(padded, from, (n - b) * BLOCK * sizeof(float));
                from = padded;
            }
            quantise_four(from, value, to.scale + b, to.sum + b, to.first_sum + b);
            if constexpr (F::HAS_ORDER) {
                int16_t in_order[4 * BLOCK];
                __builtin_memcpy(in_order, value, sizeof value);
                for (int64_t i = 0; i < 4 * BLOCK; ++i)
                    value[i] = in_order[i / BLOCK * BLOCK + F::place(i % BLOCK)];
            }
            for (int64_t i = 0; i < 4; i += U)
                quantise_unit<F>(value + i * BLOCK, to.values + (b + i) / U * to.stride);
        }
    }
#ifdef LEVEL_AMX
    if (x.capacity >= LEAST_VECTORS) pack_panels<F>(x, D);
#endif
}
