// Kernels of types whose rows have a factor of their own: an f32 number before the blocks of a row; in a tile, those of
// all rows. Included by rows_template.h.
//
// Products with the blocks are multiplied by it at the end, a coefficient of a row before it is used, and an unpacked
// value at the end; each is rounded once more.

// The rows without their factors.
template <class F>
inline Rows without_factors(const Rows& rows) {
    Rows inner = rows;
    inner.weight += FACTOR_BYTES * (IS_TILED<F> ? TILE_ROWS : 1);
    return inner;
}

template <class F>
inline float factor_of(const Rows& rows, int64_t a) {
    const int64_t row = rows.index ? rows.index[a] : a, r = IS_TILED<F> ? row % TILE_ROWS : 0;
    float factor;
    __builtin_memcpy(&factor, rows.weight + (row - r) * rows.stride + FACTOR_BYTES * r, FACTOR_BYTES);
    return factor;
}

template <class F, DotRows DOT>
void dot_with_factors(const Rows& rows, const Input& x, float* y, int64_t y_stride, int64_t a0,
                      int64_t a1) {
    DOT(without_factors<F>(rows), x, y, y_stride, a0, a1);
    for (int64_t a = a0; a < a1; a += SUM_ROWS) {  // one vector at a time, as vectors are far apart
        const int64_t k = a1 - a < SUM_ROWS ? a1 - a : SUM_ROWS;
        float factor[SUM_ROWS];
        for (int64_t j = 0; j < k; ++j) factor[j] = factor_of<F>(rows, a + j);
        for (int64_t t = 0; t < x.count; ++t)
            for (int64_t j = 0; j < k; ++j) y[t * y_stride + a + j] *= factor[j];
    }
}

template <class F, UnpackRows UNPACK>
void unpack_with_factors(const Rows& rows, float* out, int64_t a0, int64_t a1) {
    UNPACK(without_factors<F>(rows), out, a0, a1);
    for (int64_t a = a0; a < a1; ++a) {
        const float factor = factor_of<F>(rows, a);
        for (int64_t d = 0; d < rows.D; ++d) out[a * rows.D + d] *= factor;
    }
}

template <class F>
void accumulate_with_factors(const Rows& rows, const float* c, float* y, int64_t a0, int64_t a1,
                             int64_t d0, int64_t d1) {
    for (int64_t a = a0; a < a1; a += SUM_ROWS) {
        const int64_t k = a1 - a < SUM_ROWS ? a1 - a : SUM_ROWS;
        float scaled[SUM_ROWS];
        for (int64_t j = 0; j < k; ++j) scaled[j] = c[a + j] * factor_of<F>(rows, a + j);
        Rows inner = without_factors<F>(rows);
        if (rows.index)
            inner.index += a;
        else
            inner.weight += a * rows.stride;
        inner.A -= a;
        if (rows.next) inner.next += a - a0;
        accumulate_rows<F>(inner, scaled, y, 0, k, d0, d1);
    }
}

template <class F>
void accumulate_many_with_factors(const Rows& rows, int64_t a0, int64_t k, const ManySums& s) {
    ManySums of_group = s;
    for (int64_t j = 0; j < k; j += SUM_ROWS, of_group.c += s.c_group, of_group.mask += s.mask_group)
        accumulate_lists(accumulate_with_factors<F>, rows, a0 + j, of_group);
}
