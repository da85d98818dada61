// Products and sums of bf16 rows on processors with AVX512_BF16, which multiply two values and add both
// products in one instruction: specialisations of the kernels for floats. Included by rows_template.h.
//
// vdpbf16ps adds to each f32 lane the product of the pair's second values, then that of the first ones, each
// fused and rounded once (Intel's manual; probe.cpp checks that rows are added in order). Numbers below 2^-126 count as 0 (a
// sum that ends there may be -0). Vectors and coefficients are rounded to bf16 here, by at most 2^-9 of each
// value, and to infinity from 3.39e38 on; the other levels take them in f32.
//
// Products are bit-identical for any number of rows and vectors: a lane adds two products of each block of
// columns, block after block, and then lanes are added as by four_sums(). So are sums: each column adds its
// rows one by one, in order.
//
// In a sum of rows that are not grouped, each 32 columns are in the order of interleave_low() and
// interleave_high(), until order_sums().

inline Pairs as_pairs(__m512i v) { return reinterpret_cast<Pairs>(v); }
inline Pairs load_pairs(const uint8_t* p) { return as_pairs(load_64_bytes(p)); }
// The first n of 32 values, then zeros.
inline Pairs load_some_pairs(const uint8_t* p, int64_t n) {
    return as_pairs(_mm512_maskz_loadu_epi16((1u << n) - 1, p));
}

// ---- products -----------------------------------------------------------------------------------------

// Bytes of a packed vector: its values in bf16, and zeros up to a whole block.
constexpr int64_t bf16_bytes(int64_t D) { return (D + BLOCK - 1) / BLOCK * BLOCK * 2; }

inline const uint8_t* bf16_vector(const Input& x, int64_t D, int64_t t) {
    return x.packed + (x.first + t) * bf16_bytes(D);
}

