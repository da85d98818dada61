// Products of tiled rows of q8_0 and q4_0, with the arithmetic of blocks_template.h. Lanes are rows even
// for one vector, and nothing is transposed. Included by rows_template.h.
//
// Blocks are in pairs (those with scales of one byte in fours, those with scales and minima alone), scales before quants, so that a tile is read sequentially in whole cache lines.
// With all scales of a tile before all its quants, a Zen 4 core reads 10 GB/s from memory instead of 26,
// or 18 with prefetching.
//
// q4_0 rows of 576 values with VNNI take 37 instructions for 16 blocks and one vector, planar ones 77.

template <class Planar, class File>
struct Tiled : Planar {
    typedef File InFile;
    static constexpr bool IS_PLANAR = false;
    static constexpr int64_t ROWS = TILE_ROWS;
    static constexpr int64_t NUMBER_BYTES = Planar::NUMBER_BYTES, SPAN = Planar::SPAN,
                             TOGETHER = blocks_together(Planar::HEAD_BYTES);
    static constexpr int64_t SCALE_BYTES = Planar::HEAD_BYTES * TILE_ROWS,
                             TILE_QUANTS = TILE_ROWS * Planar::QUANT_BYTES;
    // Numbers of a block of the file; if there are more than 32 values need, each 32 have their own.
    static constexpr int64_t ALL_NUMBERS = Planar::HEAD_BYTES / NUMBER_BYTES;

    // The first four bytes of row r in block b of a tile; the next four are 4 * TILE_ROWS bytes later.
    static inline const uint8_t* quants_of(const uint8_t* tile, int64_t n, int64_t b, int64_t r) {
        const int64_t first = b / SPAN & -TOGETHER, left = n / SPAN - first;
        const int64_t here = left < TOGETHER ? left : TOGETHER;
        return tile + (first + here) * SCALE_BYTES + b * TILE_QUANTS + 4 * r;
    }
    // The scale of row r in block b, or another number before the quants.
    static inline const uint8_t* scale_of(const uint8_t* tile, int64_t b, int64_t r,
                                          int64_t number = 0) {
        if constexpr (ALL_NUMBERS > Planar::NUMBERS) number += b % SPAN * Planar::NUMBERS;
        return tile + b / SPAN * SCALE_BYTES + (b / SPAN & -TOGETHER) * SPAN * TILE_QUANTS +
               NUMBER_BYTES * (TILE_ROWS * number + r);
    }
    // The numbers of LANES rows from row `lane` on, of the block that is `more` after b and shares its head.
    static inline RowNumbers<Planar::NUMBERS> numbers_of(const uint8_t* tile, int64_t b, int64_t lane,
                                                         int64_t more = 0) {
        const int64_t first = ALL_NUMBERS > Planar::NUMBERS ? more * Planar::NUMBERS : 0;
        const Floats scale = in_register(numbers_at<Planar>(scale_of(tile, b, lane, first)));
        if constexpr (Planar::NUMBERS == 2)
            return {scale, numbers_at<Planar>(scale_of(tile, b, lane, first + 1))};
        else
            return {scale};
    }
    // Block `block` of row r as in a file, which has n blocks of 32 values.
    static inline void copy_block(const uint8_t* tile, int64_t n, int64_t block, int64_t r,
                                  uint8_t* to) {
        const int64_t b = block * SPAN;
        for (int64_t i = 0; i < ALL_NUMBERS; ++i, to += NUMBER_BYTES)
            __builtin_memcpy(to, scale_of(tile, b, r, i), NUMBER_BYTES);
        for (int64_t at = 0; at < SPAN * Planar::QUANT_BYTES; at += 4)
            __builtin_memcpy(to + at, quants_of(tile, n, b, r) + TILE_ROWS * at, 4);
    }
};

template <class Planar, class File>
constexpr bool IS_TILED<Tiled<Planar, File>> = true;

