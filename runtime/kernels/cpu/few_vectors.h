// Products of R vectors of rows in tiles with a few vectors of x at a time, at levels other than generic: a tile, which is
// two vectors where they have eight lanes. What is loaded of x is shared by all rows, and what is unpacked of the rows by
// all vectors; both stay in registers, as do the sums of a block. Included by tiled_template.h.

// Four bytes of each row of a vector in the form that is multiplied.
template <bool IS_SIGNED>
struct FewWeights {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    __attribute__((always_inline)) explicit FewWeights(Ints bytes)
        : w(bits(IS_SIGNED ? bytes ^ static_cast<int32_t>(0x80808080) : bytes)) {}  // plus OFFSET
    Bits w;
#else
    __attribute__((always_inline)) explicit FewWeights(Ints bytes) {
        if constexpr (IS_SIGNED)
            signed_words(bytes, w);
        else
            unsigned_words(bytes, w);
    }
    Ints w[2];
#endif
};

// Sums of products of a vector of rows with one vector.
struct FewSums {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    void set(Ints start) { high = Ints{}, low = start; }
    Ints total() const { return (high << 8) + low; }
    Ints high, low;
#else
    void set(Ints start) { sum = start; }
    Ints total() const { return sum; }
    Ints sum;
#endif
};

// The packed values of block b of the first vector.
template <class F>
inline const uint8_t* few_values(const PackedBlocks<F>& x, int64_t b) {
    return x.values + b / unit<F>() * x.stride + b % unit<F>() * (F::HAS_NIBBLES ? 16 : 32);
}

// Adds the products of four bytes of each row with values 4 * v .. 4 * v + 3 of a block of T packed vectors, `next`
// bytes apart.
template <class F, bool IS_SIGNED, int R, int T>
__attribute__((always_inline)) inline void add_bytes(const Ints* bytes, const uint8_t* x, int64_t next,
                                                     int v, FewSums (*sums)[T]) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#ifdef __AVX512VNNI__
    const int64_t at = F::HAS_NIBBLES ? v / 4 * 64 + v % 4 * 4 : 4 * v, plane = PLANE<F>;
#define DPBUSD _mm512_dpbusd_epi32
#else
    const int64_t at = 4 * v, plane = 32;
#define DPBUSD _mm256_dpbusd_avx_epi32
#endif
    Bits w[R];
#pragma GCC unroll 2
    for (int i = 0; i < R; ++i) w[i] = FewWeights<IS_SIGNED>(bytes[i]).w;
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
        const Bits high = four_bytes(x + t * next + at), low = four_bytes(x + t * next + plane + at);
#pragma GCC unroll 2
        for (int i = 0; i < R; ++i) {
            FewSums& sum = sums[i][t];
            sum.high = in_register(ints(DPBUSD(bits(sum.high), w[i], high)));
            sum.low = in_register(ints(DPBUSD(bits(sum.low), w[i], low)));
        }
    }
#undef DPBUSD
#else
    const FewWeights<IS_SIGNED> weights[2] = {FewWeights<IS_SIGNED>(bytes[0]),
                                              FewWeights<IS_SIGNED>(bytes[R - 1])};
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 2
        for (int k = 0; k < 2; ++k) {
            const Ints pair = broadcast_int(x + t * next + 8 * v + 4 * k);
#pragma GCC unroll 2
            for (int i = 0; i < R; ++i)
                sums[i][t].sum = in_register(add_pairs(sums[i][t].sum, weights[i].w[k], pair));
        }
#endif
}