void quantise_bf16(const Input& x, int64_t D) {
    for (int64_t t = 0; t < x.count; ++t) {
        const float* from = x.vector(t);
        uint8_t* to = x.packed + (x.first + t) * bf16_bytes(D);
        for (int64_t d = 0; d < D; d += BLOCK) {
            const __m512 low = _mm512_maskz_loadu_ps(first_of_16(D - d), from + d);
            const __m512 high =
                D - d > 16 ? _mm512_maskz_loadu_ps(first_of_16(D - d - 16), from + d + 16) : zero();
            _mm512_storeu_si512(to + 2 * d, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
        }
    }
}

// sums[t][r] = rows[r] . x[t] in lanes. Prefetches `next` and `also`, which may be null.
template <int ROWS, int COUNT>
__attribute__((always_inline)) inline void multiply_pairs(const uint8_t* const* rows,
                                                          const uint8_t* const* next,
                                                          const uint8_t* const* also, int64_t D,
                                                          const uint8_t* const* x, Floats (*sums)[ROWS],
                                                          bool to_l2 = false) {
    Floats part[COUNT][ROWS];
    for (int t = 0; t < COUNT; ++t)
        for (int r = 0; r < ROWS; ++r) part[t][r] = zero();
    auto add = [&](const auto& load, int64_t at) __attribute__((always_inline)) {
        Pairs w[ROWS];
        for (int r = 0; r < ROWS; ++r) w[r] = load(rows[r] + at);
        for (int t = 0; t < COUNT; ++t) {
            const Pairs values = load_pairs(x[t] + at);
            for (int r = 0; r < ROWS; ++r) part[t][r] = multiply_add(w[r], values, part[t][r]);
        }
    };
    const int64_t bytes = D / BLOCK * BLOCK * 2;
    for (int64_t at = 0; at < bytes; at += 64) {
        for (int r = 0; next && r < ROWS; ++r) prefetch_row(next[r] + at, to_l2);
        for (int r = 0; also && r < ROWS; ++r) prefetch_row(also[r] + at, to_l2);
        add(load_pairs, at);
    }
    if (const int64_t rest = D % BLOCK)
        add([=](const uint8_t* p) { return load_some_pairs(p, rest); }, bytes);
    for (int t = 0; t < COUNT; ++t)
        for (int r = 0; r < ROWS; ++r) sums[t][r] = part[t][r];
}

// y[0 .. ROWS-1] = rows[r] . x for ROWS rows, which hide the latency of each other's additions.
template <int ROWS>
inline void dot_pairs_of_one(const uint8_t* const* rows, const uint8_t* const* next,
                             const uint8_t* const* also, int64_t D, const uint8_t* x, float* y,
                             bool to_l2 = false) {
    Floats sums[1][ROWS];
    multiply_pairs<ROWS, 1>(rows, next, also, D, &x, sums, to_l2);
    for (int first = 0; first < ROWS; first += QUAD_ROWS) {
        Floats four[QUAD_ROWS];
        for (int r = 0; r < QUAD_ROWS; ++r) four[r] = first + r < ROWS ? sums[0][first + r] : zero();
        float products[QUAD_ROWS];
        four_sums(four, products);
        const int count = ROWS - first < QUAD_ROWS ? ROWS - first : QUAD_ROWS;
        __builtin_memcpy(y + first, products, count * sizeof(float));
    }
}

// Rows of a list that are in L2, eight at a time, for one vector.
inline void dot_pairs_of_list(const Rows& rows, const uint8_t* x, float* y, int64_t a0, int64_t a1) {
    in_steps<8, 7, 6, 5, 4, 3, 2, 1>(a0, a1, [&](auto count, int64_t a) {
        constexpr int ROWS = count;
        const uint8_t *row[ROWS], *next[ROWS];
        for (int r = 0; r < ROWS; ++r) {
            row[r] = row_of(rows, a + r);
            next[r] = a + ROWS + r < rows.A ? row_of(rows, a + ROWS + r) : row[r];
        }
        dot_pairs_of_one<ROWS>(row, next, nullptr, rows.D, x, y + a);
    });
}

// y[t * y_stride + r] = rows[r] . x[t] for the first `valid` of four rows and COUNT vectors from t0 on.
template <int COUNT>
inline void dot_pairs(const uint8_t* const* rows, const uint8_t* const* next, int64_t D, const Input& x,
                      int64_t t0, float* y, int64_t y_stride, int64_t valid) {
    const uint8_t* vectors[COUNT];
    for (int t = 0; t < COUNT; ++t) vectors[t] = bf16_vector(x, D, t0 + t);
    Floats sums[COUNT][QUAD_ROWS];
    multiply_pairs<QUAD_ROWS, COUNT>(rows, next, nullptr, D, vectors, sums);
    for (int t = 0; t < COUNT; ++t) {
        float products[QUAD_ROWS];
        four_sums(sums[t], products);
        float* to = y + (t0 + t) * y_stride;
        if (valid == QUAD_ROWS)
            __builtin_memcpy(to, products, sizeof products);
        else
            for (int64_t r = 0; r < valid; ++r) to[r] = products[r];
    }
}

// Contiguous rows, one by one, for one vector.
inline void dot_pairs_run(const Rows& rows, const uint8_t* x, float* y, int64_t a0, int64_t a1) {
    const int64_t bytes = rows.D * 2;
    for (int64_t a = a0; a < a1; a += QUAD_ROWS) {
        const int64_t valid = a1 - a < QUAD_ROWS ? a1 - a : QUAD_ROWS;
        Floats sums[QUAD_ROWS];
        for (int64_t r = 0; r < QUAD_ROWS; ++r) {
            sums[r] = zero();
            if (r >= valid) continue;
            const uint8_t* row = row_of(rows, a + r);
            const uint8_t* next = ahead_in_run(rows, row, RUN_AHEAD, a1);
            multiply_pairs<1, 1>(&row, &next, nullptr, rows.D, &x,
                                 reinterpret_cast<Floats(*)[1]>(sums + r));
            for (int64_t at = 0; rows.also && at < bytes; at += 64)
                __builtin_prefetch(rows.also[a + r - a0] + at);
        }
        float products[QUAD_ROWS];
        four_sums(sums, products);
        for (int64_t r = 0; r < valid; ++r) y[a + r] = products[r];
    }
}

// Vectors that share each load of a row; with the rows, they fill the registers.
constexpr int PAIR_VECTORS = 6;
// Bytes of rows that stay in L2 while all vectors are multiplied by them, a few at a time.
constexpr int64_t PAIR_CHUNK = 256 * 1024;

template <>
void dot_float_rows<BF16>(const Rows& rows, const Input& x, float* y, int64_t y_stride, int64_t a0,
                          int64_t a1) {
    const int64_t D = rows.D, bytes = 2 * D;
    if (x.count == 1 && is_one_run(rows, bytes))
        return dot_pairs_run(rows, bf16_vector(x, D, 0), y, a0, a1);
    if (x.count == 1 && !rows.queue && !rows.next)
        return dot_pairs_of_list(rows, bf16_vector(x, D, 0), y, a0, a1);
    if (x.count == 1)
        return for_rows(rows, a0, a1,
                        [&](auto count, int64_t a, const uint8_t* const* row,
                            const uint8_t* const* next, const uint8_t* const* also) {
            dot_pairs_of_one<count>(row, next, also, D, bf16_vector(x, D, 0), y + a,
                                    prefetches_to_l2(rows));
        });
    const int64_t fitting = bytes ? PAIR_CHUNK / bytes / QUAD_ROWS * QUAD_ROWS : QUAD_ROWS;
    const int64_t chunk = fitting < QUAD_ROWS ? QUAD_ROWS : fitting;
    for (int64_t c0 = a0; c0 < a1; c0 += chunk) {
        const int64_t c1 = c0 + chunk < a1 ? c0 + chunk : a1;
        for (int64_t t = 0, count; t < x.count; t += count) {
            const int64_t left = x.count - t;
            count = left >= PAIR_VECTORS ? PAIR_VECTORS : left;
            for (int64_t a = c0; a < c1; a += QUAD_ROWS) {
                const int64_t valid = c1 - a < QUAD_ROWS ? c1 - a : QUAD_ROWS;
                const uint8_t *row[QUAD_ROWS], *then[QUAD_ROWS];
                for (int64_t r = 0; r < QUAD_ROWS; ++r) {
                    row[r] = row_of(rows, r < valid ? a + r : a);
                    then[r] = a + QUAD_ROWS + r < rows.A ? row_of(rows, a + QUAD_ROWS + r) : row[r];
                }
                const uint8_t* const* next = t == 0 ? then : nullptr;
                // Not in_steps(), with which gcc 12 makes two vectors take 1.4 times as long.
                auto dot = [&](auto vectors) {
                    dot_pairs<vectors>(row, next, D, x, t, y + a, y_stride, valid);
                };
                switch (count) {
                    case 1:
                        dot(Count<1>{});
                        break;
                    case 2:
                        dot(Count<2>{});
                        break;
                    case 3:
                        dot(Count<3>{});
                        break;
                    case 4:
                        dot(Count<4>{});
                        break;
                    case 5:
                        dot(Count<5>{});
                        break;
                    default:
                        dot(Count<6>{});
                }
            }
        }
    }
}

// ---- sums ---------------------------------------------------------------------------------------------

// The coefficients of two rows for every lane, for rows joined by join_rows().
inline Pairs both_coefficients(float first, float second) {
    const __m128bh both = _mm_cvtneps_pbh(_mm_set_ps(0.0f, 0.0f, first, second));
    return as_pairs(_mm512_broadcastd_epi32(reinterpret_cast<__m128i>(both)));
}

// Half of 32 columns of two rows: the second row's values first, so that the first row's are added first.
template <bool IS_HIGH>
inline Pairs join_rows(Pairs first, Pairs second) {
    const Ints a = reinterpret_cast<Ints>(second), b = reinterpret_cast<Ints>(first);
    return as_pairs(bits(IS_HIGH ? interleave_high(a, b) : interleave_low(a, b)));
}

// 32 sums in the order of join_rows(), from column order and back.
inline void to_joined_order(Floats* v) {
    const Floats low = _mm512_shuffle_f32x4(v[0], v[1], 0x88);
    v[1] = _mm512_shuffle_f32x4(v[0], v[1], 0xdd), v[0] = low;
}
inline void to_column_order(Floats* v) {
    const Floats low = _mm512_shuffle_f32x4(v[0], v[1], 0x44);
    const Floats high = _mm512_shuffle_f32x4(v[0], v[1], 0xee);
    v[0] = _mm512_shuffle_f32x4(low, low, 0xd8), v[1] = _mm512_shuffle_f32x4(high, high, 0xd8);
}

void order_bf16_sums(float* y, int64_t d0, int64_t d1) {
    for (; d0 + BLOCK <= d1; d0 += BLOCK) {
        Floats v[2] = {load_floats(y + d0), load_floats(y + d0 + LANES)};
        to_column_order(v);
        store_floats(y + d0, v[0]), store_floats(y + d0 + LANES, v[1]);
    }
}

// sum[0..1] += the sum of ROWS rows, in order; `load` loads 32 columns of a row.
template <int ROWS, class Load>
inline void add_rows_to(Floats* sum, const uint8_t* const* rows, int64_t at, const Pairs* c,
                        const Load& load) {
    for (int r = 0; r < ROWS; r += 2) {
        const Pairs first = load(rows[r] + at);
        const Pairs second = r + 1 < ROWS ? load(rows[r + 1] + at) : as_pairs(_mm512_setzero_si512());
        sum[0] = multiply_add(join_rows<false>(first, second), c[r / 2], sum[0]);
        sum[1] = multiply_add(join_rows<true>(first, second), c[r / 2], sum[1]);
    }
}

// y[d0..d1) += c[r] * rows[r][d0..d1) for r < ROWS. `ahead(at)` prefetches, at byte `at` of the columns.
template <int ROWS, class Prefetch>
inline void add_bf16_rows(const uint8_t* const* rows, const float* c, float* y, int64_t d0, int64_t d1,
                          const Prefetch& ahead) {
    Pairs pair[(ROWS + 1) / 2];
    for (int r = 0; r < ROWS; r += 2)
        pair[r / 2] = both_coefficients(c[r], r + 1 < ROWS ? c[r + 1] : 0.0f);
    int64_t d = d0;
    for (; d + BLOCK <= d1; d += BLOCK) {
        ahead(2 * d);
        Floats sum[2] = {load_floats(y + d), load_floats(y + d + LANES)};
        add_rows_to<ROWS>(sum, rows, 2 * d, pair, load_pairs);
        store_floats(y + d, sum[0]), store_floats(y + d + LANES, sum[1]);
    }
    if (d == d1) return;  // fewer than 32 columns, whose sums are in column order
    const auto load = [=](const uint8_t* p) { return load_some_pairs(p, d1 - d); };
    float last[BLOCK] = {};
    __builtin_memcpy(last, y + d, (d1 - d) * sizeof(float));
    Floats sum[2] = {load_floats(last), load_floats(last + LANES)};
    to_joined_order(sum);
    add_rows_to<ROWS>(sum, rows, 2 * d, pair, load);
    to_column_order(sum);
    store_floats(last, sum[0]), store_floats(last + LANES, sum[1]);
    __builtin_memcpy(y + d, last, (d1 - d) * sizeof(float));
}

template <>
void accumulate_rows<BF16>(const Rows& rows, const float* c, float* y, int64_t a0, int64_t a1,
                           int64_t d0, int64_t d1) {
    auto add = [&](auto count, int64_t a, const auto& ahead) {
        const uint8_t* row[count];
        for (int r = 0; r < count; ++r) row[r] = row_of(rows, a + r);
        add_bf16_rows<count>(row, c + a, y, d0, d1, [&](int64_t at) { ahead(row, at); });
    };
    if (rows.then) {
        AheadRows then(rows.then, rows.num_then, rows.then_bytes);
        in_steps<4, 2, 1>(a0, a1, [&](auto count, int64_t a) {
            add(count, a, [&](const uint8_t* const*, int64_t) { then.template ask<count>(); });
        });
        return;
    }
    if (is_one_run(rows, 2 * rows.D)) {
        in_steps<2, 1>(a0, a1, [&](auto count, int64_t a) {
            add(count, a, [&](const uint8_t* const* row, int64_t at) {
                for (int r = 0; r < count; ++r) __builtin_prefetch(row[r] + at + RUN_AHEAD);
            });
        });
        return;
    }
    const bool to_l2 = prefetches_to_l2(rows);
    for_rows(rows, a0, a1,
             [&](auto count, int64_t a, const uint8_t* const* row, const uint8_t* const* next,
                 const uint8_t* const* also) {
        add_bf16_rows<count>(row, c + a, y, d0, d1, [&](int64_t at) {
            for (int r = 0; r < count; ++r) prefetch_row(next[r] + at, to_l2);
            for (int r = 0; also && r < count; ++r) prefetch_row(also[r] + at, to_l2);
        });
    });
}

constexpr int64_t ROW_PAIRS = SUM_ROWS / 2;
typedef uint32_t PairWords[ROW_PAIRS];

// The coefficients of vector t for k rows, in pairs as both_coefficients() has them; 0 after row k.
inline void pair_coefficients(const float* c, int64_t k, PairWords& to) {
    for (int64_t r = 0; r < SUM_ROWS; r += 32) {
        const __m512 low = _mm512_maskz_loadu_ps(k > r ? first_of_16(k - r) : 0, c + r);
        const __m512 high = _mm512_maskz_loadu_ps(k > r + 16 ? first_of_16(k - r - 16) : 0, c + r + 16);
        const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
        _mm512_storeu_si512(to + r / 2, _mm512_rol_epi32(both, 16));
    }
}

inline Pairs broadcast_pair(uint32_t word) {
    return as_pairs(_mm512_set1_epi32(static_cast<int>(word)));
}

// Columns of joined rows at a time: 32 pairs of rows take 8 KiB.
constexpr int64_t PAIR_COLUMNS = 64;
// Vectors whose coefficients are rounded together.
constexpr int64_t PAIRED_VECTORS = 64;

// All k rows of a group for all vectors: rows are joined once, PAIR_COLUMNS at a time.
inline void add_bf16_to_many(const Rows& rows, int64_t a0, int64_t k, const ManySums& s) {
    constexpr int VALUES = PAIR_COLUMNS / LANES;
    alignas(64) PairWords c[PAIRED_VECTORS];
    Pairs tile[ROW_PAIRS * VALUES];
    const uint8_t* row[SUM_ROWS];
    for (int64_t r = 0; r < k; ++r) row[r] = row_of(rows, a0 + r);
    const int64_t pairs = (k + 1) / 2, whole = s.d0 + (s.d1 - s.d0) / PAIR_COLUMNS * PAIR_COLUMNS;
    for (int64_t t = 0; t < s.count; t += PAIRED_VECTORS) {
        const int64_t count = s.count - t < PAIRED_VECTORS ? s.count - t : PAIRED_VECTORS;
        for (int64_t i = 0; i < count; ++i) pair_coefficients(s.c + (t + i) * s.c_stride, k, c[i]);
        for (int64_t d = s.d0; d < whole; d += PAIR_COLUMNS) {
            for (int64_t r = 0; r < k; r += 2)
                for (int half = 0; half < 2; ++half) {
                    const Pairs first = load_pairs(row[r] + 2 * d + 64 * half);
                    const Pairs second = r + 1 < k ? load_pairs(row[r + 1] + 2 * d + 64 * half)
                                                   : as_pairs(_mm512_setzero_si512());
                    Pairs* to = tile + r / 2 * VALUES + 2 * half;
                    to[0] = join_rows<false>(first, second), to[1] = join_rows<true>(first, second);
                }
            in_steps<24 / VALUES, 2, 1>(0, count, [&](auto some, int64_t i) {
                add_weighted<some, VALUES, Pairs>(s.y + (t + i) * s.y_stride + d, s.y_stride, pairs,
                                                  [&](int64_t p, Pairs* w) {
                    for (int v = 0; v < VALUES; ++v) w[v] = tile[p * VALUES + v];
                }, [&](int own, int64_t p) { return broadcast_pair(c[i + own][p]); });
            });
        }
    }
}

// Whole blocks of columns are taken together if that pays; the rest is added by lists.
template <>
void accumulate_many<BF16>(const Rows& rows, int64_t a0, int64_t k, const ManySums& s) {
    ManySums rest = s;
    if (are_taken_together(k, s)) {
        add_bf16_to_many(rows, a0, k, s);
        rest.d0 = s.d0 + (s.d1 - s.d0) / PAIR_COLUMNS * PAIR_COLUMNS;
    }
    if (rest.d0 < s.d1) accumulate_lists(accumulate_rows<BF16>, rows, a0, rest);
}

template <>
struct FloatTile<BF16> {
    static constexpr int64_t COLUMNS = PAIR_COLUMNS, ROW_BYTES = 2 * COLUMNS, PADDED = 1;
    static constexpr AccumulateRows* ADD_ROWS = accumulate_rows<BF16>;

    // Joins coefficients in pairs; the first one of a pair is then its word.
    static inline void prepare(const Listed& list) {
        for (int64_t i = list.first(); i < list.end(); i += 2) {
            const Pairs both = both_coefficients(list.c[i], i + 1 < list.end() ? list.c[i + 1] : 0.0f);
            list.c[i] = _mm512_cvtss_f32(reinterpret_cast<Floats>(both));
        }
    }

    void copy(const uint8_t* row, int64_t, int64_t d, int64_t place) {
        copy_and_ask<ROW_BYTES>(row + 2 * d, bytes + place * ROW_BYTES);
    }

    void add(const Listed& list, float* y) const {
        constexpr int BLOCKS = COLUMNS / BLOCK;
        Floats sum[BLOCKS][2];
        for (int b = 0; b < BLOCKS; ++b)
            for (int v = 0; v < 2; ++v) sum[b][v] = load_floats(y + b * BLOCK + v * LANES);
        int64_t i = list.first();
        for (; i + 2 <= list.end(); i += 2) {
            const uint8_t* row[2] = {bytes + list.place[i] * ROW_BYTES,
                                     bytes + list.place[i + 1] * ROW_BYTES};
            const Pairs c = reinterpret_cast<Pairs>(broadcast(list.c[i]));
            for (int b = 0; b < BLOCKS; ++b) add_rows_to<2>(sum[b], row, 2 * BLOCK * b, &c, load_pairs);
        }
        if (i < list.end()) {
            const uint8_t* row = bytes + list.place[i] * ROW_BYTES;
            const Pairs c = reinterpret_cast<Pairs>(broadcast(list.c[i]));
            for (int b = 0; b < BLOCKS; ++b)
                add_rows_to<1>(sum[b], &row, 2 * BLOCK * b, &c, load_pairs);
        }
        for (int b = 0; b < BLOCKS; ++b)
            for (int v = 0; v < 2; ++v) store_floats(y + b * BLOCK + v * LANES, sum[b][v]);
    }

    alignas(64) uint8_t bytes[WINDOW_ROWS * ROW_BYTES];
};

// ---- grouped ------------------------------------------------------------------------------------------

// y[i * y_stride + d] += the sum over a block's rows, in order, for d < BLOCK; y is in column order.
template <int COUNT>
inline void add_bf16_block(const uint8_t* tile, const PairWords* c, float* y, int64_t y_stride) {
    Floats sum[COUNT][2];
    for (int i = 0; i < COUNT; ++i) {
        for (int v = 0; v < 2; ++v) sum[i][v] = load_floats(y + i * y_stride + v * LANES);
        to_joined_order(sum[i]);
    }
    for (int64_t p = 0; p < ROW_PAIRS; ++p, tile += 2 * BF16::BLOCK_BYTES) {
        const Pairs first = load_pairs(tile), second = load_pairs(tile + BF16::BLOCK_BYTES);
        const Pairs low = join_rows<false>(first, second), high = join_rows<true>(first, second);
        for (int i = 0; i < COUNT; ++i) {
            const Pairs by = broadcast_pair(c[i][p]);
            sum[i][0] = multiply_add(low, by, sum[i][0]);
            sum[i][1] = multiply_add(high, by, sum[i][1]);
        }
    }
    for (int i = 0; i < COUNT; ++i) {
        to_column_order(sum[i]);
        for (int v = 0; v < 2; ++v) store_floats(y + i * y_stride + v * LANES, sum[i][v]);
    }
}

template <>
void accumulate_grouped_floats<GroupedFloats<BF16>>(const Rows& rows, const float* c, float* y,
                                                    int64_t a0, int64_t a1, int64_t d0, int64_t d1) {
    alignas(64) PairWords words;
    for (int64_t a = a0; a < a1; a += SUM_ROWS) {
        pair_coefficients(c + a, SUM_ROWS, words);
        for (int64_t b = d0 / BLOCK; b < d1 / BLOCK; ++b)
            add_bf16_block<1>(GroupedFloats<BF16>::tile(rows.weight + a * rows.stride, b), &words,
                              y + b * BLOCK, 0);
    }
}

// One group.
template <>
void accumulate_grouped_floats_many<GroupedFloats<BF16>>(const Rows& rows, int64_t a0, int64_t,
                                                         const ManySums& s) {
    alignas(64) PairWords c[PAIRED_VECTORS];
    for (int64_t t0 = 0; t0 < s.count; t0 += PAIRED_VECTORS) {
        const int64_t count = s.count - t0 < PAIRED_VECTORS ? s.count - t0 : PAIRED_VECTORS;
        for (int64_t i = 0; i < count; ++i)
            pair_coefficients(s.c + (t0 + i) * s.c_stride, SUM_ROWS, c[i]);
        for (int64_t b = s.d0 / BLOCK; b < s.d1 / BLOCK; ++b) {
            const uint8_t* tile = GroupedFloats<BF16>::tile(rows.weight + a0 * rows.stride, b);
            in_steps<8, 2, 1>(0, count, [&](auto some, int64_t t) {
                add_bf16_block<some>(tile, c + t, s.y + (t0 + t) * s.y_stride + b * BLOCK, s.y_stride);
            });
        }
    }
}
