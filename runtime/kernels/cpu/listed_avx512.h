// Listed sums of planar q8_0 and q4_0 rows, four blocks of columns at a time, bit-identical to add_group().
// Included by listed_sums.h.
//
// The lanes of factors are four rows times four blocks, and those of a window's largest products are its
// groups times these blocks. Each row's scales are converted once for all vectors.

// v's lanes i .. i + 3, each 16 / 4 times, or for `TIMES` 8 two lanes.
template <int TIMES>
inline __m512i lanes_from(int i) {
    const __m512i fours = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    return _mm512_add_epi32(TIMES == 4 ? fours : _mm512_srli_epi32(fours, 1), _mm512_set1_epi32(i));
}

inline Ints quarter_of(Ints v, int64_t q) {
    const __m512i ones = _mm512_set_epi32(3, 2, 1, 0, 3, 2, 1, 0, 3, 2, 1, 0, 3, 2, 1, 0);
    return ints(_mm512_permutexvar_epi32(_mm512_add_epi32(ones, _mm512_set1_epi32(static_cast<int>(4 * q))), bits(v)));
}

template <class Op>
inline Ints over_quarters(Ints v, const Op& op) {
    v = op(v, ints(_mm512_shuffle_i32x4(bits(v), bits(v), 0x4e)));
    return op(v, ints(_mm512_shuffle_i32x4(bits(v), bits(v), 0xb1)));
}

template <class Format>
struct BlockTile {
    static constexpr int64_t BLOCKS = 4, COLUMNS = BLOCKS * BLOCK, ROW_BYTES = BLOCKS * Format::QUANT_BYTES;
    static constexpr int64_t PADDED = 4, PARTS = Format::PARTS, UNITS = COLUMNS / Format::UNIT;
    static constexpr int TIMES = Format::QUANT_BYTES / 4;
    static constexpr AccumulateRows* ADD_ROWS = accumulate_rows<Format>;

    BlockTile() { _mm_store_ps(scale[WINDOW_ROWS], _mm_setzero_ps()); }

    static inline void prepare(const Listed&) {}

    void copy(const uint8_t* row, int64_t D, int64_t d, int64_t place) {
        const int64_t n = D / BLOCK, b = d / BLOCK;
        copy_and_ask<ROW_BYTES>(Format::quants(row, n, b), bytes + place * ROW_BYTES);
        _mm_store_ps(scale[place], four_f16(Format::scale(row, n, b)));
    }

    void add(const Listed& list, float* y) const {
        alignas(64) float exact[WINDOW_ROWS][BLOCKS];  // coefficients times scales
        Ints largest = {};
        for (int g = 0; g < WINDOW_GROUPS; ++g) {
            Ints most = {};
            for (int64_t i = list.begin[g]; i < list.begin[g + 1]; i += 4) {
                const Floats product = products(list, i);
                store_floats(exact[i - list.first()], product);
                most = larger(most, reinterpret_cast<Ints>(product) & 0x7fffffff);
            }
            most = over_quarters(most, larger);
            largest = ints(_mm512_mask_mov_epi32(bits(largest), static_cast<__mmask16>(15 << 4 * g), bits(most)));
        }
        const FactorScale by = factor_scale(largest);
        Floats out[UNITS][2][PARTS];
        for (int v = 0; v < 8; ++v) (&out[0][0][0])[v] = load_floats(y + v * LANES);
        for (int g = 0; g < WINDOW_GROUPS; ++g) {
            if (list.begin[g] == list.begin[g + 1]) continue;
            const Floats up = reinterpret_cast<Floats>(quarter_of(reinterpret_cast<Ints>(by.up), g));
            Ints sum[UNITS][2][PARTS] = {}, zeros = {};
            for (int64_t i = list.begin[g]; i < list.begin[g + 1]; i += 4) {
                const Ints factor = to_ints(mul(load_floats(exact[i - list.first()]), up));
                const Ints pairs = paired(factor);
                zeros = add_pairs(zeros, pairs, Ints{} + MINUS_ZEROS<Format>);
                add_two(sum, pairs, 0, list.place[i], list.place[i + 1]);
                add_two(sum, pairs, 8, list.place[i + 2], list.place[i + 3]);
            }
            zeros = over_quarters(zeros, [](Ints a, Ints b) { return a + b; });
            for (int u = 0; u < UNITS; ++u) {
                Ints start[PARTS];
                Floats scale[PARTS];
                Format::start(spread_from(zeros, 2 * u), start);
                Format::scales(reinterpret_cast<Floats>(spread_from(reinterpret_cast<Ints>(by.scale), 4 * g + 2 * u)), scale);
                for (int half = 0; half < 2; ++half)
                    for (int p = 0; p < PARTS; ++p)
                        out[u][half][p] = multiply_add(to_floats(sum[u][half][p] + start[p]), scale[p], out[u][half][p]);
            }
        }
        for (int v = 0; v < 8; ++v) store_floats(y + v * LANES, (&out[0][0][0])[v]);
    }

  private:
    // Of four rows, each times its four scales.
    Floats products(const Listed& list, int64_t i) const {
        __m512 four = _mm512_castps128_ps512(_mm_load_ps(scale[list.place[i]]));
        four = _mm512_insertf32x4(four, _mm_load_ps(scale[list.place[i + 1]]), 1);
        four = _mm512_insertf32x4(four, _mm_load_ps(scale[list.place[i + 2]]), 2);
        four = _mm512_insertf32x4(four, _mm_load_ps(scale[list.place[i + 3]]), 3);
        const __m512 c = _mm512_broadcast_f32x4(_mm_loadu_ps(list.c + i));
        return mul(four, _mm512_permutexvar_ps(lanes_from<4>(0), c));
    }

    // 16-bit factors of rows 0 and 1 in the first quarter, of rows 2 and 3 in the third.
    static Ints paired(Ints factor) {
        const __m512i other = _mm512_maskz_shuffle_i32x4(0x0f0f, bits(factor), bits(factor), 0xf5);
        const __m512i low = _mm512_maskz_mov_epi16(0x00550055, bits(factor));
        return ints(_mm512_or_si512(low, _mm512_slli_epi32(other, 16)));
    }

    static Ints spread_from(Ints v, int i) { return ints(_mm512_permutexvar_epi32(lanes_from<TIMES>(i), bits(v))); }

    void add_two(Ints (*sum)[2][PARTS], Ints pairs, int at, int64_t a, int64_t b) const {
        for (int u = 0; u < UNITS; ++u) {
            const Ints factor = spread_from(pairs, at + 2 * u);
            const Ints x = load_ints(bytes + a * ROW_BYTES + 64 * u), y = load_ints(bytes + b * ROW_BYTES + 64 * u);
            Ints part[2][PARTS];
            Format::split(interleave_low(x, y), part[0]);
            Format::split(interleave_high(x, y), part[1]);
            for (int half = 0; half < 2; ++half)
                for (int p = 0; p < PARTS; ++p) sum[u][half][p] = add_pairs(sum[u][half][p], part[half][p], factor);
        }
    }

    alignas(64) uint8_t bytes[(WINDOW_ROWS + 1) * ROW_BYTES];
    alignas(16) float scale[WINDOW_ROWS + 1][BLOCKS];
};
