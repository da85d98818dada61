// Products of transposed matrices (one row per input) with inputs of which many may be silent: y = the
// sum of x_i * row i over the active inputs. For one token, rows of silent inputs are not read. The
// reference is Linear.apply in matrix.py.
#pragma once
#include <cmath>

#include "row_sums.h"

// Limits of one token's inputs, times `scale`. An input is active if its magnitude is above its limit or
// NaN; if `value` is null, all are.
struct TokenLimits {
    const float* value;
    float scale = 1.0f;

    bool pass(float x, int64_t i) const { return !value || !(std::fabs(x) <= value[i] * scale); }
};

// Limits of several tokens' inputs, which are 0 for exempt tokens. `is_exempt` null: no token is.
struct InputLimits {
    const float* value;
    const bool* is_exempt = nullptr;

    TokenLimits of(int64_t t) const { return {value, is_exempt && is_exempt[t] ? 0.0f : 1.0f}; }
};

class SparseInputs {
  public:
    // Allocates for up to I inputs, D outputs in total and T tokens; almost nothing if I is 0.
    SparseInputs(Arena& arena, int64_t I, int64_t D, int64_t T)
        : D(D), sums_(arena, I ? D : 0, T) {
        active_ = arena.take<int32_t>(I + SUM_ROWS);
        active_x_ = arena.take<float>(I);
        const int64_t groups = T > 1 ? groups_of(I) : 0;
        many_ = {arena.take<float>(T * groups * SUM_ROWS), arena.take<uint64_t>(T * groups), groups, T};
    }

    // y [T, stride] of `count` matrices with equal numbers of rows, outputs concatenated; x [T, rows].
    // Adds each matrix's bias, if it has one. Returns the bytes of the rows that any token needs;
    // several tokens may read further rows.
    int64_t run(const HsMatrix* matrix, int count, const float* x, const InputLimits& limits, int64_t T,
                float* y, int64_t stride) {
        return T == 1 ? run_one(matrix, count, x, limits.of(0), y)
                      : run_many(matrix, count, x, limits, T, y, stride);
    }

  private:
    // ---- one token ------------------------------------------------------------------------------

    int64_t run_one(const HsMatrix* matrix, int count, const float* x, const TokenLimits& limits,
                    float* y) {
        const int64_t inputs = matrix->num_rows, num_active = list(x, limits, inputs);
        const int64_t chunk = groups_of_chunk(inputs) * SUM_ROWS, chunks = (inputs + chunk - 1) / chunk;
        int64_t bytes = 0;
        for (int m = 0; m < count; ++m) bytes += num_active * row_bytes(matrix[m]);
        split(bytes, chunks, 1, PIECES_PER_THREAD, [&](int64_t c0, int64_t c1) {
            std::fill(sums_.part + c0 * D, sums_.part + c1 * D, 0.0f);
            const int64_t begin = begin_of(c0 * chunk, num_active), end = begin_of(c1 * chunk, num_active);
            Walk walk(matrix, count, begin, end);
            const Piece behind = Walk(matrix, count, end, num_active).next(*this);
            for (Piece piece = walk.next(*this); piece.begin < piece.end;) {
                const Piece then = walk.next(*this);
                float* out = sums_.part + active_[piece.begin] / chunk * D;
                add(piece, then.begin < then.end ? then : behind, out);
                piece = then;
            }
        });
        int64_t units[4] = {0};
        for (int m = 0; m < count; ++m) units[m + 1] = units[m] + units_of(matrix[m]);
        split(chunks * units[count] * UNIT * 4, units[count], 1, 1, [&](int64_t u0, int64_t u1) {
            int64_t first = 0;
            for (int m = 0; m < count; first += matrix[m++].num_columns)
                join(matrix[m], first, chunks, std::max(u0, units[m]) - units[m],
                     std::min(u1, units[m + 1]) - units[m], y + first);
        });
        return bytes;
    }

    // Lists the active inputs in active_ and active_x_, ascending; returns their number.
    int64_t list(const float* x, const TokenLimits limits, int64_t inputs) {
        int64_t n = 0;
        for (int64_t i = 0; i < inputs; ++i) {
            active_[n] = static_cast<int32_t>(i);
            active_x_[n] = x[i];
            n += limits.pass(x[i], i);
        }
        return n;
    }

    int64_t begin_of(int64_t place, int64_t num_active) const {
        return std::lower_bound(active_, active_ + num_active, place) - active_;
    }

    // Few, because the first rows of a thread's piece of work are not prefetched, unless the same thread
    // computed the piece before it.
    static constexpr int64_t PIECES_PER_THREAD = 3;

    // The active inputs of one group, and columns of a matrix whose first output is `first`.
    struct Piece {
        const HsMatrix* matrix;
        int64_t begin, end, d0, d1, first;

        // Byte offset of the columns in a row; the first columns include all scales of a planar row.
        int64_t begin_byte() const { return byte_of(d0); }
        int64_t bytes() const { return byte_of(d1) - byte_of(d0); }
        int64_t byte_of(int64_t d) const {
            const int32_t kind = matrix->kind;
            const bool is_planar = kind == KIND_Q8_0_PLANAR || kind == KIND_Q4_0_PLANAR;
            const int64_t scales = is_planar ? matrix->num_columns / BLOCK * 2 : 0;
            return d ? scales + (row_bytes(*matrix) - scales) * d / matrix->num_columns : 0;
        }
    };

    // Iterates over the pieces of active inputs begin .. end-1 in memory order: matrix by matrix, with
    // long rows in pieces of columns, so that a group and the next fit into L2 together.
    class Walk {
      public:
        Walk(const HsMatrix* matrix, int count, int64_t begin, int64_t end)
            : begin_(begin), end_(end), last_(matrix + count), at_{matrix, begin, begin, 0, 0, 0} {
            at_.d1 = columns_to(0);
        }

