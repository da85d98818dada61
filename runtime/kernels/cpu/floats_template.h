// Products of rows of f32, f16 and bf16 with vectors. Included by rows_template.h.
//
// A product is bit-identical for any number of rows and vectors. Over a row's whole blocks, sums[s]
// accumulates the LANES products from column (2 * k + s) * LANES on, for k = 0, 1, 2, ..., by one
// multiply_add() each;
//   product = the lanes of sums[0] + sums[1], added as by four_sums(),
// and the products after the last whole block are added one by one.
//
// Several vectors are multiplied in groups, by four rows: each load of a row serves the group, each
// load of a vector serves four rows. All groups process one piece of the rows' columns, which stays
// in L1, before the next; meanwhile their sums are kept in memory.

constexpr int QUAD_ROWS = 4;          // multiplied together; also what four_sums() takes
constexpr int GROUP_VECTORS = 3;      // most vectors multiplied together
constexpr int64_t TILE_VECTORS = 32;  // most vectors multiplied by a quad of rows
// Registers for sums, out of 32 or 16; the others hold the vectors of a group and a row.
constexpr int SUM_REGISTERS = LANES == 16 ? 24 : 12;
// Columns per piece. GMAC/s of a Zen 4 core with 1024 and 4096 columns (32 vectors, D = 8192):
// AVX-512 f16 50 and 53, f32 47 and 42; AVX2 f16 43 and 32, f32 38 and 23.
template <class Format>
constexpr int64_t PIECE_COLUMNS = LANES == 16 && Format::VALUE_BYTES == 2 ? 4096 : 1024;

// y[0..3] = the sums of the lanes of four vectors
inline void four_sums(const Floats* v, float* y) {
#if defined(LEVEL_AVX512)
    const __m512 low = _mm512_unpacklo_ps(v[0], v[1]) + _mm512_unpackhi_ps(v[0], v[1]);
    const __m512 high = _mm512_unpacklo_ps(v[2], v[3]) + _mm512_unpackhi_ps(v[2], v[3]);
    const __m512 all = _mm512_shuffle_ps(low, high, 0x44) + _mm512_shuffle_ps(low, high, 0xee);
    const __m256 half = _mm512_castps512_ps256(all) + _mm512_extractf32x8_ps(all, 1);
    _mm_storeu_ps(y, _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1));
#elif defined(LEVEL_AVX2)
    const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    _mm_storeu_ps(y, _mm256_castps256_ps128(all) + _mm256_extractf128_ps(all, 1));
#else
    store_sums(v[0], v[1], v[2], v[3], y);
#endif
}

// sums[t][r] += rows[r] . x[t] over columns 0 .. columns-1 (whole blocks). Prefetches the same
// columns of `next` and `also`, which may be null.
template <class Format, int ROWS, int COUNT>
__attribute__((always_inline)) inline void add_products(
    const uint8_t* const* rows, const uint8_t* const* next, const float* const* x, int64_t columns,
    Floats (*sums)[ROWS][2], const uint8_t* const* also = nullptr, bool to_l2 = false) {
    // If there are too few registers for both sums of all products, all first sums are computed
    // first.
    constexpr int AT_ONCE = 2 * ROWS * COUNT <= SUM_REGISTERS ? 2 : 1;
    // gcc runs out of registers if it unrolls.
    constexpr int64_t STEP = COUNT > 1 ? 2 * LANES : BLOCK, BYTES = Format::VALUE_BYTES;
    for (int s = 0; s < 2; s += AT_ONCE) {
        Floats part[COUNT][ROWS][AT_ONCE];
        for (int t = 0; t < COUNT; ++t)
            for (int r = 0; r < ROWS; ++r)
                for (int i = 0; i < AT_ONCE; ++i) part[t][r][i] = sums[t][r][s + i];
        for (int64_t d = 0; d < columns; d += STEP) {
            if (s == 0 && next)
                for (int r = 0; r < ROWS; ++r)
                    for (int64_t at = 0; at < STEP * BYTES; at += 64)
                        prefetch_row(next[r] + d * BYTES + at, to_l2);
            if (s == 0 && also)
                for (int r = 0; r < ROWS; ++r)
                    for (int64_t at = 0; at < STEP * BYTES; at += 64)
                        prefetch_row(also[r] + d * BYTES + at, to_l2);
            for (int64_t v = 0; v < STEP / LANES; v += 2)
                for (int i = 0; i < AT_ONCE; ++i) {
                    const int64_t e = d + (v + s + i) * LANES;
                    Floats values[COUNT];
                    for (int t = 0; t < COUNT; ++t) {
                        values[t] = load_floats(x[t] + e);
                        if (COUNT > 1) values[t] = in_register(values[t]);
                    }
                    for (int r = 0; r < ROWS; ++r) {
                        Floats w = Format::load(rows[r] + e * BYTES);
                        if (COUNT > 1) w = in_register(w);
                        for (int t = 0; t < COUNT; ++t)
                            part[t][r][i] = multiply_add(w, values[t], part[t][r][i]);
                    }
                }
        }
        for (int t = 0; t < COUNT; ++t)
            for (int r = 0; r < ROWS; ++r)
                for (int i = 0; i < AT_ONCE; ++i) sums[t][r][s + i] = part[t][r][i];
    }
}

