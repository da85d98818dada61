// Products of a whole tile of sixteen rows with one vector at the levels avx2 and avxvnni, whose vectors have half
// of its rows. Both halves share what is loaded of x. Included by tiled_template.h.

// Products of bytes of eight rows with one vector.
template <bool IS_SIGNED>
struct HalfSums {
    // Adds the products of four bytes of each row with values 4 * v .. 4 * v + 3 of a block of packed x.
    __attribute__((always_inline)) inline void add(Ints bytes, const uint8_t* x, int v) {
#ifdef __AVXVNNI__
        const __m256i w =
            bits(IS_SIGNED ? bytes ^ static_cast<int32_t>(0x80808080) : bytes);  // plus OFFSET
        high = _mm256_dpbusd_avx_epi32(high, w, four_bytes(x + 4 * v));
        low = _mm256_dpbusd_avx_epi32(low, w, four_bytes(x + 32 + 4 * v));
#else
        int32_t pair[2];
        __builtin_memcpy(pair, x + 8 * v, 8);
        Ints w[2];
        if constexpr (IS_SIGNED)
            signed_words(bytes, w);
        else
            unsigned_words(bytes, w);
        for (int k = 0; k < 2; ++k) sum = in_register(add_pairs(sum, w[k], Ints{} + pair[k]));
#endif
    }

#ifdef __AVXVNNI__
    explicit HalfSums(Ints start) : high(_mm256_setzero_si256()), low(bits(start)) {}
    Ints total() const { return ints(_mm256_add_epi32(_mm256_slli_epi32(high, 8), low)); }
    __m256i high, low;
#else
    explicit HalfSums(Ints start) : sum(start) {}
    Ints total() const { return sum; }
    Ints sum;
#endif
};

// Adds a block of a type whose quants are unpacked to bytes.
template <class F>
inline void add_coded(const uint8_t* quants, const uint8_t* values, HalfSums<false>* sums) {
    for (int i = 0; i < 2; ++i) {
        Ints quarter[F::QUANT_BYTES / 4], bytes[8];
        for (int v = 0; v < F::QUANT_BYTES / 4; ++v)
            quarter[v] = load_in_order(quants + 4 * TILE_ROWS * v + 4 * LANES * i);
        F::bytes_of_lanes(quarter, bytes);
#pragma GCC unroll 8
        for (int v = 0; v < 8; ++v) sums[i].add(bytes[v], values, v);
    }
}

// y[0 .. TILE_ROWS-1]
template <class F>
inline void dot_whole_tile(const TiledTile<F>& tile, const Input& input, float* y) {
    const PackedBlocks<F> x(input, tile.n);
    constexpr bool IS_NIBBLES = F::HAS_NIBBLES, IS_SIGNED = !IS_NIBBLES && !F::IS_CODED;
    Floats part[4][2];
    for (auto& halves : part) halves[0] = halves[1] = zero();
#pragma GCC unroll 1
    for (int64_t b = 0; b < tile.n; ++b) {
        tile.ask(b);
        const uint8_t *quants = F::quants_of(tile.tile, tile.n, b, 0),
                      *values = x.values + b * x.stride;
        const Ints start = Ints{} - OFFSET<F> * x.sum[b];
        HalfSums<IS_SIGNED> sums[2] = {HalfSums<IS_SIGNED>(start), HalfSums<IS_SIGNED>(start)};
        if constexpr (F::IS_CODED)
            add_coded<F>(quants, values, sums);
        else
#pragma GCC unroll 8
            for (int v = 0; v < F::QUANT_BYTES / 4; ++v)
#pragma GCC unroll 2
                for (int i = 0; i < 2; ++i) {
                    const Ints bytes = load_in_order(quants + 4 * TILE_ROWS * v + 4 * LANES * i);
                    sums[i].add(IS_NIBBLES ? bytes & 0x0f0f0f0f : bytes, values, v);
                    if (IS_NIBBLES) sums[i].add(bytes >> 4 & 0x0f0f0f0f, values, v + 4);
                }
        for (int i = 0; i < 2; ++i)
            part[b % 4][i] = add_term(part[b % 4][i], sums[i].total(),
                                      F::numbers_of(tile.tile, b, i * LANES), x.scale[b], x.sum[b]);
    }
    for (int i = 0; i < 2; ++i) {
        const Floats of_half[4] = {part[0][i], part[1][i], part[2][i], part[3][i]};
        store_floats(y + i * LANES, sum_of_four(of_half));
    }
}
