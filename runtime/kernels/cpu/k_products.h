// Products of rows of K-quants with vectors of 16-bit integers, which are packed as for q8_0. Included by
// rows_template.h.
//
// Results are bit-identical at every level and for any number of vectors. A block of 256 values has eight
// parts of 32. With I a part's sum of (quant - LESS) times x and S its sum of x, exact integers, I[0], I[1], S[0]
// and S[1] those of its halves, and d, m, s and t as in k_formats.h,
//   term(b)  = (d*s) * I - (m*t) * S                  q4_K and q5_K; one fused multiply-add
//              (d*s[1]) * I[1] + (d*s[0]) * I[0]      q6_K and q3_K, whose halves have scales; likewise
//              the same, added to - (m*t[1]) * S[1] - (m*t[0]) * S[0]      q2_K; see term_of()
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
inline void lanes_of(const float (*row)[32], int first, float (*out)[LANES]) {
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

// The factors of a block of LANES rows: d*s of the parts or their halves, and m*t.
template <class F>
struct SuperFactors {
    static constexpr int N = F::NUM_FACTORS;
    alignas(64) float factor[N][LANES], minimum[F::HAS_MINIMA ? N : 1][LANES];

    void read(const uint8_t* const* rows, int64_t at) {
        static_assert(sizeof(Factors) == 32 * sizeof(float), "16 factors, then 16 minima");
        Factors of[LANES];
        for (int r = 0; r < LANES; ++r) factors_of<F>(rows[r] + at, 1.0f, of[r]);
        const auto* row = reinterpret_cast<const float (*)[32]>(of);
        lanes_of<N>(row, 0, factor);
        if constexpr (F::HAS_MINIMA) lanes_of<N>(row, 16, minimum);
    }

    // The terms of part p of LANES rows, from its products; `sum` and `first_sum`: of the vector's values.
    __attribute__((always_inline)) inline Floats term_of_products(int p, const Ints* products,
                                                                  int32_t sum,
                                                                  int32_t first_sum) const {
        Floats of[2], by[2], least[2], less[2];
        for (int r = 0; r < F::RANGES; ++r) {
            of[r] = to_floats(products[r]), by[r] = load_floats(factor[F::RANGES * p + r]);
            if constexpr (F::HAS_MINIMA) {
                least[r] = load_floats(minimum[F::RANGES * p + r]);
                less[r] = to_floats(Ints{} - sum_of_range<F>(r, sum, first_sum));
            }
        }
        return term_of<F>(by, of, least, less);
    }

    // The same, from the part's weights w.
    __attribute__((always_inline)) inline Floats term(int p, const Ints* w, const uint8_t* values,
                                                      int64_t block, int32_t sum,
                                                      int32_t first_sum) const {
        Ints products[2];
        products[0] = tile_products<Q8_0, 0, 8 / F::RANGES>(
            w, values, block, Ints{} - F::LESS * sum_of_range<F>(0, sum, first_sum));
        if constexpr (F::RANGES == 2)
            products[1] = tile_products<Q8_0, 4, 8>(
                w, values, block, Ints{} - F::LESS * sum_of_range<F>(1, sum, first_sum));
        return term_of_products(p, products, sum, first_sum);
    }
};

// LANES rows (pointers may repeat) in the form that dot_super_tile() needs. The rows that begin at `next` are
// prefetched.
template <class F>
struct SuperRows {
    const uint8_t* const* rows;
    const uint8_t* next;

    void set(const uint8_t* const* of_rows, const uint8_t* then, int64_t) {
        rows = of_rows, next = then;
    }

    void factors(int64_t s, SuperFactors<F>& to) const {
        const int64_t at = s * F::BLOCK_BYTES;
        for (int64_t line = 0; line < LANES * F::BLOCK_BYTES; line += 64)
            __builtin_prefetch(next + at * LANES + line, 0, 2);
        to.read(rows, at);
    }
    // The bits of block s that are above its quants.
    void bits(int64_t s, Ints* to) const {
        bytes_of(rows, s * F::BLOCK_BYTES + F::BITS_AT, F::BITS_BYTES, to);
    }
    // The bytes with the quants of a pair of parts.
    void quants(int64_t s, int pair, Ints* to) const {
        bytes_of(rows, s * F::BLOCK_BYTES + F::QUANTS_AT + 4 * F::quants_at(pair, 0), 32, to);
    }
};

// Calls use(p, bytes) with the quants of each part of block s, as bytes without an offset.
template <class F, class Tile, class Use>
__attribute__((always_inline)) inline void for_parts(const Tile& tile, int64_t s, const Use& use) {
    Ints bits[F::BITS_BYTES / 4 + 1];
    tile.bits(s, bits);
#pragma GCC unroll 4
    for (int pair = 0; pair < 4; ++pair) {
        Ints quants[8], bytes[2][8];
        tile.quants(s, pair, quants);
        bytes_of_pair<F>(quants, bits, pair, bytes[0], bytes[1]);
        use(F::parts(pair).first, bytes[0]), use(F::parts(pair).second, bytes[1]);
    }
}

#ifdef HAS_PANELS
#include "super_panels.h"
#else
// Adds the terms of block b, part p of N tiles with weights w, to the sums of tile i and vector t, sums[N * t + i].
template <class F, int N>
__attribute__((always_inline)) inline void add_part(const Ints (*w)[TILE_WEIGHTS<Q8_0>],
                                                    const SuperFactors<F>* factors, int p, int64_t b,
                                                    const PackedBlocks<Q8_0>& x, int64_t T,
                                                    float (*sums)[LANES]) {
    const uint8_t* values = x.values + b / unit<Q8_0>() * x.stride;
    for (int64_t t = 0; t < T; ++t, sums += N) {
        const int64_t of = t * x.next_scale + b;
        Ints products[F::RANGES][N];
        products_of_ranges<Q8_0, F::RANGES, N>(w, values + t * x.next_vector, b, F::LESS, x.sum[of],
                                               x.first_sum[of], products);
        for (int i = 0; i < N; ++i) {
            const Ints of_tile[2] = {products[0][i], products[F::RANGES - 1][i]};
            const Floats term = factors[i].term_of_products(p, of_tile, x.sum[of], x.first_sum[of]);
            store_floats(sums[i], fused(broadcast(x.scale[of]), term, load_floats(sums[i])));
        }
    }
}

// Multiplies rows begin .. end-1 of N tiles of LANES rows each by up to TILE_TOKENS vectors.
template <class F, int N, class Tile>
inline void dot_super_tile(const Tile* tile, int64_t n, const Input& input, float* y, int64_t y_stride,
                           int64_t begin, int64_t end) {
    const PackedBlocks<Q8_0> x(input, n);
    const int64_t T = input.count;
    alignas(64) float part[8][N * TILE_TOKENS + 1]
                          [LANES];  // one more, as 4 KiB apart they share a cache set
    for (auto& of_part : part) __builtin_memset(of_part, 0, N * T * sizeof *of_part);
    for (int64_t block = 0; block < n; block += 8) {
        asm volatile("" ::: "memory");  // as in dot_tile
        SuperFactors<F> factors[N];
        Ints w[N == 1 ? 1 : 8][N][TILE_WEIGHTS<Q8_0>];  // of one tile, a part stays in registers
        for (int i = 0; i < N; ++i) {
            tile[i].factors(block / 8, factors[i]);
            for_parts<F>(tile[i], block / 8, [&](int p, const Ints* bytes) {
                byte_weights<Q8_0>(bytes, w[N == 1 ? 0 : p][i]);
                if constexpr (N == 1) add_part<F, 1>(w[0], factors, p, block + p, x, T, part[p]);
            });
        }
        for (int p = 0; N > 1 && p < 8; ++p) {
            Ints of_part[N][TILE_WEIGHTS<Q8_0>];
            for (int i = 0; i < N; ++i)
                for (int v = 0; v < TILE_WEIGHTS<Q8_0>; ++v) of_part[i][v] = in_register(w[p][i][v]);
            add_part<F, N>(of_part, factors, p, block + p, x, T, part[p]);
        }
    }
    for (int64_t t = 0; t < T; ++t) {
        alignas(64) float sums[N][LANES];
        for (int i = 0; i < N; ++i) {
            auto of = [&](int p) { return load_floats(part[p][N * t + i]); };
            Floats sum[4];
            for (int q = 0; q < 4; ++q) sum[q] = add_floats(of(2 * q), of(2 * q + 1));
            store_floats(sums[i], sum_of_four(sum));
        }
        __builtin_memcpy(y + t * y_stride, sums[0] + begin, (end - begin) * sizeof(float));
    }
}
#endif

// y[r] = rows[r] . x, r < ROWS, for one vector. Prefetches the rows `next`, and `also` if it is not null.
template <class F, int ROWS>
void dot_super_rows(const uint8_t* const* rows, const uint8_t* const* next, const uint8_t* const* also,
                    int64_t n, const PackedBlocks<Q8_0>& x, float* y, bool to_l2) {
    constexpr int TOGETHER = ROWS < SUPER_ROWS ? ROWS : SUPER_ROWS;
    for (int r = 0; r < ROWS; r += TOGETHER) {
        SuperX at = {x.values, x.stride, x.scale, x.sum, x.first_sum};
        SuperSums sums = {};
        const uint8_t* block[SUPER_ROWS];
        for (int64_t from = 0; from < n / 8 * F::BLOCK_BYTES; from += F::BLOCK_BYTES) {
            for (int i = 0; i < SUPER_ROWS; ++i) block[i] = rows[r + i % TOGETHER] + from;
            for (int i = 0; i < TOGETHER; ++i)
                for (int64_t line = 0; line < F::BLOCK_BYTES; line += 64) {
                    prefetch_row(next[r + i] + from + line, to_l2);
                    if (also) prefetch_row(also[r + i] + from + line, to_l2);
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
