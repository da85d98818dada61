// Products of tiled rows, and unpacking of rows that are stored together. Included by rows_template.h.

// LANES rows of a tile, from row `lane` on.
template <class F>
inline auto tile_at(const uint8_t* tile, int64_t lane, int64_t D, const TiledAhead* ahead) {
    if constexpr (IS_GRID<F>)
        return GridTile<F>{tile, D / SUPER_BLOCK, ahead};
    else if constexpr (IS_SUPER<F>)
        return SuperTile<F>{tile, lane, D / SUPER_BLOCK, ahead};
    else
        return TiledTile<F>{tile, lane, D / BLOCK, ahead};
}

// The vectors that few_vectors.h takes at a time; more would need more registers than there are.
#ifdef __AVXVNNI__
constexpr int FEW_AT_ONCE = 3;
template <class Use>
inline void in_few(int64_t count, const Use& use) {
    in_steps<3, 2, 1>(0, count, use);
}
#else
constexpr int FEW_AT_ONCE = 4;
template <class Use>
inline void in_few(int64_t count, const Use& use) {
    in_fours(0, count, use);
}
#endif

// Most vectors that few_vectors.h multiplies; more are faster where rows are unpacked once for all of them. GMAC/s of one
// Zen 5 core, rows of 1,536 values in cache, without few_vectors.h and with it, q4_K: avx512 2 vectors 65 and 85, 4
// vectors 87 and 114, 8 vectors 103 and 116; avxvnni 59 and 91, 77 and 91, 86 and 98; avx2 55 and 65, 70 and 77, 80 and 78.
// Types with grids take longest to unpack: iq3_s 5 vectors 120 and, unpacked once, 147. Q4_K_M at avx512vnni on a Zen 4,
// processor ms of a model: 2 vectors 52 and 49, 4 vectors 83 and 80, 5 vectors 96 and 103, 8 vectors 136 and 140.
template <class F>
constexpr int64_t most_few() {
    if constexpr (IS_GRID<F>) return FEW_AT_ONCE;
    if constexpr (IS_SUPER<F>)
        if (F::RANGES == 2) return TILES_AT_ONCE == 2 ? 0 : FEW_AT_ONCE;
#ifdef HAS_PANELS
    return 4;
#else
    return TILES_AT_ONCE == 2 ? 4 : 8;
#endif
}

// Whether few_vectors.h multiplies so many vectors; a single one of a K-quant with AVX-512 is faster by dot_one (Zen 5). One
// tile at a time: two, whose rows would share what is loaded of x, are read from memory no faster by a Zen 5 and much
// more slowly by a Zen 4 (processor time of all products of a model, one tile and two: SmolLM2 q4_0 one vector 3.7 and
// 6.0 ms, Qwen2.5-Coder 1.5B Q4_K_M two vectors 50 and 75 ms).
template <class F>
inline bool are_few(int64_t count) {
    constexpr int64_t LEAST = IS_SUPER<F> && !IS_GRID<F> && LANES == TILE_ROWS ? 2 : 1;
    return count >= LEAST && count <= most_few<F>();
}