// LEAST_ASKING is the number of vectors from which a product takes so long that the hardware
// prefetcher pauses, so tiles are prefetched in software, TILED_AHEAD bytes ahead. Two Zen 4 cores,
// the head of SmolLM2 in q8_0 without and with: 2 vectors 0.89 and 1.30 ms, 4 vectors 0.88 and 1.1,
// 8 vectors 1.65 and 1.37, 16 vectors 3.3 and 2.75. On a Zen 5 all products prefetch stream_ahead
// bytes ahead: two cores, GB/s of large matrices without any prefetching and with this, q8_0 2
// vectors 52 and 58, 3 vectors 38 and 51, 5 vectors 26 and 38; 8 vectors with 2304 bytes 30, with
// 9216 36.
constexpr int64_t LEAST_ASKING = 6, TILED_AHEAD = 2304;

// The memory to prefetch while a tile is read. For few vectors the next tile is left to the hardware
// prefetcher (GB/s of a Zen 4 core from memory, q4_0 rows of 576 values and one vector: 26, and 7 with
// software prefetching), unless stream_ahead is set for this processor.
struct TiledAhead {
    const uint8_t* after;        // as many bytes from here on as a tile has; or null
    const uint8_t* const* also;  // for each row, the address of further row bytes; or null
    bool is_asking = false;      // whether the next tile is prefetched too
    // If not null, all tiles are prefetched, stream_ahead bytes ahead. `end` is where they end; beyond it,
    // the bytes from `then` on are prefetched, if that is not null.
    const uint8_t* end = nullptr;
    const uint8_t* then = nullptr;
    // If not 0, every other tile is read at the same time, and tiles have so many bytes.
    int64_t other_bytes = 0;

    // The address to prefetch instead of which offset `from` of the tile is read; or null.
    __attribute__((always_inline)) inline const uint8_t* address(const uint8_t* tile,
                                                                 int64_t from) const {
        if (!end) return after ? after + from : nullptr;
        const int64_t ahead = stream_ahead + from;
        const uint8_t* at = tile + ahead + (other_bytes ? ahead / other_bytes * other_bytes : 0);
        return at >= end && then ? then + (at - end) : at;
    }

    // Prefetches what is due when `count` bytes from offset `from` of the tile are read. gcc 12
    // drops calls of a function that only prefetches, unless it is inlined early.
    __attribute__((always_inline)) inline void ask(const uint8_t* tile, int64_t from,
                                                   int64_t count) const {
        if (const uint8_t* at = address(tile, from))
            for (int64_t i = 0; i < count; i += 64) __builtin_prefetch(at + i);
        ask_next(tile, from, count);
    }

    // The same for block b of all rows, with block_bytes per row, but for the lines at address().
    __attribute__((always_inline)) inline void ask_others(const uint8_t* tile, int64_t b,
                                                          int64_t block_bytes) const {
        ask_next(tile, b * TILE_ROWS * block_bytes, TILE_ROWS * block_bytes);
        if (also && b * block_bytes % 64 < block_bytes)
            for (int64_t r = 0; r < TILE_ROWS; ++r) __builtin_prefetch(also[r] + b * block_bytes);
    }

    // For tile 0 or 1 of two that are read together.
    TiledAhead of_pair(int tile, int64_t tile_bytes) const {
        TiledAhead one = *this;
        one.other_bytes = tile_bytes;
        if (after) one.after += tile * tile_bytes;
        if (also) one.also += tile * TILE_ROWS;
        return one;
    }

  private:
    __attribute__((always_inline)) inline void ask_next(const uint8_t* tile, int64_t from,
                                                        int64_t count) const {
        for (int64_t i = 0; is_asking && i < count; i += 64)
            __builtin_prefetch(tile + TILED_AHEAD + from + i);
    }
};

// LANES rows of a tile, from row `lane` on.
template <class F>
struct TiledTile {
    const uint8_t* tile;
    int64_t lane, n;
    const TiledAhead* ahead;  // or null

