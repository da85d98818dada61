// Sums of grouped rows of f16 and bf16, bit-identical to those of rows in other layouts. A group of
// SUM_ROWS rows is stored by blocks of columns, each with all rows. The sums of a block stay in
// registers, and memory is read sequentially. Included by rows_template.h.

template <class Float>
struct GroupedFloats : Float {
    static constexpr int64_t TILE_BYTES = SUM_ROWS * Float::BLOCK_BYTES;

    static inline const uint8_t* tile(const uint8_t* group, int64_t b) {
        return group + b * TILE_BYTES;
    }
};

// y[i][0 .. BLOCK-1] += the sum over a block's rows, in order, times c[i * c_stride + row].
template <class F, int COUNT>
inline void add_float_block(const uint8_t* tile, const float* c, int64_t c_stride, float* const* y) {
    Floats sum[COUNT][VECTORS];
    for (int i = 0; i < COUNT; ++i)
        for (int v = 0; v < VECTORS; ++v) sum[i][v] = load_floats(y[i] + v * LANES);
    for (int64_t r = 0; r < SUM_ROWS; ++r, tile += F::BLOCK_BYTES) {
        Floats w[VECTORS];
        F::unpack(tile, w);
        for (int v = 0; v < VECTORS; ++v) w[v] = in_register(w[v]);
        for (int i = 0; i < COUNT; ++i) {
            const Floats by = broadcast(c[i * c_stride + r]);
            for (int v = 0; v < VECTORS; ++v) sum[i][v] = multiply_add(w[v], by, sum[i][v]);
        }
    }
    for (int i = 0; i < COUNT; ++i)
        for (int v = 0; v < VECTORS; ++v) store_floats(y[i] + v * LANES, sum[i][v]);
}

template <class F>
void accumulate_grouped_floats(const Rows& rows, const float* c, float* y, int64_t a0, int64_t a1,
                               int64_t d0, int64_t d1) {
    for (int64_t a = a0; a < a1; a += SUM_ROWS)
        for (int64_t b = d0 / BLOCK; b < d1 / BLOCK; ++b) {
            float* to = y + b * BLOCK;
            add_float_block<F, 1>(F::tile(rows.weight + a * rows.stride, b), c + a, 0, &to);
        }
}

template <class F, int COUNT>
inline void add_float_block_to(const uint8_t* tile, const ManySums& s, int64_t t, int64_t b) {
    float* to[COUNT];
    for (int i = 0; i < COUNT; ++i) to[i] = s.y + (t + i) * s.y_stride + b * BLOCK;
    add_float_block<F, COUNT>(tile, s.c + t * s.c_stride, s.c_stride, to);
}

// One group. A coefficient of 0 has no effect if weights are finite.
template <class F>
void accumulate_grouped_floats_many(const Rows& rows, int64_t a0, int64_t, const ManySums& s) {
    constexpr int MOST = LANES < 16 ? 2 : 8;
    for (int64_t b = s.d0 / BLOCK; b < s.d1 / BLOCK; ++b) {
        const uint8_t* tile = F::tile(rows.weight + a0 * rows.stride, b);
        int64_t t = 0;
        for (; t + MOST <= s.count; t += MOST) add_float_block_to<F, MOST>(tile, s, t, b);
        for (; t + 2 <= s.count; t += 2) add_float_block_to<F, 2>(tile, s, t, b);
        if (t < s.count) add_float_block_to<F, 1>(tile, s, t, b);
    }
}

template <class F>
void unpack_grouped_floats(const Rows& rows, float* out, int64_t a0, int64_t a1) {
    for (int64_t a = a0; a < a1; ++a) {
        const int64_t row = rows.index ? rows.index[a] : a, r = row % SUM_ROWS;
        const uint8_t* group = rows.weight + (row - r) * rows.stride;
        for (int64_t b = 0; b < rows.D / BLOCK; ++b) {
            Floats w[VECTORS];
            F::unpack(F::tile(group, b) + r * F::BLOCK_BYTES, w);
            for (int v = 0; v < VECTORS; ++v)
                store_floats(out + a * rows.D + b * BLOCK + v * LANES, w[v]);
        }
    }
}
