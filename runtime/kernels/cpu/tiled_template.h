// Products of tiled rows of q8_0 and q4_0, with the arithmetic of blocks_template.h. Lanes are rows even
// for one vector, and nothing is transposed. Included by rows_template.h.
//
// Blocks are in pairs, scales before quants, so that a tile is read sequentially in whole cache lines.
// With all scales of a tile before all its quants, a Zen 4 core reads 10 GB/s from memory instead of 26,
// or 18 with prefetching.
//
// q4_0 rows of 576 values with VNNI take 37 instructions for 16 blocks and one vector, planar ones 77.

template <class Planar>
struct Tiled : Planar {
    static constexpr bool IS_PLANAR = false;
    static constexpr int64_t SCALE_BYTES = 2 * TILE_ROWS, TILE_QUANTS = TILE_ROWS * Planar::QUANT_BYTES;

    // The first four bytes of row r in block b of a tile; the next four are 4 * TILE_ROWS bytes later.
    static inline const uint8_t* quants_of(const uint8_t* tile, int64_t n, int64_t b, int64_t r) {
        const int64_t first = b & -2, scales = n - first < 2 ? SCALE_BYTES : 2 * SCALE_BYTES;
        return tile + first * SCALE_BYTES + scales + b * TILE_QUANTS + 4 * r;
    }
    static inline const uint8_t* scale_of(const uint8_t* tile, int64_t b, int64_t r) {
        return tile + b * SCALE_BYTES + (b & -2) * TILE_QUANTS + 2 * r;
    }
};

struct Q8_0Tiled : Tiled<Q8_0Planar> {};
struct Q4_0Tiled : Tiled<Q4_0Planar> {};

