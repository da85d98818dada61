// Products of tiled rows of K-quants, with the arithmetic of k_products.h: lanes are rows even for
// one vector, and quants are not transposed. Included by rows_template.h.

// d of LANES rows, times the format's unit.
template <class F>
inline Floats d_of(const uint8_t* halves) {
    const Floats d = load_f16(halves);
    return F::UNIT == 1.0f ? d : mul(d, broadcast(F::UNIT));
}

// LANES rows of a tile, from row `lane` on, in the form that dot_super_tile() needs.
template <class F>
struct SuperTile {
    typedef F InFile;
    static constexpr SuperShape SHAPE = super_shape(F::KIND);
    static constexpr int64_t ROWS = TILE_ROWS;

    const uint8_t* tile;
    int64_t lane, n;          // n: blocks of a row
    const TiledAhead* ahead;  // or null

    static constexpr int N = F::NUM_FACTORS;
    typedef uint8_t Numbers[F::HAS_MINIMA ? 2 * N : N][TILE_ROWS];

    // The scales and then the minima of each row of block s: in `room`, unless the bytes in the tile are they.
    const uint8_t* numbers(int64_t s, Numbers& room) const {
        const uint8_t* scales = tile + super_place(SHAPE, n, s).scales;
        if constexpr (!F::HAS_NUMBERS) {
            __builtin_memset(room, 1, sizeof room);
            return room[0];
        } else if constexpr (F::ARE_NUMBERS_BYTES) {
            return scales;
        } else if constexpr (F::HAS_WORDS) {
            typedef uint16_t Words16 __attribute__((vector_size(2 * TILE_ROWS)));
            typedef uint8_t Bytes16 __attribute__((vector_size(TILE_ROWS)));
            Words16 words[3];
            __builtin_memcpy(words, tile + super_place(SHAPE, n, s).halves + 2 * TILE_ROWS,
                             sizeof words);
            F::numbers(words, [&](int i, const Words16& number) {
                const Bytes16 bytes = __builtin_convertvector(number, Bytes16);
                __builtin_memcpy(room[i], &bytes, sizeof bytes);
            });
            return room[0];
        } else {
            for (int64_t at = 0; at < 4 * TILE_ROWS; at += 4 * LANES) {
                auto load = [&](int i) { return load_ints(scales + TILE_ROWS * i + at); };
                auto keep = [&](int number, Ints four) {
                    __builtin_memcpy(room[number] + at, &four, sizeof four);
                };
                F::numbers(load, keep);
            }
            return room[0];
        }
    }

    void factors(int64_t s, SuperFactors<F>& to) const {
        const uint8_t* halves = tile + super_place(SHAPE, n, s).halves + 2 * lane;
        const Floats d = d_of<F>(halves);
        alignas(64) Numbers room;
        const uint8_t* number = numbers(s, room) + lane;
        for (int i = 0; i < N; ++i) store_floats(to.factor[i], mul(load_i8(number + TILE_ROWS * i), d));
        if constexpr (F::HAS_MINIMA) {
            const Floats m = load_f16(halves + 2 * TILE_ROWS);
            for (int i = 0; i < N; ++i)
                store_floats(to.minimum[i], mul(load_i8(number + TILE_ROWS * (N + i)), m));
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
        const uint8_t* at = tile + super_place(SHAPE, n, s).quants + 4 * lane;
        for (int v = 0; v < 8; ++v) to[v] = load_in_order(at + 4 * TILE_ROWS * F::quants_at(pair, v));
    }

    // Block s of row r as in a file.
    static void copy_block(const uint8_t* tile, int64_t n, int64_t s, int64_t r, uint8_t* to) {
        for_pieces(SHAPE, n, s, r, [&](int64_t at, int64_t place, int64_t count) {
            __builtin_memcpy(to + at, tile + place, count);
        });
    }
};

// One vector: y[0 .. LANES-1].
template <class F>
inline void dot_one(const SuperTile<F>& tile, const Input& input, float* y) {
    const PackedBlocks<Q8_0> x(input, 8 * tile.n);
    Floats part[8];
    for (Floats& each : part) each = zero();
    for (int64_t s = 0; s < tile.n; ++s) {
        SuperFactors<F> factors;
        tile.factors(s, factors);
        for_parts<F>(tile, s, [&](int p, const Ints* bytes) __attribute__((always_inline)) {
            const int64_t b = 8 * s + p;
            Ints w[TILE_WEIGHTS<Q8_0>];
            byte_weights<Q8_0>(bytes, w);
            const uint8_t* values = x.values + b / unit<Q8_0>() * x.stride;
            part[p] = fused(broadcast(x.scale[b]),
                            factors.term(p, w, values, b, x.sum[b], x.first_sum[b]), part[p]);
        });
    }
    Floats sum[4];
    for (int i = 0; i < 4; ++i) sum[i] = add_floats(part[2 * i], part[2 * i + 1]);
    store_floats(y, sum_of_four(sum));
}

#if defined(LEVEL_AVX512) || defined(LEVEL_AVX2)
#include "k_few_vectors.h"
#endif