        // The next piece; an empty one after the last.
        Piece next(const SparseInputs& inputs) {
            at_.begin = at_.end;
            if (at_.begin == end_ && begin_ < end_) {
                at_.begin = begin_, at_.d0 = at_.d1;
                if (at_.d0 == at_.matrix->num_columns) {
                    at_.first += at_.matrix->num_columns, at_.d0 = 0;
                    if (++at_.matrix == last_) begin_ = at_.begin = end_, --at_.matrix;
                }
                at_.d1 = columns_to(at_.d0);
            }
            at_.end = inputs.end_of_group(at_.begin, end_);
            return at_;
        }

      private:
        int64_t columns_to(int64_t d0) const {
            const HsMatrix& m = *at_.matrix;
            const bool is_whole = block_values(m.kind) == SUPER_BLOCK || row_bytes(m) <= 2 * PIECE_BYTES;
            const int64_t size = PIECE_BYTES * m.num_columns / row_bytes(m) / PIECE_GRAIN * PIECE_GRAIN;
            return is_whole || d0 + 2 * size > m.num_columns ? m.num_columns : d0 + size;
        }

        int64_t begin_;
        const int64_t end_;
        const HsMatrix* const last_;
        Piece at_;
    };

    static constexpr int64_t PIECE_BYTES = 2048, PIECE_GRAIN = 512;  // of a row

    int64_t end_of_group(int64_t a, int64_t end) const {
        const int64_t first = a;
        while (a < end && active_[a] / SUM_ROWS == active_[first] / SUM_ROWS) ++a;
        return a;
    }

    // Adds the sums of a piece to out [D], while the next piece is prefetched.
    void add(const Piece& piece, const Piece& then, float* out) const {
        const HsMatrix& m = *piece.matrix;
        const uint8_t* next[SUM_ROWS];
        Rows rows = {m.data, m.stride, m.num_columns, active_, piece.end};
        rows.then = next, rows.num_then = then.end - then.begin;
        if (rows.num_then) rows.then_bytes = then.bytes();
        for (int64_t i = 0; i < rows.num_then; ++i)
            next[i] = then.matrix->data + active_[then.begin + i] * then.matrix->stride + then.begin_byte();
        kernels().accumulate_rows[m.kind](rows, active_x_, out + piece.first, piece.begin, piece.end,
                                          piece.d0, piece.d1);
    }

    static constexpr int64_t UNIT = 128;  // columns reordered together

    static int64_t units_of(const HsMatrix& m) { return (m.num_columns + UNIT - 1) / UNIT; }

    // Joins units u0 .. u1-1 of a matrix, whose sums begin at column `first` of the chunks.
    void join(const HsMatrix& m, int64_t first, int64_t chunks, int64_t u0, int64_t u1,
              float* y) const {
        const int64_t d0 = u0 * UNIT, d1 = std::min(u1 * UNIT, m.num_columns);
        if (d0 >= d1) return;
        RowSums::join(sums_.part + first, D, chunks, m.kind, d0, d1, y);
        if (m.bias) kernels().add_to(y + d0, m.bias + d0, d1 - d0);
    }

    // ---- several tokens -------------------------------------------------------------------------

    int64_t run_many(const HsMatrix* matrix, int count, const float* x, const InputLimits& limits,
                     int64_t T, float* y, int64_t stride) {
        const int64_t inputs = matrix->num_rows;
        const Coefficients c = {many_.value, many_.mask, groups_of(inputs), T};
        split(T * inputs * 4, c.groups, 1, 4, [&](int64_t g0, int64_t g1) {
            for (int64_t g = g0; g < g1; ++g)
                for (int64_t t = 0; t < T; ++t)
                    c.used(g, t) = mask(x + t * inputs, limits.of(t), g * SUM_ROWS, inputs, c.values(g, t));
        });
        int64_t row = 0;
        for (int m = 0; m < count; ++m) {
            sums_.add_many({matrix[m], nullptr, inputs}, c, T, y, stride);
            for (int64_t t = 0; matrix[m].bias && t < T; ++t)
                kernels().add_to(y + t * stride, matrix[m].bias, matrix[m].num_columns);
            y += matrix[m].num_columns;
            row += row_bytes(matrix[m]);
        }
        return num_any(c, T) * row;
    }

    // A mask of the active inputs of the group at place p0; writes their values to `values`, and 0 for
    // the others.
    static uint64_t mask(const float* x, const TokenLimits limits, int64_t p0, int64_t inputs,
                         float* values) {
        uint64_t bits = 0;
        for (int64_t p = p0; p < std::min(p0 + SUM_ROWS, inputs); ++p) {
            const bool is_active = limits.pass(x[p], p);
            bits |= static_cast<uint64_t>(is_active) << (p - p0);
            values[p - p0] = is_active ? x[p] : 0.0f;
        }
        return bits;
    }

    // Number of inputs that are active for any of the tokens.
    static int64_t num_any(const Coefficients& c, int64_t T) {
        int64_t count = 0;
        for (int64_t g = 0; g < c.groups; ++g) {
            uint64_t any = 0;
            for (int64_t t = 0; t < T; ++t) any |= c.used(g, t);
            count += __builtin_popcountll(any);
        }
        return count;
    }

    const int64_t D;
    RowSums sums_;
    int32_t* active_;
    float* active_x_;
    Coefficients many_;
};

// True if a matrix has these numbers of outputs and inputs: one row per output, or per input if
// transposed.
inline bool fits(const HsMatrix& m, int64_t outputs, int64_t inputs, bool is_transposed) {
    return is_transposed ? fits(m, inputs, outputs) && has_sums(m) : fits(m, outputs, inputs);
}
