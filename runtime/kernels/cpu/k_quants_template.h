// Sums of rows of K-quants (k_formats.h). Included by rows_template.h; a level defines
//   SUPER_ROWS, SuperSums, add_super, store_super    for products, see k_products.h
//   factors_of<F>(block, c, to)     c*d*s and c*m*t of the parts
//   unpack_pair<F>(block, pair, w)    the quants of a pair's parts less LESS -> w[2 * VECTORS]

// The bytes of a pair's two parts, in eight vectors each; `above`: all that hold bits above quants.
template <class F>
inline void bytes_of_pair(const Ints* quants, const Ints* above, int pair, Ints* low, Ints* high) {
    for (int v = 0; v < 8; ++v) {
        Ints* part = v < 4 ? low : high;
        Ints& first = F::SHARES_HALVES ? part[v % 4] : low[v];
        Ints& second = F::SHARES_HALVES ? part[v % 4 + 4] : high[v];
        F::four(quants[v], F::BITS_BYTES > 0 ? above[F::above_at(pair, v)] : Ints{}, pair, first,
                second);
    }
}

// y[d0..d1) += the sum over r of c[r] * rows[r][d0..d1), for whole blocks; the minima of all rows
// are subtracted first. Meanwhile the rows `next` and, unless it is null, `also` are prefetched.
template <class Format, int ROWS>
inline void add_super_rows(const uint8_t* const* rows, const uint8_t* const* next, const float* c,
                           float* y, int64_t d0, int64_t d1, const uint8_t* const* also, bool to_l2) {
    for (int64_t d = d0; d < d1; d += SUPER_BLOCK) {
        const int64_t at = d / SUPER_BLOCK * Format::BLOCK_BYTES;
        Factors of[ROWS];
        float minimum[Format::NUM_FACTORS];
        for (int r = 0; r < ROWS; ++r) {
            for (int64_t line = 0; line < Format::BLOCK_BYTES; line += 64)
                prefetch_row(next[r] + at + line, to_l2);
            for (int64_t line = 0; also && line < Format::BLOCK_BYTES; line += 64)
                prefetch_row(also[r] + at + line, to_l2);
            factors_of<Format>(rows[r] + at, c[r], of[r]);
            if constexpr (Format::HAS_MINIMA)
                for (int i = 0; i < Format::NUM_FACTORS; ++i)
                    minimum[i] = r == 0 ? of[r].minimum[i] : minimum[i] + of[r].minimum[i];
        }
        keep_in_memory(of), keep_in_memory(minimum);
#pragma GCC unroll 4
        for (int pair = 0; pair < 4; ++pair) {
            const Parts parts = Format::parts(pair);
            float* part_y[2] = {y + d + parts.first * BLOCK, y + d + parts.second * BLOCK};
            auto range_of = [&](int v) {
                const int part = v < VECTORS ? parts.first : parts.second;
                return Format::RANGES == 1 ? part : 2 * part + v % VECTORS * LANES / 16;
            };
            Floats out[2 * VECTORS];
            for (int v = 0; v < 2 * VECTORS; ++v) {
                out[v] = load_floats(part_y[v / VECTORS] + v % VECTORS * LANES);
                if constexpr (Format::HAS_MINIMA) out[v] = out[v] - broadcast(minimum[range_of(v)]);
            }
            for (int r = 0; r < ROWS; ++r) {
                Floats w[2 * VECTORS];
                unpack_pair<Format>(rows[r] + at, pair, w);
                for (int v = 0; v < 2 * VECTORS; ++v)
                    out[v] = multiply_add(w[v], broadcast(of[r].factor[range_of(v)]), out[v]);
            }
            for (int v = 0; v < 2 * VECTORS; ++v)
                store_floats(part_y[v / VECTORS] + v % VECTORS * LANES, out[v]);
        }
    }
}