// y[r] = rows[r] . x for r < valid, given the sums over whole blocks.
template <class Format, int ROWS>
__attribute__((always_inline)) inline void store_products(const Floats (*sums)[2],
                                                          const uint8_t* const* rows, const float* x,
                                                          int64_t D, int64_t valid, float* y) {
    Floats total[QUAD_ROWS];
    for (int r = 0; r < QUAD_ROWS; ++r)
        total[r] = r < ROWS ? add_floats(sums[r][0], sums[r][1]) : zero();
    float products[QUAD_ROWS];
    four_sums(total, products);
    for (int64_t r = 0; r < valid; ++r)
        for (int64_t d = D / BLOCK * BLOCK; d < D; ++d)
            products[r] += x[d] * Format::value(rows[r] + d * Format::VALUE_BYTES);
    if (valid == QUAD_ROWS)
        __builtin_memcpy(y, products, sizeof products);
    else
        for (int64_t r = 0; r < valid; ++r) y[r] = products[r];
}

// y[r] = rows[r] . x
template <class Format, int ROWS>
inline void dot_floats(const uint8_t* const* rows, const uint8_t* const* next,
                       const uint8_t* const* also, int64_t D, const float* x, float* y, bool to_l2) {
    Floats sums[1][ROWS][2];
    for (int r = 0; r < ROWS; ++r) sums[0][r][0] = sums[0][r][1] = zero();
    add_products<Format, ROWS, 1>(rows, next, &x, D / BLOCK * BLOCK, sums, also, to_l2);
    store_products<Format, ROWS>(sums[0], rows, x, D, ROWS, y);
}

// Calls use(Count<N>{}, t) for groups of vectors; four are divided into two groups of two.
template <class Use>
inline void for_groups(int64_t count, const Use& use) {
    const int64_t threes = count % GROUP_VECTORS == 1 ? count - 4 : count;
    in_steps<2, 1>(in_steps<GROUP_VECTORS>(0, threes, use), count, use);
}

// The products of a group of vectors with rows of a single piece, whose sums stay in registers.
template <class Format, int COUNT>
void multiply_group(const uint8_t* const* rows, const uint8_t* const* next, int64_t D, const Input& x,
                    int64_t t, float* y, int64_t y_stride, int64_t valid) {
    const float* vectors[COUNT];
    for (int i = 0; i < COUNT; ++i) vectors[i] = x.vector(t + i);
    Floats sums[COUNT][QUAD_ROWS][2];
    for (int i = 0; i < COUNT; ++i)
        for (int r = 0; r < QUAD_ROWS; ++r) sums[i][r][0] = sums[i][r][1] = zero();
    add_products<Format, QUAD_ROWS, COUNT>(rows, next, vectors, D / BLOCK * BLOCK, sums);
    for (int i = 0; i < COUNT; ++i)
        store_products<Format, QUAD_ROWS>(sums[i], rows, vectors[i], D, valid, y + (t + i) * y_stride);
}

