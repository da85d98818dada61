// Listed sums of planar rows of small blocks, four blocks of columns at a time, bit-identical to add_group().
// Included by listed_sums.h.
//
// Lanes of factors are four rows times four blocks, and those of the largest products four groups times four
// blocks. A row's scales are converted once for all vectors.

// Lanes first, first + 1, ... of v, each TIMES times.
template <int TIMES>
inline Ints spread_lanes(Ints v, int first) {
    const __m512i fours = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    const __m512i lanes = TIMES == 4 ? fours : _mm512_srli_epi32(fours, 1);
    return ints(_mm512_permutexvar_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(first)), bits(v)));
}

// Lanes first .. first + 3 of v, four times.
inline Ints repeat_lanes(Ints v, int first) {
    const __m512i lanes = _mm512_broadcast_i32x4(_mm_set_epi32(3, 2, 1, 0));
    return ints(_mm512_permutexvar_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(first)), bits(v)));
}

// op over the four quarters of v; the result is in each of them.
template <class Op>
inline Ints over_quarters(Ints v, const Op& op) {
    v = op(v, ints(_mm512_shuffle_i32x4(bits(v), bits(v), 0x4e)));
    return op(v, ints(_mm512_shuffle_i32x4(bits(v), bits(v), 0xb1)));
}

template <class Format>
struct BlockTile {
    static constexpr int64_t BLOCKS = 4, COLUMNS = BLOCKS * BLOCK,
                             ROW_BYTES = BLOCKS * Format::QUANT_BYTES;
    static constexpr int64_t PADDED = 4;  // rows in the lanes of factors
    static constexpr int PARTS = Format::PARTS, UNITS = COLUMNS / Format::UNIT,
                         BLOCKS_OF_UNIT = BLOCKS / UNITS;
    static constexpr AccumulateRows* ADD_ROWS = accumulate_rows<Format>;
    typedef Ints UnitSums[2][PARTS];

    BlockTile() { _mm_store_ps(scale[WINDOW_ROWS], _mm_setzero_ps()); }  // of rows that pad a list

    static inline void prepare(const Listed&) {}

    void copy(const uint8_t* row, int64_t D, int64_t d, int64_t place) {
        const int64_t n = D / BLOCK, b = d / BLOCK;
        copy_and_ask<ROW_BYTES>(Format::quants(row, n, b), bytes + place * ROW_BYTES);
        _mm_store_ps(scale[place], four_f16(Format::scale(row, n, b)));
    }

    void add(const Listed& list, float* y) const {
        alignas(64) float product[WINDOW_ROWS][BLOCKS];  // coefficients times scales
        const FactorScale by = factor_scale(largest_products(list, product));
        Floats out[UNITS][2][PARTS];
        for (int u = 0; u < UNITS; ++u)
            for (int v = 0; v < 2 * PARTS; ++v)
                out[u][v / PARTS][v % PARTS] = load_floats(y + u * Format::UNIT + v * LANES);
        for (int g = 0; g < WINDOW_GROUPS; ++g) {
            if (list.begin[g] == list.begin[g + 1]) continue;
            const Floats up =
                reinterpret_cast<Floats>(repeat_lanes(reinterpret_cast<Ints>(by.up), 4 * g));
            UnitSums sum[UNITS] = {};
            Ints zeros = {};
            for (int64_t i = list.begin[g]; i < list.begin[g + 1]; i += 4) {
                const Ints factors = paired(to_ints(mul(load_floats(product[i - list.first()]), up)));
                zeros = add_pairs(zeros, factors, Ints{} + MINUS_ZEROS<Format>);
                add_two(sum, factors, 0, list.place + i);
                add_two(sum, factors, 8, list.place + i + 2);
            }
            zeros = over_quarters(zeros, [](Ints a, Ints b) { return a + b; });
            for (int u = 0; u < UNITS; ++u) {
                const int first = u * BLOCKS_OF_UNIT;
                Ints start[PARTS];
                Floats scales[PARTS];
                Format::start(of_unit(zeros, first), start);
                const Ints of_group = of_unit(reinterpret_cast<Ints>(by.scale), 4 * g + first);
                Format::scales(reinterpret_cast<Floats>(of_group), scales);
                for (int half = 0; half < 2; ++half)
                    for (int p = 0; p < PARTS; ++p) {
                        Floats& to = out[u][half][p];
                        to = multiply_add(to_floats(sum[u][half][p] + start[p]), scales[p], to);
                    }
            }
        }
        for (int u = 0; u < UNITS; ++u)
            for (int v = 0; v < 2 * PARTS; ++v)
                store_floats(y + u * Format::UNIT + v * LANES, out[u][v / PARTS][v % PARTS]);
    }