template <>
constexpr bool IS_TILED<Q8_0Tiled> = true;
template <>
constexpr bool IS_TILED<Q4_0Tiled> = true;

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
    __attribute__((always_inline)) inline Floats load(int64_t b, Ints* quarter) const {
        const int64_t from = b * TILE_ROWS * F::BLOCK_BYTES;
        const uint8_t* next = ahead ? ahead->address(tile, from) : nullptr;
        if (ahead) ahead->ask_others(tile, b, F::BLOCK_BYTES);
        const Floats scale = in_register(load_f16(F::scale_of(tile, b, lane)));
        if (!next) {
            for (int64_t v = 0; v < F::QUANT_BYTES / 4; ++v) quarter[v] = load_four(b, v);
            return scale;
        }
        for (int64_t v = 0; v < F::QUANT_BYTES / 4; ++v) {
            __builtin_prefetch(next + 64 * v);
            quarter[v] = load_four(b, v);
        }
        __builtin_prefetch(next + 16 * F::QUANT_BYTES);
        return scale;
    }

    // Prefetches what is due when block b of all rows is read.
    __attribute__((always_inline)) inline void ask(int64_t b) const {
        if (!ahead) return;
        ahead->ask_others(tile, b, F::BLOCK_BYTES);
        if (const uint8_t* next = ahead->address(tile, b * TILE_ROWS * F::BLOCK_BYTES))
            for (int64_t at = 0; at < TILE_ROWS * F::BLOCK_BYTES; at += 64)
                __builtin_prefetch(next + at);
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
inline void dot_tiled_one(const TiledTile<F>& tile, const PackedBlocks<F>& x, float* y) {
    Floats next[4] = {zero(), zero(), zero(), zero()};  // the sums of blocks b, b + 1, b + 2 and b + 3
    auto rotate = [&]() __attribute__((always_inline)) {
        const Floats first = next[0];
        next[0] = next[1], next[1] = next[2], next[2] = next[3], next[3] = first;
    };
#pragma GCC unroll 1
    for (int64_t b = 0; b < tile.n; ++b) {
        Ints quarter[F::QUANT_BYTES / 4], w[TILE_WEIGHTS<F>];
        const Floats scale = tile.load(b, quarter);
        tile_weights<F>(quarter, w);
        const Ints products =
            tile_products<F>(w, x.values + b / unit<F>() * x.stride, b, Ints{} - OFFSET<F> * x.sum[b]);
        next[0] = fused(to_floats(products), mul(scale, broadcast(x.scale[b])), next[0]);
        rotate();
    }
    for (int64_t b = tile.n; b % 4; ++b) rotate();
    store_floats(y, add_floats(add_floats(next[0], next[1]), add_floats(next[2], next[3])));
}

#ifdef LEVEL_AVX2
#include "tiled_halves.h"
#endif

// Multiplies rows a0 .. a1-1 of one tile; `rows` has no list. y[0] is the product of row a0.
template <class F>
inline void dot_tiled_rows(const Rows& rows, const Input& x, float* y, int64_t y_stride, int64_t a0,
                           int64_t a1, const TiledAhead& ahead) {
    const int64_t n = rows.D / BLOCK, first = a0 / TILE_ROWS * TILE_ROWS;
    const uint8_t* at = rows.weight + first * rows.stride;
#ifdef LEVEL_AVX2
    const bool has_both_halves = a0 < first + LANES && a1 > first + LANES;
    if (x.count == 1 && has_both_halves) {
        alignas(64) float sums[TILE_ROWS];
        dot_whole_tile<F>({at, 0, n, &ahead}, PackedBlocks<F>(x, n), sums);
        __builtin_memcpy(y, sums + (a0 - first), (a1 - a0) * sizeof(float));
        return;
    }
#endif
#ifdef HAS_PANELS
    if (x.count > 1)
        return for_halves(x, a0 - first, has_both_halves,
                          [&](auto halves, int64_t lane, int64_t t, const Input& part) {
            const TiledTile<F> tile[2] = {{at, lane, n, lane + t == 0 ? &ahead : nullptr},
                                          {at, LANES, n, nullptr}};
            dot_panel<F, decltype(halves)::VALUE>(tile, n, part, y + t * y_stride, y_stride,
                                                  a0 - first - lane, a1 - first - lane);
        });
#endif
    for (int64_t lane = a0 % TILE_ROWS / LANES * LANES; first + lane < a1; lane += LANES) {
        const int64_t begin = a0 > first + lane ? a0 - first - lane : 0;
        const int64_t end = a1 - first - lane < LANES ? a1 - first - lane : LANES;
        float* to = y + first + lane + begin - a0;
        const TiledTile<F> tile = {at, lane, n, lane == 0 ? &ahead : nullptr};
        if (x.count == 1) {
            alignas(64) float sums[LANES];
            dot_tiled_one<F>(tile, PackedBlocks<F>(x, n), sums);
            __builtin_memcpy(to, sums + begin, (end - begin) * sizeof(float));
            continue;
        }
#ifndef HAS_PANELS
        for (int64_t t = 0; t < x.count; t += TILE_TOKENS) {
            const int64_t t1 = t + TILE_TOKENS < x.count ? t + TILE_TOKENS : x.count;
            const TiledTile<F> again = {at, lane, n, t == 0 ? tile.ahead : nullptr};
            dot_tile<F, 1>(&again, n, x.part(t, t1), to + t * y_stride, y_stride, begin, end);
        }
#endif
    }
}

// Multiplies two tiles together, those of rows a0 .. a0 + 2 * TILE_ROWS - 1.
template <class F>
inline void dot_two_tiles(const Rows& rows, const Input& x, float* y, int64_t y_stride, int64_t a0,
                          const TiledAhead& ahead) {
    static_assert(TILES_AT_ONCE == 1 || LANES == TILE_ROWS);
    const int64_t n = rows.D / BLOCK;
    const int64_t tile_bytes = TILE_ROWS * rows.stride;
    const uint8_t* at = rows.weight + a0 * rows.stride;
    const TiledAhead aheads[2] = {ahead.of_pair(0, tile_bytes), ahead.of_pair(1, tile_bytes)};
    for (int64_t t = 0; t < x.count; t += TILE_TOKENS) {
        const int64_t t1 = t + TILE_TOKENS < x.count ? t + TILE_TOKENS : x.count;
        const TiledTile<F> tiles[2] = {{at, 0, n, t == 0 ? aheads : nullptr},
                                       {at + tile_bytes, 0, n, t == 0 ? aheads + 1 : nullptr}};
        dot_tile<F, 2>(tiles, n, x.part(t, t1), y + t * y_stride, y_stride, 0, 2 * TILE_ROWS);
    }
}

// Calls use(a, end, ahead) for the tiles, or their parts, of rows a0 .. a1-1 without a list; TILES at a time.
// `is_asking`: the next tile is prefetched even if stream_ahead is not set.
template <int TILES = 1, class Use>
inline void for_tiles(const Rows& rows, int64_t a0, int64_t a1, bool is_asking, const Use& use) {
    const bool is_stream = stream_ahead > 0;
    const uint8_t* last = is_stream ? end_of_run(rows, a1) : nullptr;
    for (int64_t a = a0, end; a < a1; a = end) {
        const int64_t first = a / TILE_ROWS * TILE_ROWS;
        const bool are_whole = a == first && a1 - a >= TILES * TILE_ROWS;
        end = first + (are_whole ? TILES : 1) * TILE_ROWS;
        end = end < a1 ? end : a1;
        const bool has_also = rows.also && end - a >= TILE_ROWS;
        const TiledAhead ahead = {end == a1 && !is_stream ? rows.after : nullptr,
                                  has_also ? rows.also + (a - a0) : nullptr, is_asking && !is_stream,
                                  last, rows.after};
        use(a, end, ahead);
    }
}

// Vectors from which two tiles are multiplied together. GMAC/s of one Zen 5 core, rows of 2,048 values, one
// tile at a time and two: 8 vectors 170 and 185 (q4_0), 163 and 173 (q8_0), 64 vectors 182 and 207, 182 and 203.
constexpr int64_t LEAST_FOR_TWO_TILES = 8;

// For a row of a list, the LANES rows of its tile that include it are computed (half of a tile with AVX2).
template <class F>
void dot_tiled(const Rows& rows, const Input& x, float* y, int64_t y_stride, int64_t a0, int64_t a1) {
#ifdef LEVEL_AMX
    if (x.count >= LEAST_VECTORS && !rows.index && a0 % TILE_ROWS == 0)
        return dot_tiles<F>(rows, x, y, y_stride, a0, a1);
#endif
    if (rows.index) {
        Rows whole = rows;
        whole.index = nullptr;
        for (int64_t a = a0; a < a1; ++a) {
            const int64_t row = rows.index[a];
            dot_tiled_rows<F>(whole, x, y + a, y_stride, row, row + 1, {nullptr, nullptr});
        }
        return;
    }
    const bool is_asking = x.count >= LEAST_ASKING;
    if constexpr (TILES_AT_ONCE == 2) {
        if (x.count >= LEAST_FOR_TWO_TILES) {
            for_tiles<2>(rows, a0, a1, is_asking, [&](int64_t a, int64_t end, const TiledAhead& ahead) {
                if (end - a == 2 * TILE_ROWS)
                    return dot_two_tiles<F>(rows, x, y + a, y_stride, a, ahead);
                dot_tiled_rows<F>(rows, x, y + a, y_stride, a, end, ahead);
            });
            return;
        }
    }
    for_tiles(rows, a0, a1, is_asking, [&](int64_t a, int64_t end, const TiledAhead& ahead) {
        dot_tiled_rows<F>(rows, x, y + a, y_stride, a, end, ahead);
    });
}

template <class F>
void unpack_tiled(const Rows& rows, float* out, int64_t a0, int64_t a1) {
    const int64_t n = rows.D / BLOCK;
    for (int64_t a = a0; a < a1; ++a) {
        const int64_t row = rows.index ? rows.index[a] : a, r = row % TILE_ROWS;
        const uint8_t* tile = rows.weight + (row - r) * rows.stride;
        for (int64_t b = 0; b < n; ++b) {
            uint8_t quants[F::QUANT_BYTES];
            for (int64_t at = 0; at < F::QUANT_BYTES; at += 4)
                __builtin_memcpy(quants + at, F::quants_of(tile, n, b, r) + TILE_ROWS * at, 4);
            const Floats scale = broadcast(f16_to_float(F::scale_of(tile, b, r)));
            Floats w[VECTORS];
            F::unpack(quants, w);
            for (int v = 0; v < VECTORS; ++v)
                store_floats(out + a * rows.D + b * BLOCK + v * LANES, mul(w[v], scale));
        }
    }
}