// y[t * y_stride + r] = rows[r] . x[t], r < valid; up to TILE_VECTORS vectors. Pointers may repeat;
// `next` may be null. GMAC/s of a Zen 4 core, f16 rows of 576 values, a single piece, and 32 vectors: 47, and 43
// with sums in memory.
template <class Format>
void dot_quad(const uint8_t* const* rows, const uint8_t* const* next, int64_t D, const Input& x,
              float* y, int64_t y_stride, int64_t valid) {
    if (D <= PIECE_COLUMNS<Format>)
        return for_groups(x.count, [&](auto count, int64_t t) {
            multiply_group<Format, count>(rows, t == 0 ? next : nullptr, D, x, t, y, y_stride, valid);
        });
    Floats sums[TILE_VECTORS][QUAD_ROWS][2];
    for (int64_t t = 0; t < x.count; ++t)
        for (int r = 0; r < QUAD_ROWS; ++r) sums[t][r][0] = sums[t][r][1] = zero();
    const int64_t end = D / BLOCK * BLOCK, step = PIECE_COLUMNS<Format>;
    for (int64_t d = 0; d < end; d += step) {
        const int64_t columns = end - d < step ? end - d : step;
        const uint8_t *piece[QUAD_ROWS], *then[QUAD_ROWS];
        for (int r = 0; r < QUAD_ROWS; ++r) {
            piece[r] = rows[r] + d * Format::VALUE_BYTES;
            if (next) then[r] = next[r] + d * Format::VALUE_BYTES;
        }
        for_groups(x.count, [&](auto count, int64_t t) {
            const float* vectors[count];
            for (int i = 0; i < count; ++i) vectors[i] = x.vector(t + i) + d;
            // Prefetching a share of the lines in every group was slower (f16 from memory, 4
            // vectors: 15 GMAC/s instead of 20).
            add_products<Format, QUAD_ROWS, count>(piece, next && t == 0 ? then : nullptr, vectors,
                                                   columns, sums + t);
        });
    }
    for (int64_t t = 0; t < x.count; ++t)
        store_products<Format, QUAD_ROWS>(sums[t], rows, x.vector(t), D, valid, y + t * y_stride);
}

// Contiguous rows, one by one, for one vector.
template <class Format>
void dot_run(const Rows& rows, const float* x, float* y, int64_t a0, int64_t a1) {
    const int64_t bytes = rows.D * Format::VALUE_BYTES;
    for (int64_t a = a0; a < a1; a += QUAD_ROWS) {
        const int64_t valid = a1 - a < QUAD_ROWS ? a1 - a : QUAD_ROWS;
        const uint8_t* row[QUAD_ROWS];
        Floats sums[QUAD_ROWS][2];
        for (int64_t r = 0; r < QUAD_ROWS; ++r) {
            row[r] = row_of(rows, r < valid ? a + r : a);
            Floats of_row[1][1][2] = {{{zero(), zero()}}};
            const uint8_t* next = ahead_in_run(rows, row[r], RUN_AHEAD, a1);
            if (r < valid)
                add_products<Format, 1, 1>(&row[r], &next, &x, rows.D / BLOCK * BLOCK, of_row);
            sums[r][0] = of_row[0][0][0], sums[r][1] = of_row[0][0][1];
            for (int64_t at = 0; rows.also && r < valid && at < bytes; at += 64)
                __builtin_prefetch(rows.also[a + r - a0] + at);
        }
        store_products<Format, QUAD_ROWS>(sums, row, x, rows.D, valid, y + a);
    }
}

template <class Format>
void dot_float_rows(const Rows& rows, const Input& x, float* y, int64_t y_stride, int64_t a0,
                    int64_t a1) {
    if (x.count == 1 && is_one_run(rows, rows.D * Format::VALUE_BYTES))
        return dot_run<Format>(rows, x.vector(0), y, a0, a1);
    if (x.count == 1)
        return for_rows(rows, a0, a1,
                        [&](auto count, int64_t a, const uint8_t* const* row,
                            const uint8_t* const* next, const uint8_t* const* also) {
            dot_floats<Format, count>(row, next, also, rows.D, x.vector(0), y + a,
                                      prefetches_to_l2(rows));
        });
    for (int64_t a = a0; a < a1; a += QUAD_ROWS) {
        const int64_t valid = a1 - a < QUAD_ROWS ? a1 - a : QUAD_ROWS;
        const uint8_t *row[QUAD_ROWS], *next[QUAD_ROWS];
        for (int64_t r = 0; r < QUAD_ROWS; ++r) {
            row[r] = row_of(rows, r < valid ? a + r : a);
            next[r] = a + QUAD_ROWS + r < rows.A ? row_of(rows, a + QUAD_ROWS + r) : row[r];
        }
        for (int64_t t = 0; t < x.count; t += TILE_VECTORS) {
            const int64_t end = t + TILE_VECTORS < x.count ? t + TILE_VECTORS : x.count;
            dot_quad<Format>(row, t == 0 ? next : nullptr, rows.D, x.part(t, end), y + t * y_stride + a,
                             y_stride, valid);
        }
    }
}