// Multiplies rows a0 .. a1-1 of one tile; `rows` has no list. y[0] is the product of row a0.
template <class F>
inline void dot_tiled_rows(const Rows& rows, const Input& x, float* y, int64_t y_stride, int64_t a0,
                           int64_t a1, const TiledAhead& ahead) {
    const int64_t first = a0 / TILE_ROWS * TILE_ROWS;
    const uint8_t* at = rows.weight + first * rows.stride;
    auto dot = [&](auto count, int64_t lane) {  // `count` times LANES rows
        const int64_t begin = a0 > first + lane ? a0 - first - lane : 0, most = count * LANES;
        const int64_t end = a1 - first - lane < most ? a1 - first - lane : most;
        float* to = y + first + lane + begin - a0;
        if (x.count == 1) {
            alignas(64) float sums[LANES];
            dot_one(tile_at<F>(at, lane, rows.D, lane == 0 ? &ahead : nullptr), x, sums);
            __builtin_memcpy(to, sums + begin, (end - begin) * sizeof(float));
            return;
        }
        for (int64_t t = 0; t < x.count; t += TILE_TOKENS) {
            const int64_t t1 = t + TILE_TOKENS < x.count ? t + TILE_TOKENS : x.count;
            const auto tile = tile_at<F>(at, lane, rows.D, lane + t == 0 ? &ahead : nullptr);
            const decltype(tile) tiles[2] = {tile, tile_at<F>(at, lane + LANES, rows.D, nullptr)};
            multiply_tiles<F, count>(tiles, rows.D / BLOCK, x.part(t, t1), to + t * y_stride, y_stride,
                                     begin, end);
        }
    };
#if defined(LEVEL_AVX512) || defined(LEVEL_AVX2)
    const bool has_both_halves = LANES == TILE_ROWS || (a0 < first + LANES && a1 > first + LANES);
    if (are_few<F>(x.count) && has_both_halves) {
        in_few(x.count, [&](auto count, int64_t t) {
            constexpr int T = decltype(count)::VALUE;
            const auto tile = tile_at<F>(at, 0, rows.D, t == 0 ? &ahead : nullptr);
            const decltype(tile) halves[2] = {tile, tile_at<F>(at, LANES, rows.D, nullptr)};
            alignas(64) float sums[T][TILE_ROWS];
            dot_few_vectors<TILE_ROWS / LANES, T>(halves, x.part(t, t + T), sums[0], TILE_ROWS);
            for (int i = 0; i < T; ++i)
                __builtin_memcpy(y + (t + i) * y_stride, sums[i] + (a0 - first),
                                 (a1 - a0) * sizeof(float));
        });
        return;
    }
#endif
#ifdef HAS_PANELS
    if (has_both_halves) return dot(Count<2>{}, 0);
#endif
    for (int64_t lane = a0 % TILE_ROWS / LANES * LANES; first + lane < a1; lane += LANES)
        dot(Count<1>{}, lane);
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
        const auto first = tile_at<F>(at, 0, rows.D, t == 0 ? aheads : nullptr);
        const decltype(first) tiles[2] = {
            first, tile_at<F>(at + tile_bytes, 0, rows.D, t == 0 ? aheads + 1 : nullptr)};
        multiply_tiles<F, 2>(tiles, n, x.part(t, t1), y + t * y_stride, y_stride, 0, 2 * TILE_ROWS);
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
// tile at a time and two: 8 vectors 170 and 185 (4 bits), 163 and 173 (8 bits), 64 vectors 182 and 207, 182 and 203.
// Of one Zen 4 core and K-quants, whose parts then no longer stay in registers: 12 vectors 86 and 85 (q3_k), 92 and 84
// (q4_k), 32 vectors 90 and 91, 94 and 91, 512 vectors 88 and 93, 93 and 93; 117 are its limit.
template <class F>
constexpr int64_t LEAST_FOR_TWO_TILES = IS_SUPER<F> ? 64 : 8;

// From how many vectors on the next tile is prefetched even if stream_ahead is not set. Unpacking K-quants takes so
// long that the hardware prefetcher pauses (two Zen 5 cores, q4_K and 2 vectors: 11 GB/s without, 31 with).
template <class F>
constexpr int64_t LEAST_ASKING_OF = IS_SUPER<F> ? 2 : LEAST_ASKING;

// For a row of a list, the LANES rows of its tile that include it are computed (half of a tile with AVX2).
template <class F>
void dot_tiled(const Rows& rows, const Input& x, float* y, int64_t y_stride, int64_t a0, int64_t a1) {
#ifdef LEVEL_AMX
    if constexpr (!IS_SUPER<F> && F::RANGES == 1)
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
    const bool is_asking = x.count >= LEAST_ASKING_OF<F>;
    if constexpr (TILES_AT_ONCE == 2) {
        if (x.count >= LEAST_FOR_TWO_TILES<F>) {
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

// Unpacks rows of tiles or groups, by way of blocks as in a file.
template <class F>
void unpack_together(const Rows& rows, float* out, int64_t a0, int64_t a1) {
    using InFile = typename F::InFile;
    constexpr int64_t VALUES = VALUES_OF<InFile>;
    for (int64_t a = a0; a < a1; ++a) {
        const int64_t row = rows.index ? rows.index[a] : a, r = row % F::ROWS;
        const uint8_t* first = rows.weight + (row - r) * rows.stride;
        for (int64_t b = 0; b < rows.D / VALUES; ++b) {
            uint8_t block[InFile::BLOCK_BYTES];
            F::copy_block(first, rows.D / (IS_SUPER<InFile> ? SUPER_BLOCK : BLOCK), b, r, block);
            unpack_row<InFile>(block, block, VALUES, out + a * rows.D + b * VALUES);
        }
    }
}