// y[t * y_stride .. + R * LANES - 1] for T vectors.
template <int R, int T, class F>
inline void dot_few_vectors(const TiledTile<F>* tile, const Input& input, float* y, int64_t y_stride) {
    const int64_t n = tile->n;
    const PackedBlocks<F> x(input, n);
    constexpr bool IS_NIBBLES = F::HAS_NIBBLES, IS_SIGNED = !IS_NIBBLES && !F::IS_CODED;
    Floats part[4][T][R];
    for (auto& vectors : part)
        for (auto& rows : vectors)
            for (Floats& sum : rows) sum = zero();
#pragma GCC unroll 1
    for (int64_t first = 0; first < n; first += F::SPAN) {
        const uint8_t* quants[R];
#pragma GCC unroll 2
        for (int i = 0; i < R; ++i) {
            tile[i].ask(first);
            quants[i] = F::quants_of(tile[i].tile, n, first, tile[i].lane);
        }
#pragma GCC unroll 4
        for (int s = 0; s < F::SPAN; ++s) {
            const int64_t b = first + s;
            const uint8_t* values = few_values(x, b);
            Ints products[R][T][F::RANGES];
#pragma GCC unroll 2
            for (int range = 0; range < F::RANGES; ++range) {
                FewSums sums[R][T];
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) {
                    const int64_t at = t * x.next_scale + b;
                    const Ints of_x = F::RANGES == 1 ? broadcast_int(x.sum + at)
                                                     : sum_of_range<F>(range, broadcast_int(x.sum + at),
                                                                       broadcast_int(x.first_sum + at));
#pragma GCC unroll 2
                    for (int i = 0; i < R; ++i) sums[i][t].set(Ints{} - OFFSET<F> * of_x);
                }
                auto load = [&](int i, int v) __attribute__((always_inline)) {
                    return load_in_order(quants[i] + s * F::TILE_QUANTS + 4 * TILE_ROWS * v);
                };
                if constexpr (F::IS_CODED) {
                    constexpr int WORDS = F::QUANT_BYTES / 4 / F::RANGES, LENGTH = 8 / F::RANGES;
                    Ints words[R][WORDS];
#pragma GCC unroll 2
                    for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
                        for (int v = 0; v < WORDS; ++v) words[i][v] = load(i, WORDS * range + v);
#pragma GCC unroll 8
                    for (int v = 0; v < LENGTH; ++v) {
                        const Ints bytes[2] = {F::bytes_of_lanes(words[0], v),
                                               F::bytes_of_lanes(words[R - 1], v)};
                        add_bytes<F, false, R, T>(bytes, values, x.next_vector, LENGTH * range + v,
                                                  sums);
                    }
                } else
#pragma GCC unroll 8
                    for (int v = 0; v < F::QUANT_BYTES / 4; ++v) {
                        Ints bytes[R], upper[R];
#pragma GCC unroll 2
                        for (int i = 0; i < R; ++i) {
                            bytes[i] = load(i, v);
                            upper[i] = bytes[i] >> 4 & 0x0f0f0f0f;
                            if (IS_NIBBLES) bytes[i] &= 0x0f0f0f0f;
                        }
                        add_bytes<F, IS_SIGNED, R, T>(bytes, values, x.next_vector, v, sums);
                        if (IS_NIBBLES)
                            add_bytes<F, IS_SIGNED, R, T>(upper, values, x.next_vector, v + 4, sums);
                    }
#pragma GCC unroll 2
                for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
                    for (int t = 0; t < T; ++t) products[i][t][range] = sums[i][t].total();
            }
#pragma GCC unroll 2
            for (int i = 0; i < R; ++i) {
                const auto numbers = F::numbers_of(tile[i].tile, first, tile[i].lane, s);
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t)
                    part[b % 4][t][i] =
                        add_term<F>(part[b % 4][t][i], products[i][t], numbers,
                                    x.scale[t * x.next_scale + b], x.sum[t * x.next_scale + b]);
            }
        }
    }
    for (int t = 0; t < T; ++t)
        for (int i = 0; i < R; ++i) {
            const Floats of_rows[4] = {part[0][t][i], part[1][t][i], part[2][t][i], part[3][t][i]};
            store_floats(y + t * y_stride + i * LANES, sum_of_four(of_rows));
        }
}
