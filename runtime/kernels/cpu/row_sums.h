// Weighted sums of the rows of a matrix, for one or several vectors of coefficients: the down projection of
// neurons.
#pragma once
#include "operands.h"

// Places of rows are divided into groups of SUM_ROWS, and the groups into at most this many chunks,
// whose sums are added in order. The division and the order depend only on the number of places,
// not on the rows that are added, the threads or other vectors.
constexpr int64_t MAX_CHUNKS = 16;

inline int64_t groups_of(int64_t places) { return (places + SUM_ROWS - 1) / SUM_ROWS; }
inline int64_t groups_of_chunk(int64_t places) {
    return (groups_of(places) + MAX_CHUNKS - 1) / MAX_CHUNKS;
}

// Coefficients of T vectors and a mask of those in use, padded to whole groups. Those of a group are
// contiguous, so that all vectors' sums of a group read few lines.
struct Coefficients {
    float* value;    // [groups, T, SUM_ROWS], 0 if unused
    uint64_t* mask;  // [groups, T]
    int64_t groups, T;

    float* values(int64_t g, int64_t t) const { return value + (g * T + t) * SUM_ROWS; }
    uint64_t& used(int64_t g, int64_t t) const { return mask[g * T + t]; }
};

// The first `count` rows of a matrix, or those listed in `row`.
struct Places {
    const HsMatrix& matrix;
    const int32_t* row;  // or null
    int64_t count;

    Rows rows(int64_t first, int64_t n) const {
        const HsMatrix& m = matrix;
        if (row) return {m.data, m.stride, m.num_columns, row + first, n};
        return {m.data + first * m.stride, m.stride, m.num_columns, nullptr, n};
    }
};

class RowSums {
  public:
    // Most vectors for which every chunk has a sum of its own.
    static constexpr int64_t MOST_TOGETHER = 16;

    // Allocates for sums of up to D columns and T vectors.
    RowSums(Arena& arena, int64_t D, int64_t T)
        : part(arena.take<float>(std::max(MAX_CHUNKS * std::min(T, MOST_TOGETHER), T) * D)), D(D) {}

    // Writes columns d0 .. d1-1 of out [D], the sum over chunks c of the sums at part + c * stride,
    // and puts them in column order.
    static void join(const float* part, int64_t stride, int64_t chunks, int32_t kind, int64_t d0,
                     int64_t d1, float* out) {
        kernels().sum_parts(part + d0, stride, chunks, d1 - d0, out + d0);
        if (OrderSums* order_sums = kernels().order_sums[kind]) order_sums(out, d0, d1);
    }

    // Computes the sums of several vectors, out [T, stride], on all threads.
    void add_many(const Places& places, const Coefficients& c, int64_t T, float* out, int64_t stride) {
        const int64_t columns = places.matrix.num_columns;
        const int64_t across = vector_pieces(T), along = column_pieces(columns, across);
        split(T * places.count * row_bytes(places.matrix), across * along, 1, 16,
              [&](int64_t i0, int64_t i1) {
            for (int64_t i = i0; i < i1; ++i) {
                const int64_t k = i / across, v = i % across;
                add_columns(places, c, vector_of(v, across, T), vector_of(v + 1, across, T),
                            column_of(k, along, columns), column_of(k + 1, along, columns), out,
                            stride);
            }
        });
    }

    float* const part;  // [chunks, T, D] or [T, D]

  private:
    static constexpr int64_t COLUMNS_GRAIN = 256, VECTORS_GRAIN = 8, MOST_VECTORS = 64;

    // Number of pieces of the vectors: about MOST_VECTORS at most share unpacked rows, so that their sums
    // stay in L2.
    static int64_t vector_pieces(int64_t T) {
        const int64_t most = (T + MOST_VECTORS - 1) / MOST_VECTORS;
        return std::max(most, std::min<int64_t>(num_threads(), T / VECTORS_GRAIN));
    }

    // The first vector of piece v, a multiple of VECTORS_GRAIN, so that pieces fill registers of
    // factors (for v == pieces: the end).
    static int64_t vector_of(int64_t v, int64_t pieces, int64_t T) {
        return v == pieces ? T : T * v / pieces / VECTORS_GRAIN * VECTORS_GRAIN;
    }

    // Number of pieces of a sum's columns: enough for all threads, with at most about 1,024 columns
    // each, but none shorter than COLUMNS_GRAIN unless there is only one.
    static int64_t column_pieces(int64_t columns, int64_t across) {
        const int64_t most = std::max<int64_t>(1, columns / COLUMNS_GRAIN);
        return std::min(
            most, std::max<int64_t>((num_threads() + across - 1) / across, (columns + 1023) / 1024));
    }

    // The first column of piece i, a multiple of every kind's block (for i == pieces: the end).
    static int64_t column_of(int64_t i, int64_t pieces, int64_t columns) {
        return i == pieces ? columns : columns * i / pieces / COLUMNS_GRAIN * COLUMNS_GRAIN;
    }

    // Computes columns d0 .. d1-1 of the sums of vectors t0 .. t1-1.
    void add_columns(const Places& places, const Coefficients& c, int64_t t0, int64_t t1, int64_t d0,
                     int64_t d1, float* out, int64_t stride) {
        const int64_t groups = groups_of(places.count), per_chunk = groups_of_chunk(places.count);
        const int32_t kind = places.matrix.kind;
        for (int64_t g0 = 0; g0 < groups; g0 += per_chunk) {
            for (int64_t t = t0; t < t1; ++t) std::fill(part + t * D + d0, part + t * D + d1, 0.0f);
            const int64_t g1 = std::min(g0 + per_chunk, groups);
            for (int64_t g = g0, end; g < g1; g = end) {
                end = std::min(g + WINDOW_ROWS / SUM_ROWS, g1);
                const int64_t p0 = g * SUM_ROWS, count = std::min(end * SUM_ROWS, places.count) - p0;
                const ManySums sums = {c.values(g, t0),
                                       &c.used(g, t0),
                                       part + t0 * D,
                                       SUM_ROWS,
                                       1,
                                       D,
                                       c.T * SUM_ROWS,
                                       c.T,
                                       t1 - t0,
                                       d0,
                                       d1};
                kernels().accumulate_many[kind](places.rows(p0, count), 0, count, sums);
            }
            for (int64_t t = t0; t < t1; ++t) {
                const float* own = part + t * D;
                if (g0 == 0)
                    std::copy(own + d0, own + d1, out + t * stride + d0);
                else
                    kernels().add_to(out + t * stride + d0, own + d0, d1 - d0);
            }
        }
        OrderSums* order_sums = kernels().order_sums[kind];
        for (int64_t t = t0; order_sums && t < t1; ++t) order_sums(out + t * stride, d0, d1);
    }

    const int64_t D;
};
