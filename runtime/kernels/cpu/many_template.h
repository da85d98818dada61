// Sums of rows of small blocks for several vectors, all rows of a group at a time. Included by
// rows_template.h; AVX-512 uses many_avx512.h instead.
//
// The quants of each pair of rows are split once for all vectors.

constexpr int64_t SPLIT_VECTORS = 64 * 1024 / (4 * LANES);  // of a chunk of SUM_ROWS rows, any format
constexpr int64_t FILLED = 8;                               // vectors whose factors stay in L1

// y[v] += the unit's sums times their scales, for two vectors. Sums of `AT_ONCE` parts fill eight registers.
template <class Format>
inline void add_split_units(const Ints* split, int64_t k, const SumFactors* const* factors,
                            int64_t first, float* const* y) {
    constexpr int64_t PARTS = Format::PARTS, TIMES = Format::QUANT_BYTES / 4;
    constexpr int AT_ONCE = 4, HALVES = AT_ONCE / PARTS;
    for (int64_t at = 0; at < 2 * PARTS; at += AT_ONCE) {
        Ints sum[2][AT_ONCE];
        for (int v = 0; v < 2; ++v)
            for (int h = 0; h < HALVES; ++h)
                Format::start(spread<TIMES>(factors[v]->offset, first), sum[v] + h * PARTS);
        const Ints* words = split + at;
        for (int64_t r = 0; r < (k + 1) / 2; ++r, words += 2 * PARTS) {
            const Ints factor[2] = {spread<TIMES>(factors[0]->pair[r], first),
                                    spread<TIMES>(factors[1]->pair[r], first)};
            for (int p = 0; p < AT_ONCE; ++p) {
                const Ints w = in_register(words[p]);
                for (int v = 0; v < 2; ++v) sum[v][p] = in_register(add_pairs(sum[v][p], w, factor[v]));
            }
        }
        for (int v = 0; v < 2; ++v) {
            Floats scale[PARTS];
            const int32_t* scale_bits = reinterpret_cast<const int32_t*>(factors[v]->scale);
            Format::scales(reinterpret_cast<Floats>(spread<TIMES>(scale_bits, first)), scale);
            for (int p = 0; p < AT_ONCE; ++p) {
                float* to = y[v] + (at + p) * LANES;
                store_floats(to, multiply_add(to_floats(sum[v][p]), scale[p % PARTS], load_floats(to)));
            }
        }
    }
}

// The quants of a chunk's whole units, in pairs of rows as add_unit() needs them.
template <class Format>
inline void split_units(const uint8_t* const* quants, int64_t k, int64_t units, Ints* to) {
    constexpr int64_t PARTS = Format::PARTS;
    for (int64_t u = 0; u < units; ++u)
        for (int64_t r = 0; r < k; r += 2, to += 2 * PARTS) {
            const Ints a = load_ints(quants[r] + u * 4 * LANES);
            const Ints b = r + 1 < k ? load_ints(quants[r + 1] + u * 4 * LANES) : a;
            Format::split(interleave_low(a, b), to);
            Format::split(interleave_high(a, b), to + PARTS);
        }
}

// Sums all k rows of a group for all vectors.
template <class Format>
inline void add_group_to_many(const uint8_t* const* rows, int64_t k, int64_t n, const ManySums& s) {
    constexpr int64_t UNIT = Format::UNIT, PARTS = Format::PARTS;
    alignas(64) Ints split[SPLIT_VECTORS];
    alignas(64) float scale[SUM_ROWS][CHUNK];
    SumFactors factors[FILLED];
    const uint8_t* quants[SUM_ROWS];
    alignas(64) uint8_t copy[Format::IS_PLANAR ? 1 : SUM_ROWS][CHUNK * 32];
    for (int64_t b0 = s.d0 / BLOCK, b1; b0 < s.d1 / BLOCK; b0 = b1) {
        b1 = b0 + CHUNK < s.d1 / BLOCK ? b0 + CHUNK : s.d1 / BLOCK;
        const int64_t m = b1 - b0, units = m * BLOCK / UNIT, rest = m * BLOCK % UNIT;
        read_scales<Format>(rows, k, n, b0, m, scale);
        find_quants<Format>(rows, k, n, b0, m, copy, quants);
        split_units<Format>(quants, k, units, split);
        for (int64_t t0 = 0; t0 < s.count; t0 += FILLED) {
            const int64_t t1 = t0 + FILLED < s.count ? t0 + FILLED : s.count;
            for (int64_t t = t0; t < t1; ++t)
                fill<Format>(factors[t - t0], scale, k, m, s.c + t * s.c_stride);
            for (int64_t u = 0; u < units; ++u) {
                const Ints* words = split + u * ((k + 1) / 2) * 2 * PARTS;
                for (int64_t t = t0; t < t1; t += 2) {
                    float nowhere[UNIT];  // scratch for an odd vector
                    const int64_t other = t + 1 < t1 ? t + 1 : t, d = b0 * BLOCK + u * UNIT;
                    const SumFactors* of[2] = {factors + t - t0, factors + other - t0};
                    float* to[2] = {s.y + t * s.y_stride + d, s.y + other * s.y_stride + d};
                    if (other == t) {
                        __builtin_memset(nowhere, 0, sizeof nowhere);
                        to[1] = nowhere;
                    }
                    add_split_units<Format>(words, k, of, u * UNIT / BLOCK, to);
                }
            }
            for (int64_t t = t0; rest && t < t1; ++t)
                add_part_of_unit<Format>(quants, units * 4 * LANES, k, factors[t - t0],
                                         units * UNIT / BLOCK, rest,
                                         s.y + t * s.y_stride + b0 * BLOCK + units * UNIT);
        }
    }
}
