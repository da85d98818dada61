// few_products() for levels that multiply the block of one row at a time: blocks_madd.h and blocks_avxvnni.h, which
// define products_of<F>(block, x), LANES partial sums of one row's block, include this.

template <class F>
__attribute__((always_inline)) inline Ints few_products(const uint8_t* const* quants, int64_t m,
                                                        const uint8_t* x, int64_t stride) {
    Ints s[FEW][4];
    for (int r = 0; m < 4 && r < FEW; ++r)
        for (int i = 0; i < 4; ++i) s[r][i] = Ints{};
    for (int i = 0; i < m; ++i)
        for (int r = 0; r < FEW; ++r)
            s[r][i] = products_of<F>(quants[r] + i * F::QUANT_BYTES, x + i * stride);
    return reduce(s);
}

constexpr int few_lane(int r, int p) { return 4 * r + p; }
