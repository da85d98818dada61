// Sums of grouped rows of f16 and bf16, bit-identical to those of rows in other layouts. A group of
// SUM_ROWS rows is stored by blocks of columns, each with all rows. The sums of a block stay in
// registers, and memory is read sequentially. Included by rows_template.h.

template <class Float>
struct GroupedFloats : Float {
    typedef Float InFile;
    static constexpr int64_t ROWS = SUM_ROWS, TILE_BYTES = SUM_ROWS * Float::BLOCK_BYTES;

    static inline const uint8_t* tile(const uint8_t* group, int64_t b) {
        return group + b * TILE_BYTES;
    }
    // 32 values of row r.
    static inline void copy_block(const uint8_t* group, int64_t, int64_t b, int64_t r, uint8_t* to) {
        __builtin_memcpy(to, tile(group, b) + r * Float::BLOCK_BYTES, Float::BLOCK_BYTES);
    }
};

// y[t * y_stride + d] += the sum over a block's rows, in order, times c[t * c_stride + row], for d < BLOCK and
// COUNT vectors.
template <class F, int COUNT>
inline void add_float_block(const uint8_t* tile, const float* c, int64_t c_stride, float* y,
                            int64_t y_stride) {
    add_weighted<COUNT, VECTORS>(y, y_stride, SUM_ROWS, [&](int64_t r, Floats* w) {
        F::unpack(tile + r * F::BLOCK_BYTES, w);
        for (int v = 0; v < VECTORS; ++v) w[v] = in_register(w[v]);
    }, [&](int t, int64_t r) { return broadcast(c[t * c_stride + r]); });
}

template <class F>
void accumulate_grouped_floats(const Rows& rows, const float* c, float* y, int64_t a0, int64_t a1,
                               int64_t d0, int64_t d1) {
    for (int64_t a = a0; a < a1; a += SUM_ROWS)
        for (int64_t b = d0 / BLOCK; b < d1 / BLOCK; ++b)
            add_float_block<F, 1>(F::tile(rows.weight + a * rows.stride, b), c + a, 0, y + b * BLOCK,
                                  0);
}

// One group. A coefficient of 0 has no effect if weights are finite.
template <class F>
void accumulate_grouped_floats_many(const Rows& rows, int64_t a0, int64_t, const ManySums& s) {
    for (int64_t b = s.d0 / BLOCK; b < s.d1 / BLOCK; ++b) {
        const uint8_t* tile = F::tile(rows.weight + a0 * rows.stride, b);
        in_steps < LANES<16 ? 2 : 8, 2, 1>(0, s.count, [&](auto count, int64_t t) {
            add_float_block<F, count>(tile, s.c + t * s.c_stride, s.c_stride,
                                      s.y + t * s.y_stride + b * BLOCK, s.y_stride);
        });
    }
}
