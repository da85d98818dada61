// Products of rows of K-quants with vectors of 16-bit integers, which are packed as for q8_0. Included by
// rows_template.h.
//
// Results are bit-identical at every level and for any number of vectors. A block of 256 values has eight
// parts of 32. With I a part's sum of quant times x and S its sum of x, exact integers, and d, m, s and t as
// in k_quants_template.h,
//   term(b)  = (d*s) * I - (m*t) * S                  q4_K and q5_K; one fused multiply-add
//              (d*s[1]) * I[1] + (d*s[0]) * I[0]      q6_K, whose parts have two halves; likewise
//   part[p]  = the sum over parts b = p, p + 8, p + 16, ... of x's scale * term(b), each added by one fused
//              multiply-add, in order
//   product  = ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]))
// d*s and m*t are exact.
//
// There are two kernels, as for small blocks. One takes SUPER_ROWS rows and one vector; its lanes are pairs
// of a row and a part. The other takes LANES rows and up to TILE_TOKENS vectors; its lanes are rows, and a
// part is unpacked once for all vectors (level avx2: super_panels.h). A level defines
//   SUPER_ROWS, SuperSums              number of rows multiplied together; type of their part[p]
//   add_super<F>(block, x, sums)       adds the terms of one block of each row, times x's scales
//   store_super(sums, to)              writes part[p] of row r to to[8 * r + p]
//   byte_weights<F>(bytes, w)          unsigned bytes of LANES rows in the form that tile_products takes

// Transposes COUNT numbers of each of LANES rows: out[i] has number first + i of all rows.
template <int COUNT>
inline void lanes_of(const float (*row)[24], int first, float (*out)[LANES]) {
    for (int i = 0; i < COUNT; i += 4) {
        const uint8_t* four[LANES];
        for (int r = 0; r < LANES; ++r) four[r] = reinterpret_cast<const uint8_t*>(row[r] + first + i);
        Ints vectors[4];
        transpose_16(four, vectors);
        __builtin_memcpy(out[i], vectors, sizeof vectors);
    }
}

// Bytes at .. at + count - 1 of LANES rows, four of each row in a vector.
inline void bytes_of(const uint8_t* const* rows, int64_t at, int64_t count, Ints* out) {
    for (int64_t i = 0; i < count; i += 16, out += 4) {
        const uint8_t* p[LANES];
        for (int r = 0; r < LANES; ++r) p[r] = rows[r] + at + i;
        transpose_16(p, out);
    }
}

// The factors of a block of LANES rows: d*s of the parts (q6_K: of their halves), and m*t.
template <class F>
struct SuperFactors {
    alignas(64) float factor[F::HAS_MINIMA ? 8 : 16][LANES], minimum[8][LANES];

    void read(const uint8_t* const* rows, int64_t at) {
        static_assert(sizeof(Factors) == 24 * sizeof(float), "16 factors, then 8 minima");
        Factors of[LANES];
        for (int r = 0; r < LANES; ++r) F::factors(rows[r] + at, 1.0f, of[r]);
        const auto* row = reinterpret_cast<const float (*)[24]>(of);
        lanes_of<F::HAS_MINIMA ? 8 : 16>(row, 0, factor);
        if constexpr (F::HAS_MINIMA) lanes_of<8>(row, 16, minimum);
    }

    // The terms of part b of LANES rows for one vector; w: the part's weights; `sum` and
    // `first_sum`: of the vector's values.
    __attribute__((always_inline)) inline Floats term(int b, const Ints* w, const uint8_t* values,
                                                      int64_t block, int32_t sum,
                                                      int32_t first_sum) const {
        if constexpr (F::HAS_MINIMA) {
            const Floats products = to_floats(tile_products<Q8_0>(w, values, block, Ints{}));
            const Floats offset = mul(load_floats(minimum[b]), to_floats(Ints{} - sum));
            return fused(load_floats(factor[b]), products, offset);
        } else {
            const Ints first = tile_products<Q8_0, 0, 4>(w, values, block, Ints{} - 32 * first_sum);
            const Ints last =
                tile_products<Q8_0, 4, 8>(w, values, block, Ints{} - 32 * (sum - first_sum));
            return fused(load_floats(factor[2 * b + 1]), to_floats(last),
                         mul(load_floats(factor[2 * b]), to_floats(first)));
        }
    }
};

