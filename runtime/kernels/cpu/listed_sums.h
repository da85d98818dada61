// Sums of a window's rows for several vectors, each of which takes few of them. A few columns of the rows are
// copied to L1 at a time, and each vector adds the rows that it lists, with its sums in registers. Sums are
// bit-identical to those of accumulate_rows, a group at a time. Included by rows_template.h.
//
// accumulate_rows reads a row from L2 for each vector: 54 ns for 2,048 bf16 values on a Zen 5, of which the
// additions take 16.

constexpr int64_t WINDOW_GROUPS = WINDOW_ROWS / SUM_ROWS;

// The rows that a vector takes: their places in the window, ascending, and their coefficients, as the
// tile's prepare() leaves them. Those of group g are begin[g] .. begin[g + 1] - 1, padded to a multiple of
// the tile's PADDED with place WINDOW_ROWS and coefficient 0.
struct Listed {
    const uint16_t* place;
    float* c;
    const int32_t* begin;  // [WINDOW_GROUPS + 1]

    int64_t first() const { return begin[0]; }
    int64_t end() const { return begin[WINDOW_GROUPS]; }
};

// Copies BYTES, and prefetches as many after them to L2.
template <int64_t BYTES>
inline void copy_and_ask(const uint8_t* from, uint8_t* to) {
    __builtin_memcpy(to, from, BYTES);
    for (int64_t at = BYTES; at < 2 * BYTES; at += 64) __builtin_prefetch(from + at, 0, 2);
}

// Adds listed rows of COLUMNS columns to y, in f32.
template <class Format>
struct FloatTile {
    // Whole blocks: the columns of a row after its last block are added without a fused multiply-add.
    static constexpr int VALUES = Format::VALUE_BYTES == 4 || VECTORS > 4 ? VECTORS : 4;
    static constexpr int64_t COLUMNS = VALUES * LANES, ROW_BYTES = COLUMNS * Format::VALUE_BYTES,
                             PADDED = 1;
    static_assert(COLUMNS % BLOCK == 0);
    static constexpr AccumulateRows* ADD_ROWS = accumulate_rows<Format>;

    static inline void prepare(const Listed&) {}

    // Copies columns from d on of a row.
    void copy(const uint8_t* row, int64_t, int64_t d, int64_t place) {
        copy_and_ask<ROW_BYTES>(row + d * Format::VALUE_BYTES, bytes + place * ROW_BYTES);
    }

    void add(const Listed& list, float* y) const {
        const int64_t first = list.first();
        add_weighted<1, VALUES>(y, 0, list.end() - first, [&](int64_t i, Floats* w) {
            const uint8_t* row = bytes + list.place[first + i] * ROW_BYTES;
            for (int v = 0; v < VALUES; ++v) w[v] = Format::load(row + v * LANES * Format::VALUE_BYTES);
        }, [&](int, int64_t i) { return broadcast(list.c[first + i]); });
    }

    alignas(64) uint8_t bytes[WINDOW_ROWS * ROW_BYTES];
};

constexpr int64_t LISTED_VECTORS = 72;  // whose lists are made together; RowSums passes no more

// The lists of at most LISTED_VECTORS vectors.
template <int64_t PADDED>
struct WindowLists {
    WindowLists(const ManySums& s, int64_t k) {
        int32_t end = 0;
        for (int64_t t = 0; t < s.count; ++t)
            for (int64_t g = 0; g < WINDOW_GROUPS; ++g) {
                begin[t * WINDOW_GROUPS + g] = end;
                if (g * SUM_ROWS >= k) continue;
                const uint64_t mask = s.mask[t * s.mask_stride + g * s.mask_group];
                const float* from = s.c + t * s.c_stride + g * s.c_group;
                used[g] |= mask;
                for (uint64_t left = mask; left; left &= left - 1) {
                    const int64_t j = __builtin_ctzll(left);
                    place[end] = static_cast<uint16_t>(g * SUM_ROWS + j);
                    c[end++] = from[j];
                }
                while (end % PADDED) place[end] = WINDOW_ROWS, c[end++] = 0.0f;
            }
        begin[s.count * WINDOW_GROUPS] = end;
    }

    Listed of(int64_t t) { return {place, c, begin + t * WINDOW_GROUPS}; }

    int32_t begin[LISTED_VECTORS * WINDOW_GROUPS + 1];
    uint64_t used[WINDOW_GROUPS] = {};  // by any vector
    uint16_t place[LISTED_VECTORS * WINDOW_ROWS];
    float c[LISTED_VECTORS * WINDOW_ROWS];
};

// Adds rows a0 .. a0 + k - 1 to the vectors that list them.
template <class Tile>
void add_listed(const Rows& rows, int64_t a0, int64_t k, const ManySums& all) {
    Tile tile;
    const int64_t whole = all.d0 + (all.d1 - all.d0) / Tile::COLUMNS * Tile::COLUMNS;
    for (int64_t t0 = 0; t0 < all.count; t0 += LISTED_VECTORS) {
        ManySums s = all;
        s.c += t0 * s.c_stride, s.mask += t0 * s.mask_stride, s.y += t0 * s.y_stride;
        s.count = s.count - t0 < LISTED_VECTORS ? s.count - t0 : LISTED_VECTORS;
        WindowLists<Tile::PADDED> lists(s, k);
        for (int64_t t = 0; t < s.count; ++t) Tile::prepare(lists.of(t));
        for (int64_t d = s.d0; d < whole; d += Tile::COLUMNS) {
            for (int64_t g = 0; g * SUM_ROWS < k; ++g)
                for (uint64_t left = lists.used[g]; left; left &= left - 1) {
                    const int64_t j = g * SUM_ROWS + __builtin_ctzll(left);
                    tile.copy(row_of(rows, a0 + j), rows.D, d, j);
                }
            for (int64_t t = 0; t < s.count; ++t)
                if (const Listed list = lists.of(t); list.first() < list.end())
                    tile.add(list, s.y + t * s.y_stride + d);
        }
        s.d0 = whole;
        for (int64_t g = 0; s.d0 < s.d1 && g * SUM_ROWS < k; ++g) {
            accumulate_lists(Tile::ADD_ROWS, rows, a0 + g * SUM_ROWS, s);
            s.c += s.c_group, s.mask += s.mask_group;
        }
    }
}

#ifdef LEVEL_AVX512
#include "listed_avx512.h"
#endif
