// Products of tiled rows of K-quants, with the arithmetic of k_products.h: lanes are rows even for
// one vector, and quants are not transposed. Included by rows_template.h.

#include "k_tiles.h"

// LANES rows of a tile, from row `lane` on, in the form that dot_super_tile() needs.
template <class F>
struct SuperTile {
    static constexpr SuperShape SHAPE = super_shape(F::KIND);

    const uint8_t* tile;
    int64_t n, lane;          // n: blocks of a row
    const TiledAhead* ahead;  // or null

    // The numbers of block s: `room` with eight scales and eight minima of each row, below 64, or q6_K's scales, which
    // stay in the tile.
    const uint8_t* numbers(int64_t s, uint8_t (*room)[TILE_ROWS]) const {
        const uint8_t* scales = tile + super_place(SHAPE, n, s).scales;
        if constexpr (!F::HAS_MINIMA) return scales;
        for (int64_t at = 0; at < 4 * TILE_ROWS; at += 4 * LANES, scales += 4 * LANES) {
            const Ints first = load_ints(scales), second = load_ints(scales + 64),
                       third = load_ints(scales + 128);
            auto keep = [&](int number, Ints four) {
                __builtin_memcpy(room[number] + at, &four, sizeof four);
            };
            keep(0, first & 0x3f3f3f3f);
            keep(4, (third & 0x0f0f0f0f) | (first >> 2 & 0x30303030));
            keep(8, second & 0x3f3f3f3f);
            keep(12, (third >> 4 & 0x0f0f0f0f) | (second >> 2 & 0x30303030));
        }
        return room[0];
    }

    void factors(int64_t s, SuperFactors<F>& to) const {
        const SuperPlace place = super_place(SHAPE, n, s);
        const Floats d = load_f16(tile + place.floats + 2 * lane);
        alignas(64) uint8_t room[16][TILE_ROWS];
        const uint8_t* number = numbers(s, room) + lane;
        if constexpr (F::HAS_MINIMA) {
            const Floats m = load_f16(tile + place.floats + 2 * (TILE_ROWS + lane));
            for (int p = 0; p < 8; ++p) {
                store_floats(to.factor[p], mul(load_i8(number + TILE_ROWS * p), d));
                store_floats(to.minimum[p], mul(load_i8(number + TILE_ROWS * (p + 8)), m));
            }
        } else {
            for (int i = 0; i < 16; ++i)
                store_floats(to.factor[i], mul(load_i8(number + TILE_ROWS * i), d));
        }
    }

    void bits(int64_t s, Ints* to) const {
        const uint8_t* at = tile + super_place(SHAPE, n, s).bits + 4 * lane;
        for (int64_t v = 0; v < F::BITS_BYTES / 4; ++v) to[v] = load_ints(at + 4 * TILE_ROWS * v);
    }

    // Prefetches what is due when a pair of parts of all rows is read.
    __attribute__((always_inline)) inline void ask(int64_t s, int pair) const {
        constexpr int64_t BYTES = TILE_ROWS * F::BLOCK_BYTES / 4;  // of a pair, on average
        if (ahead) ahead->ask(tile, s * TILE_ROWS * F::BLOCK_BYTES + pair * BYTES, BYTES);
    }

    __attribute__((always_inline)) inline void quants(int64_t s, int pair, Ints* to) const {
        ask(s, pair);
        const uint8_t* at = tile + super_place(SHAPE, n, s).quants + 32 * TILE_ROWS * pair + 4 * lane;
        for (int v = 0; v < 8; ++v) to[v] = load_in_order(at + 4 * TILE_ROWS * v);
    }

    // Block s of a row of the tile as in a file.
    void copy_block(int64_t s, int64_t r, uint8_t* to) const {
        for_pieces(SHAPE, n, s, r, [&](int64_t at, int64_t place, int64_t count) {
            __builtin_memcpy(to + at, tile + place, count);
        });
    }
};

#ifdef LEVEL_AVX2
#include "k_tiled_halves.h"
#endif

