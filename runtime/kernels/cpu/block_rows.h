// Products of rows of blocks that are not in tiles: LANES rows with several vectors at a time, or a few with one.
// Included by rows_template.h.

// Multiplies rows begin .. end-1 of N tiles of LANES rows each, with n blocks of 32 values, by up to TILE_TOKENS
// vectors.
template <class F, int N, class Tile>
inline void multiply_tiles(Tile* tile, int64_t n, const Input& x, float* y, int64_t y_stride,
                           int64_t begin, int64_t end) {
    if constexpr (IS_SUPER<F>)
        dot_super_tile<F, N>(tile, n, x, y, y_stride, begin, end);
    else
        dot_tile<F, N>(tile, n, x, y, y_stride, begin, end);
}

// Multiplies tiles of LANES rows, until at most LANES / 2 rows are left; returns the first of these.
template <class F, class Tile>
int64_t dot_row_tiles(const Rows& rows, const Input& x, float* y, int64_t y_stride, int64_t a0,
                      int64_t a1) {
    const int64_t n = rows.D / BLOCK;
    int64_t a = a0;
    auto dot = [&](auto count) {
        constexpr int N = count;
        const int64_t valid = a1 - a < N * LANES ? a1 - a : N * LANES;
        const uint8_t *row[N * LANES], *next[N];
        for (int64_t r = 0; r < N * LANES; ++r) row[r] = row_of(rows, r < valid ? a + r : a);
        for (int i = 0; i < N; ++i)
            next[i] = a + (N + i) * LANES < rows.A ? row_of(rows, a + (N + i) * LANES) : row[i * LANES];
        for (int64_t t = 0; t < x.count; t += TILE_TOKENS) {
            const int64_t end = t + TILE_TOKENS < x.count ? t + TILE_TOKENS : x.count;
            Tile tile[N];
            for (int i = 0; i < N; ++i)
                tile[i].set(row + i * LANES, t == 0 ? next[i] : row[i * LANES], n);
            multiply_tiles<F, N>(tile, n, x.part(t, end), y + t * y_stride + a, y_stride, 0, valid);
        }
    };
#ifdef HAS_PANELS
    for (; a1 - a > LANES + LANES / 2; a += 2 * LANES) dot(Count<2>{});
#endif
    for (; a1 - a > LANES / 2; a += LANES) dot(Count<1>{});
    return a < a1 ? a : a1;
}

// Multiplies LANES rows by several vectors at a time (with AMX, by fewer than LEAST_VECTORS). The
// last rows, if at most LANES / 2, and all rows if there is one vector, take one vector at a time.
template <class F>
void dot_blocks(const Rows& rows, const Input& x, float* y, int64_t y_stride, int64_t a0, int64_t a1) {
#ifdef LEVEL_AMX
    if constexpr (F::RANGES == 1)
        if (x.count >= LEAST_VECTORS) return dot_tiles<F>(rows, x, y, y_stride, a0, a1);
#endif
    const int64_t n = rows.D / BLOCK;
    int64_t a = a0;
    if (x.count > 1) a = dot_row_tiles<F, RowsTile<F>>(rows, x, y, y_stride, a0, a1);
    if (rows.queue && x.count == 1) return dot_queued<F>(rows, PackedBlocks<F>(x, n), n, y, a, a1);
    // In contiguous rows, memory beyond the FEW rows that are being read is prefetched.
    const bool is_run = is_one_run(rows, n / F::SPAN * F::BLOCK_BYTES);
    const int64_t ahead = RUN_AHEAD > FEW * rows.stride ? RUN_AHEAD : FEW * rows.stride;
    for (; a < a1; a += FEW) {
        const int64_t valid = a1 - a < FEW ? a1 - a : FEW;
        const uint8_t *row[FEW], *then[2 * FEW];
        for (int64_t r = 0; r < FEW; ++r) {
            row[r] = row_of(rows, r < valid ? a + r : a);
            then[r] = is_run                 ? ahead_in_run(rows, row[r], ahead, a1)
                      : a + FEW + r < rows.A ? row_of(rows, a + FEW + r)
                                             : row[r];
            if (rows.also) then[FEW + r] = rows.also[r < valid ? a + r - a0 : 0];
        }
        for (int64_t t = 0; t < x.count; ++t) {
            float sums[FEW];
            const int num_then = t > 0 ? 0 : rows.also ? 2 * FEW : FEW;
            dot_few<F, 1>(row, then, num_then, n, PackedBlocks<F>(x.part(t, t + 1), n), sums);
            __builtin_memcpy(y + t * y_stride + a, sums, valid * sizeof(float));
        }
    }
}

// The same for K-quants.
template <class F>
void dot_super(const Rows& rows, const Input& x, float* y, int64_t y_stride, int64_t a0, int64_t a1) {
    const int64_t n = rows.D / BLOCK;
    int64_t a = a0;
    if (x.count > 1) a = dot_row_tiles<F, SuperRows<F>>(rows, x, y, y_stride, a0, a1);
    for (int64_t t = 0; a < a1 && t < x.count; ++t) {
        const PackedBlocks<Q8_0> vector(x.part(t, t + 1), n);
        for_rows(rows, a, a1,
                 [&](auto count, int64_t row, const uint8_t* const* from, const uint8_t* const* next,
                     const uint8_t* const* also) {
            dot_super_rows<F, count>(from, next, also, n, vector, y + t * y_stride + row,
                                     prefetches_to_l2(rows));
        });
    }
}