    // gcc 12 would otherwise call it for each block, with the quants on the stack.
    __attribute__((always_inline)) inline RowNumbers<F::NUMBERS> load(int64_t b, Ints* quarter) const {
        const int64_t from = b * TILE_ROWS * F::BLOCK_BYTES / F::SPAN;
        const uint8_t* next = ahead ? ahead->address(tile, from) : nullptr;
        if (ahead) ahead->ask_others(tile, b, F::BLOCK_BYTES / F::SPAN);
        const RowNumbers<F::NUMBERS> numbers = F::numbers_of(tile, b, lane);
        if (!next) {
            for (int64_t v = 0; v < F::QUANT_BYTES / 4; ++v) quarter[v] = load_four(b, v);
            return numbers;
        }
        for (int64_t v = 0; v < F::QUANT_BYTES / 4; ++v) {
            __builtin_prefetch(next + 64 * v);
            quarter[v] = load_four(b, v);
        }
        __builtin_prefetch(next + 16 * F::QUANT_BYTES);
        return numbers;
    }

    // Prefetches what is due when the blocks of all rows are read that share a head and begin at b.
    __attribute__((always_inline)) inline void ask(int64_t b) const {
        if (!ahead) return;
        ahead->ask_others(tile, b / F::SPAN, F::BLOCK_BYTES);
        constexpr int64_t BYTES = TILE_ROWS * F::BLOCK_BYTES;
        if (const uint8_t* next = ahead->address(tile, b / F::SPAN * BYTES))
            for (int64_t at = 0; at < BYTES; at += 64) __builtin_prefetch(next + at);
    }

  private:
    // Bytes 4 * v .. 4 * v + 3 of the quants of block b.
    __attribute__((always_inline)) inline Ints load_four(int64_t b, int64_t v) const {
        return load_in_order(F::quants_of(tile, n, b, lane) + 4 * TILE_ROWS * v);
    }
};

// One vector: y[0 .. LANES-1].
//
// Blocks are not unrolled: the hardware prefetcher follows a load instruction whose addresses are less than
// 2,048 bytes apart, and four blocks of q8_0 are 2,176 bytes. GB/s of q8_0 from memory, two Zen 5 cores,
// rows of 2,048 values, four blocks unrolled and none: without software prefetching 25 and 43, with it 50
// and 60.
template <class F>
inline void dot_one(const TiledTile<F>& tile, const Input& input, float* y) {
    const PackedBlocks<F> x(input, tile.n);
    Floats next[4] = {zero(), zero(), zero(), zero()};  // the sums of blocks b, b + 1, b + 2 and b + 3
    auto rotate = [&]() __attribute__((always_inline)) {
        const Floats first = next[0];
        next[0] = next[1], next[1] = next[2], next[2] = next[3], next[3] = first;
    };
#pragma GCC unroll 1
    for (int64_t b = 0; b < tile.n; ++b) {
        Ints quarter[F::QUANT_BYTES / 4], w[TILE_WEIGHTS<F>];
        const RowNumbers<F::NUMBERS> numbers = tile.load(b, quarter);
        tile_weights<F>(quarter, w);
        Ints products[F::RANGES][1];
        products_of_ranges<F, F::RANGES, 1>(&w, x.values + b / unit<F>() * x.stride, b, OFFSET<F>,
                                            x.sum[b], x.first_sum[b], products);
        const Ints of_ranges[2] = {products[0][0], products[F::RANGES - 1][0]};
        next[0] = add_term<F>(next[0], of_ranges, numbers, x.scale[b], x.sum[b]);
        rotate();
    }
    for (int64_t b = tile.n; b % 4; ++b) rotate();
    store_floats(y, sum_of_four(next));
}

#if defined(LEVEL_AVX512) || defined(LEVEL_AVX2)
#include "few_vectors.h"
#endif
