// Sums of grouped rows for several vectors at the levels avx2 and avxvnni, bit-identical to grouped_template.h,
// which includes this.
//
// Lanes of factors are eight vectors, so the largest factor is found without a reduction over lanes. A block's
// quants are split into signed values once for these vectors: sums need no offsets, and the parts of a place that
// belong to the same columns share a sum.

constexpr int64_t EIGHT = LANES;  // vectors whose factors are computed together

// Factors of a block for eight vectors.
struct EightFactors {
    alignas(64) int32_t even[PLACES][EIGHT], odd[PLACES][EIGHT];
    alignas(64) float scale[EIGHT];
};

// The coefficients of eight vectors from t on for each row of a group; 0 for missing vectors.
inline void gather_eight(const ManySums& s, int64_t t, float (*to)[EIGHT]) {
    alignas(64) static constexpr float nothing[SUM_ROWS] = {};
    for (int64_t j = 0; j < SUM_ROWS; j += 4) {
        const uint8_t* four[EIGHT];
        for (int64_t i = 0; i < EIGHT; ++i)
            four[i] = reinterpret_cast<const uint8_t*>(
                (t + i < s.count ? s.c + (t + i) * s.c_stride : nothing) + j);
        transpose_16(four, reinterpret_cast<Ints*>(to[j]));
    }
}

// The factors of a block's rows, as fill() computes them.
inline void fill_eight(const uint8_t* scales, const float (*c)[EIGHT], EightFactors& to) {
    alignas(64) float scale[SUM_ROWS];
    for (int64_t r = 0; r < SUM_ROWS; r += LANES) store_floats(scale + r, load_f16(scales + 2 * r));
    auto exact = [&](int64_t r) { return mul(broadcast(scale[r]), load_floats(c[r])); };
    Ints largest = {};
    for (int64_t r = 0; r < SUM_ROWS; ++r)
        largest = larger(largest, reinterpret_cast<Ints>(exact(r)) & 0x7fffffff);
    const FactorScale by = factor_scale(largest);
    auto pair = [&](int64_t r, int32_t* at) {
        const __m256i low = bits(to_ints(mul(exact(r), by.up)));
        const __m256i high = bits(to_ints(mul(exact(r + 2 * PLACES), by.up)));
        const Ints both = ints(_mm256_blend_epi16(low, _mm256_slli_epi32(high, 16), 0xaa));
        __builtin_memcpy(at, &both, sizeof both);
    };
    for (int64_t p = 0; p < PLACES; ++p) pair(p, to.even[p]), pair(p + PLACES, to.odd[p]);
    store_floats(to.scale, by.scale);
}

constexpr int COLUMN_VECTORS = BLOCK / LANES;

// A place's quants as 16-bit values, in vectors of columns: of[0] those of rows with even factors, of[1] the others.
typedef Ints PlaceWords[2][COLUMN_VECTORS];

inline void split_place(Bytes, const uint8_t* quants, PlaceWords& of) {
    for (int v = 0; v < COLUMN_VECTORS; ++v) {
        const Ints words = load_in_order(quants + 4 * LANES * v);
        of[0][v] = high_bytes(ints(_mm256_slli_epi16(bits(words), 8)));
        of[1][v] = high_bytes(words);
    }
}

inline void split_place(Nibbles, const uint8_t* quants, PlaceWords& of) {
    for (int u = 0; u < COLUMN_VECTORS / 2; ++u) {
        const Ints words = load_in_order(quants + 4 * LANES * u);
        for (int v = 0; v < 4; ++v)
            of[v / 2][v % 2 * 2 + u] = ints(
                _mm256_sub_epi16(bits(shift_words(words, 4 * v) & 0x000f000f), _mm256_set1_epi16(8)));
    }
}

// y + i * y_stride, BLOCK columns, += the sums over a block's rows with the factors of vector `first` + i.
template <int COUNT>
inline void add_places(const PlaceWords* words, const EightFactors& factors, int64_t first,
                       bool is_behind, float* y, int64_t y_stride) {
    Ints sum[COUNT][COLUMN_VECTORS] = {};
    for (int64_t p = 0; p < PLACES; ++p)
        for (int odd = 0; odd < 2; ++odd) {
            Ints factor[COUNT];
            for (int i = 0; i < COUNT; ++i)
                factor[i] = Ints{} + (odd ? factors.odd : factors.even)[p][first + i];
            for (int v = 0; v < COLUMN_VECTORS; ++v) {
                const Ints w = in_register(words[p][odd][v]);
                for (int i = 0; i < COUNT; ++i)
                    sum[i][v] = in_register(add_pairs(sum[i][v], w, factor[i]));
            }
        }
    for (int i = 0; i < COUNT; ++i)
        for (int v = 0; v < COLUMN_VECTORS; ++v)
            add_scaled(to_floats(sum[i][v]), broadcast(factors.scale[first + i]), is_behind,
                       y + i * y_stride + v * LANES);
}

// Adds a group's sums to eight vectors at a time; returns the number of vectors that are done: all but at most two.
template <class F>
inline int64_t add_grouped_lanes(const uint8_t* group, int64_t D, const ManySums& s) {
    alignas(64) float c[SUM_ROWS][EIGHT];
    PlaceWords words[PLACES];
    EightFactors factors;
    int64_t t = 0;
    for (int64_t count; s.count - t > 2; t += count) {
        count = s.count - t < EIGHT ? s.count - t : EIGHT;
        gather_eight(s, t, c);
        for (int64_t b = s.d0 / BLOCK; b < s.d1 / BLOCK; ++b) {
            const uint8_t* tile = F::tile(group, b);
            fill_eight(tile, c, factors);
            for (int64_t p = 0; p < PLACES; ++p) {
                const uint8_t* quants = tile + F::SCALES_BYTES + p * F::PLACE_BYTES;
                for (int64_t at = 0; at < F::PLACE_BYTES; at += 64)
                    __builtin_prefetch(quants + 2 * F::TILE_BYTES + at);
                split_place(F(), quants, words[p]);
            }
            const bool is_behind = is_behind_units<F>(b, D);
            float* y = s.y + t * s.y_stride + b * BLOCK;
            in_steps<2, 1>(0, count, [&](auto some, int64_t i) {
                add_places<some>(words, factors, i, is_behind, y + i * s.y_stride, s.y_stride);
            });
        }
    }
    return t;
}
