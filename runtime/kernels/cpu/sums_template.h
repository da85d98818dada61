// Sums of rows for several vectors, a group of up to SUM_ROWS rows at a time. Each vector's sum is
// bit-identical to that of accumulate_rows if weights are finite. Included by rows_template.h.
//
// There are two ways. By lists: each vector adds only its own rows, while the group's rows are in cache.
// Together: rows are unpacked once, and all vectors add all of them; a coefficient of 0 has no effect if
// weights are finite.

// Rows are added together if vectors need, on average, more than 1 / TOGETHER of them, and if there
// are at least LEAST_TOGETHER vectors. By lists, a row costs three to four times as much. SmolLM2
// on a Zen 4, all rows needed, together and by lists: 2 vectors 10.3 and 8.6 ms (q4_0), 16.3 and
// 17.7 (f16); 5 vectors 12.5 and 13.7, 19.5 and 21.3.
constexpr int64_t TOGETHER = 3;  // a third
constexpr int64_t LEAST_TOGETHER = 3;
constexpr int64_t LEAST_USES = 3;  // of a row that is listed, on average

// Number of pairs of a vector and a row that it takes, of k rows.
inline int64_t num_taken(int64_t k, const ManySums& s) {
    int64_t count = 0;
    for (int64_t t = 0; t < s.count; ++t)
        for (int64_t g = 0; g * SUM_ROWS < k; ++g)
            count += __builtin_popcountll(s.mask[t * s.mask_stride + g * s.mask_group]);
    return count;
}

inline bool are_taken_together(int64_t k, const ManySums& s) {
    return s.count >= LEAST_TOGETHER && num_taken(k, s) * TOGETHER > k * s.count;
}

// `add` is accumulate_rows() of the kind.
inline void accumulate_lists(AccumulateRows add, const Rows& rows, int64_t a0, const ManySums& s) {
    for (int64_t t = 0; t < s.count; ++t) {
        int32_t index[SUM_ROWS];
        float c[SUM_ROWS];
        const uint8_t* next[SUM_ROWS];
        int64_t count = 0;
        for (uint64_t left = s.mask[t * s.mask_stride]; left; left &= left - 1) {
            const int64_t j = __builtin_ctzll(left);
            index[count] = rows.index ? rows.index[a0 + j] : static_cast<int32_t>(a0 + j);
            next[count] = rows.weight + index[count] * rows.stride;
            c[count++] = s.c[t * s.c_stride + j];
        }
        for (int64_t i = count; i < 4; ++i) next[i] = rows.weight;
        if (count)
            add({rows.weight, rows.stride, rows.D, index, count, next}, c, s.y + t * s.y_stride, 0,
                count, s.d0, s.d1);
    }
}

// Columns of floats unpacked at a time: 64 rows of them take 16 KiB with AVX-512, else less.
constexpr int64_t SUM_VECTORS = 4, SUM_COLUMNS = SUM_VECTORS * LANES;

template <class Format>
inline void add_floats_to_many(const Rows& rows, int64_t a0, int64_t k, const ManySums& s) {
    constexpr int COUNT = LANES < 16 ? 2 : 4;
    alignas(64) float tile[SUM_ROWS * SUM_COLUMNS];
    int64_t d = s.d0;
    for (; d + SUM_COLUMNS <= s.d1 / BLOCK * BLOCK; d += SUM_COLUMNS) {
        for (int64_t j = 0; j < k; ++j) {
            constexpr int64_t VALUES = VALUES_OF<Format>;
            const uint8_t* row = row_of(rows, a0 + j) + d * Format::BLOCK_BYTES / VALUES;
            unpack_row<Format>(row, row + SUM_COLUMNS * Format::BLOCK_BYTES / VALUES, SUM_COLUMNS,
                               tile + j * SUM_COLUMNS);
        }
        in_steps<COUNT, 1>(0, s.count, [&](auto count, int64_t t0) {
            add_weighted<count, SUM_VECTORS>(s.y + t0 * s.y_stride + d, s.y_stride, k,
                                             [&](int64_t j, Floats* w) {
                for (int v = 0; v < SUM_VECTORS; ++v)
                    w[v] = load_floats(tile + j * SUM_COLUMNS + v * LANES);
            }, [&](int t, int64_t j) { return broadcast(s.c[(t0 + t) * s.c_stride + j]); });
        });
    }
    ManySums rest = s;
    rest.d0 = d;
    if (d < s.d1) accumulate_lists(accumulate_rows<Format>, rows, a0, rest);
}

// Adds a window group by group.
template <AccumulateMany ADD_GROUP>
void by_groups(const Rows& rows, int64_t a0, int64_t k, const ManySums& s) {
    ManySums of_group = s;
    for (int64_t j = 0; j < k; j += SUM_ROWS, of_group.c += s.c_group, of_group.mask += s.mask_group)
        ADD_GROUP(rows, a0 + j, k - j < SUM_ROWS ? k - j : SUM_ROWS, of_group);
}

#include "listed_sums.h"

// Adds a window. Listed rows must be copied, which pays if each is used by some vectors. Sums of float rows
// may be divided in any way that keeps their order; tiles of blocks keep the groups.
template <class Tile, AccumulateMany ADD_GROUP>
void by_window(const Rows& rows, int64_t a0, int64_t k, const ManySums& s) {
    const int64_t taken = num_taken(k, s);
    if (taken >= LEAST_USES * k && taken * TOGETHER <= k * s.count)
        return add_listed<Tile>(rows, a0, k, s);
    by_groups<ADD_GROUP>(rows, a0, k, s);
}

// One group.
template <class Format>
void accumulate_many(const Rows& rows, int64_t a0, int64_t k, const ManySums& s) {
    constexpr bool IS_WHOLE =
        IS_BLOCKS<Format> || !Format::SCALED || SUM_COLUMNS % VALUES_OF<Format> == 0;
    if constexpr (!IS_SUPER<Format> && IS_WHOLE) {
        if (are_taken_together(k, s)) {
            if constexpr (IS_BLOCKS<Format>) {
                const uint8_t* row[SUM_ROWS];
                for (int64_t j = 0; j < k; ++j) row[j] = row_of(rows, a0 + j);
                return add_group_to_many<Format>(row, k, rows.D / BLOCK, s);
            } else {
                return add_floats_to_many<Format>(rows, a0, k, s);
            }
        }
    }
    accumulate_lists(accumulate_rows<Format>, rows, a0, s);
}