// LANES rows (pointers may repeat) in the form that dot_super_tile() needs. The rows that begin at `next` are
// prefetched.
template <class F>
struct SuperRows {
    const uint8_t* const* rows;
    const uint8_t* next;

    void factors(int64_t s, SuperFactors<F>& to) const {
        const int64_t at = s * F::BLOCK_BYTES;
        for (int64_t line = 0; line < LANES * F::BLOCK_BYTES; line += 64)
            __builtin_prefetch(next + at * LANES + line, 0, 2);
        to.read(rows, at);
    }
    // The bits of block s that extend its nibbles.
    void bits(int64_t s, Ints* to) const {
        bytes_of(rows, s * F::BLOCK_BYTES + F::BITS_AT, F::BITS_BYTES, to);
    }
    // The nibbles of a pair of parts.
    void quants(int64_t s, int pair, Ints* to) const {
        bytes_of(rows, s * F::BLOCK_BYTES + F::QUANTS_AT + 32 * pair, 32, to);
    }
};

// Multiplies LANES rows by up to TILE_TOKENS vectors and stores the products of rows begin .. end - 1.
template <class F, class Tile>
inline void dot_super_tile(const Tile& tile, int64_t n, const Input& input, float* y, int64_t y_stride,
                           int64_t begin, int64_t end) {
    const PackedBlocks<Q8_0> x(input, n);
    const int64_t T = input.count;
    alignas(64) float part[TILE_TOKENS][8][LANES];
    __builtin_memset(part, 0, T * sizeof part[0]);
    for (int64_t block = 0; block < n; block += 8) {
        asm volatile("" ::: "memory");  // as in dot_tile
        SuperFactors<F> factors;
        tile.factors(block / 8, factors);
        Ints bits[F::BITS_BYTES / 4 + 1];
        tile.bits(block / 8, bits);
#pragma GCC unroll 4
        for (int pair = 0; pair < 4; ++pair) {
            Ints quants[8], bytes[2][8];
            tile.quants(block / 8, pair, quants);
            bytes_of_pair<F>(quants, bits, pair, bytes[0], bytes[1]);
            const Parts parts = F::parts(pair);
            for (int i = 0; i < 2; ++i) {
                const int p = i == 0 ? parts.first : parts.second;
                const int64_t b = block + p;
                Ints w[TILE_WEIGHTS<Q8_0>];
                byte_weights<Q8_0>(bytes[i], w);
                const uint8_t* values = x.values + b / unit<Q8_0>() * x.stride;
                for (int64_t t = 0; t < T; ++t) {
                    const int64_t of = t * x.next_scale + b;
                    const Floats term =
                        factors.term(p, w, values + t * x.next_vector, b, x.sum[of], x.first_sum[of]);
                    store_floats(part[t][p],
                                 fused(broadcast(x.scale[of]), term, load_floats(part[t][p])));
                }
            }
        }
    }
    for (int64_t t = 0; t < T; ++t) {
        Floats sum[4];
        for (int i = 0; i < 4; ++i)
            sum[i] = add_floats(load_floats(part[t][2 * i]), load_floats(part[t][2 * i + 1]));
        alignas(64) float sums[LANES];
        store_floats(sums, add_floats(add_floats(sum[0], sum[1]), add_floats(sum[2], sum[3])));
        __builtin_memcpy(y + t * y_stride, sums + begin, (end - begin) * sizeof(float));
    }
}

// The same for one vector and all LANES rows, with the sums in registers.
template <class F, class Tile>
inline void dot_super_tile_one(const Tile& tile, int64_t n, const PackedBlocks<Q8_0>& x, float* y) {
    Floats part[8];
    for (Floats& each : part) each = zero();
    for (int64_t block = 0; block < n; block += 8) {
        SuperFactors<F> factors;
        tile.factors(block / 8, factors);
        Ints bits[F::BITS_BYTES / 4 + 1];
        tile.bits(block / 8, bits);
#pragma GCC unroll 4
        for (int pair = 0; pair < 4; ++pair) {
            Ints quants[8], bytes[2][8];
            tile.quants(block / 8, pair, quants);
            bytes_of_pair<F>(quants, bits, pair, bytes[0], bytes[1]);
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i) {
                const int p = i == 0 ? F::parts(pair).first : F::parts(pair).second;
                const int64_t b = block + p;
                Ints w[TILE_WEIGHTS<Q8_0>];
                byte_weights<Q8_0>(bytes[i], w);
                const uint8_t* values = x.values + b / unit<Q8_0>() * x.stride;
                part[p] = fused(broadcast(x.scale[b]),
                                factors.term(p, w, values, b, x.sum[b], x.first_sum[b]), part[p]);
            }
        }
    }
    Floats sum[4];
    for (int i = 0; i < 4; ++i) sum[i] = add_floats(part[2 * i], part[2 * i + 1]);
    store_floats(y, add_floats(add_floats(sum[0], sum[1]), add_floats(sum[2], sum[3])));
}