// Multiplies rows a0 .. a1-1 of one tile; `rows` has no list. y[0] is the product of row a0.
template <class F>
inline void dot_tiled_super_rows(const Rows& rows, const Input& x, float* y, int64_t y_stride,
                                 int64_t a0, int64_t a1, const TiledAhead* ahead) {
    const int64_t n = rows.D / BLOCK, first = a0 / TILE_ROWS * TILE_ROWS;
    const uint8_t* at = rows.weight + first * rows.stride;
#ifdef LEVEL_AVX2
    const bool has_both_halves = a0 < first + LANES && a1 > first + LANES;
    if (x.count == 1 && has_both_halves) {
        alignas(64) float sums[TILE_ROWS];
        dot_whole_super_tile<F>({at, n / 8, 0, ahead}, PackedBlocks<Q8_0>(x, n), sums);
        __builtin_memcpy(y, sums + (a0 - first), (a1 - a0) * sizeof(float));
        return;
    }
#endif
#ifdef HAS_PANELS
    if (x.count > 1)
        return for_halves(x, a0 - first, has_both_halves,
                          [&](auto halves, int64_t lane, int64_t t, const Input& part) {
            const SuperTile<F> tile[2] = {{at, n / 8, lane, lane + t == 0 ? ahead : nullptr},
                                          {at, n / 8, LANES, nullptr}};
            dot_super_panel<F, decltype(halves)::VALUE>(tile, n, part, y + t * y_stride, y_stride,
                                                        a0 - first - lane, a1 - first - lane);
        });
#endif
    for (int64_t lane = a0 % TILE_ROWS / LANES * LANES; first + lane < a1; lane += LANES) {
        const int64_t begin = a0 > first + lane ? a0 - first - lane : 0;
        const int64_t end = a1 - first - lane < LANES ? a1 - first - lane : LANES;
        float* to = y + first + lane + begin - a0;
        if (x.count == 1) {
            alignas(64) float sums[LANES];
            dot_super_tile_one<F>(SuperTile<F>{at, n / 8, lane, lane == 0 ? ahead : nullptr}, n,
                                  PackedBlocks<Q8_0>(x, n), sums);
            __builtin_memcpy(to, sums + begin, (end - begin) * sizeof(float));
            continue;
        }
#ifndef HAS_PANELS
        for (int64_t t = 0; t < x.count; t += TILE_TOKENS) {
            const int64_t t1 = t + TILE_TOKENS < x.count ? t + TILE_TOKENS : x.count;
            const SuperTile<F> tile = {at, n / 8, lane, t == 0 && lane == 0 ? ahead : nullptr};
            dot_super_tile<F>(tile, n, x.part(t, t1), to + t * y_stride, y_stride, begin, end);
        }
#endif
    }
}

// For a row of a list, the LANES rows of its tile that include it are computed (half of a tile with AVX2).
template <class F>
void dot_tiled_super(const Rows& rows, const Input& x, float* y, int64_t y_stride, int64_t a0,
                     int64_t a1) {
    if (rows.index) {
        Rows whole = rows;
        whole.index = nullptr;
        for (int64_t a = a0; a < a1; ++a)
            dot_tiled_super_rows<F>(whole, x, y + a, y_stride, rows.index[a], rows.index[a] + 1,
                                    nullptr);
        return;
    }
    // Here, unlike in dot_tiled(), tiles are prefetched from two vectors on: unpacking takes so
    // long that the hardware prefetcher pauses (two Zen 5 cores, q4_K and 2 vectors: 11 GB/s
    // without, 31 with).
    for_tiles(rows, a0, a1, x.count > 1, [&](int64_t a, int64_t end, const TiledAhead& ahead) {
        dot_tiled_super_rows<F>(rows, x, y + a, y_stride, a, end, &ahead);
    });
}

template <class F>
void unpack_tiled_super(const Rows& rows, float* out, int64_t a0, int64_t a1) {
    const int64_t n = rows.D / SUPER_BLOCK;
    for (int64_t a = a0; a < a1; ++a) {
        const int64_t row = rows.index ? rows.index[a] : a, r = row % TILE_ROWS;
        const SuperTile<F> tile = {rows.weight + (row - r) * rows.stride, n, 0, nullptr};
        for (int64_t s = 0; s < n; ++s) {
            uint8_t block[F::BLOCK_BYTES];
            tile.copy_block(s, r, block);
            unpack_row<F>(block, block, SUPER_BLOCK, out + a * rows.D + s * SUPER_BLOCK);
        }
    }
}