  private:
    // Writes each listed row's coefficient times its scales; returns the largest magnitude for each group
    // and block.
    Ints largest_products(const Listed& list, float (*product)[BLOCKS]) const {
        Ints largest = {};
        for (int g = 0; g < WINDOW_GROUPS; ++g) {
            Ints of_group = {};
            for (int64_t i = list.begin[g]; i < list.begin[g + 1]; i += 4) {
                const uint16_t* place = list.place + i;
                __m512 scales = _mm512_castps128_ps512(_mm_load_ps(scale[place[0]]));
                scales = _mm512_insertf32x4(scales, _mm_load_ps(scale[place[1]]), 1);
                scales = _mm512_insertf32x4(scales, _mm_load_ps(scale[place[2]]), 2);
                scales = _mm512_insertf32x4(scales, _mm_load_ps(scale[place[3]]), 3);
                const __m512 c = _mm512_broadcast_f32x4(_mm_loadu_ps(list.c + i));
                const Ints spread = spread_lanes<4>(reinterpret_cast<Ints>(c), 0);
                const Floats exact = mul(scales, reinterpret_cast<Floats>(spread));
                store_floats(product[i - list.first()], exact);
                of_group = larger(of_group, reinterpret_cast<Ints>(exact) & 0x7fffffff);
            }
            of_group = over_quarters(of_group, larger);
            largest = ints(_mm512_mask_mov_epi32(bits(largest), static_cast<__mmask16>(15 << 4 * g),
                                                 bits(of_group)));
        }
        return largest;
    }

    // 16-bit factors of rows 0 and 1 in the first quarter, of rows 2 and 3 in the third, else 0.
    static Ints paired(Ints factor) {
        const __m512i odd = _mm512_maskz_shuffle_i32x4(0x0f0f, bits(factor), bits(factor), 0xf5);
        const __m512i even = _mm512_maskz_mov_epi16(0x00550055, bits(factor));
        return ints(_mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
    }

    // The lanes of a unit's blocks, from lane `first` of v on, each in the lanes of its columns.
    static Ints of_unit(Ints v, int first) { return spread_lanes<Format::QUANT_BYTES / 4>(v, first); }

    // Adds two rows, whose factors are in lanes first .. first + 3.
    void add_two(UnitSums* sum, Ints factors, int first, const uint16_t* place) const {
        for (int u = 0; u < UNITS; ++u) {
            const Ints factor = of_unit(factors, first + u * BLOCKS_OF_UNIT);
            const Ints a = load_ints(bytes + place[0] * ROW_BYTES + 64 * u);
            const Ints b = load_ints(bytes + place[1] * ROW_BYTES + 64 * u);
            Ints part[2][PARTS];
            Format::split(interleave_low(a, b), part[0]);
            Format::split(interleave_high(a, b), part[1]);
            for (int half = 0; half < 2; ++half)
                for (int p = 0; p < PARTS; ++p)
                    sum[u][half][p] = add_pairs(sum[u][half][p], part[half][p], factor);
        }
    }

    alignas(64) uint8_t bytes[(WINDOW_ROWS + 1) * ROW_BYTES];
    alignas(16) float scale[WINDOW_ROWS + 1][BLOCKS];
};