// y[r] = rows[r] . x, r < ROWS, for one vector. Prefetches the rows `next`, and `also` if it is not null.
template <class F, int ROWS>
void dot_super_rows(const uint8_t* const* rows, const uint8_t* const* next, const uint8_t* const* also,
                    int64_t n, const PackedBlocks<Q8_0>& x, float* y) {
    constexpr int TOGETHER = ROWS < SUPER_ROWS ? ROWS : SUPER_ROWS;
    for (int r = 0; r < ROWS; r += TOGETHER) {
        SuperX at = {x.values, x.stride, x.scale, x.sum, x.first_sum};
        SuperSums sums = {};
        const uint8_t* block[SUPER_ROWS];
        for (int64_t from = 0; from < n / 8 * F::BLOCK_BYTES; from += F::BLOCK_BYTES) {
            for (int i = 0; i < SUPER_ROWS; ++i) block[i] = rows[r + i % TOGETHER] + from;
            for (int i = 0; i < TOGETHER; ++i)
                for (int64_t line = 0; line < F::BLOCK_BYTES; line += 64) {
                    __builtin_prefetch(next[r + i] + from + line);
                    if (also) __builtin_prefetch(also[r + i] + from + line);
                }
            add_super<F>(block, at, sums);
            at.values += 8 / unit<Q8_0>() * x.stride;
            at.scale += 8, at.sum += 8, at.first_sum += 8;
        }
        alignas(64) float part[SUPER_ROWS][8];
        store_super(sums, part[0]);
        for (int i = 0; i < TOGETHER; ++i) {
            const float* p = part[i];
            y[r + i] = ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]));
        }
    }
}

#ifdef HAS_PANELS
#include "super_panels.h"
#endif

// Multiplies LANES rows by several vectors at a time (avx2: panels). The last rows, if at most LANES / 2, and all
// rows if there is one vector, are multiplied by one vector at a time.
template <class F>
void dot_super(const Rows& rows, const Input& x, float* y, int64_t y_stride, int64_t a0, int64_t a1) {
    const int64_t n = rows.D / BLOCK;
    int64_t a = a0;
#ifdef HAS_PANELS
    if (x.count > 1) a = dot_super_panels<F>(rows, x, y, y_stride, a0, a1);
#else
    for (; x.count > 1 && a1 - a > LANES / 2; a += LANES) {
        const int64_t valid = a1 - a < LANES ? a1 - a : LANES;
        const uint8_t* row[LANES];
        for (int64_t r = 0; r < LANES; ++r) row[r] = row_of(rows, r < valid ? a + r : a);
        const uint8_t* next = a + LANES < rows.A ? row_of(rows, a + LANES) : row[0];
        for (int64_t t = 0; t < x.count; t += TILE_TOKENS) {
            const int64_t end = t + TILE_TOKENS < x.count ? t + TILE_TOKENS : x.count;
            dot_super_tile<F>(SuperRows<F>{row, t == 0 ? next : row[0]}, n, x.part(t, end),
                              y + t * y_stride + a, y_stride, 0, valid);
        }
    }
#endif
    for (int64_t t = 0; a < a1 && t < x.count; ++t) {
        const PackedBlocks<Q8_0> vector(x.part(t, t + 1), n);
        for_rows(rows, a, a1,
                 [&](auto count, int64_t row, const uint8_t* const* from, const uint8_t* const* next,
                     const uint8_t* const* also) {
            dot_super_rows<F, decltype(count)::VALUE>(from, next, also, n, vector,
                                                      y + t * y_stride + row);
        });
    }
}
