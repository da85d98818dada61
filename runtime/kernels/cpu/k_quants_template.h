// The K-quants of llama.cpp (block_q4_K, block_q5_K and block_q6_K in its ggml-common.h): blocks of
// 256 values in eight parts of 32. Included by rows_template.h; a level defines
//   SUPER_ROWS, SuperSums, add_super, store_super    for products, see k_products.h
//   factors_with_minima(block, c, factor, minimum)   c*d*s and c*m*t of the eight parts, see below
//   factors_of_q6_k(block, c, factor)               c*d*s of the sixteen halves of parts
//   unpack_pair<F>(block, pair, w)    the quants of a pair's parts -> w[2 * VECTORS]; q6_K's minus 32
//
// q4_K, q5_K   f16 d, f16 m, 12 bytes of eight 6-bit scales s and eight minima t, then for q5_K 32
//              bytes of fifth bits, then 128 bytes of nibbles; value = d*s[part]*q - m*t[part].
//              Parts 2i and 2i+1 are the low and high nibbles of bytes 32i .. 32i+31.
// q6_K         128 bytes of nibbles, 64 of the two bits above them, 16 int8 scales s, one per 16
//              values, f16 d; value i = d*s[i / 16]*(q - 32). In each half of the block, parts 0
//              and 2 are the low and high nibbles of the first 32 bytes, parts 1 and 3 those of the
//              last 32.

template <class Format>
constexpr bool IS_SUPER = false;

// The bytes of a pair's two parts, in eight vectors each; `above`: all that hold bits above nibbles.
template <class F>
inline void bytes_of_pair(const Ints* quants, const Ints* above, int pair, Ints* low, Ints* high) {
    for (int v = 0; v < 8; ++v)
        F::four(quants[v], F::BITS_BYTES > 0 ? above[F::above_at(pair, v)] : Ints{}, pair, low[v],
                high[v]);
}

template <int BYTES>
struct WithMinima {
    static constexpr int64_t BLOCK_BYTES = BYTES;
    static constexpr bool SCALED = true, IS_PLANAR = false, HAS_MINIMA = true;
    static constexpr Parts parts(int pair) { return {2 * pair, 2 * pair + 1}; }

    static inline void factors(const uint8_t* block, float c, Factors& out) {
        factors_with_minima(block, c, out.factor, out.minimum);
    }
};

// four(quants, above, pair, low, high) gives the quants of a pair's two parts as bytes, without an offset, four of
// each row of a tile: `quants` holds the nibbles of both, and `above` vector above_at(pair, v) of the bytes that
// hold the bits above them, for vector v of nibbles.

struct Q4_K : WithMinima<144> {
    static constexpr int32_t KIND = KIND_Q4_K;
    static constexpr int64_t QUANTS_AT = 16, BITS_AT = 0, BITS_BYTES = 0;

    static constexpr int above_at(int, int) { return 0; }
    static inline void four(Ints quants, Ints, int, Ints& low, Ints& high) {
        low = quants & 0x0f0f0f0f;
        high = quants >> 4 & 0x0f0f0f0f;
    }
};

struct Q5_K : WithMinima<176> {
    static constexpr int32_t KIND = KIND_Q5_K;
    static constexpr int64_t QUANTS_AT = 48, BITS_AT = 16, BITS_BYTES = 32;

    static constexpr int above_at(int, int v) { return v; }
    static inline void four(Ints quants, Ints above, int pair, Ints& low, Ints& high) {
        above >>= 2 * pair;
        low = (quants & 0x0f0f0f0f) | (above & 0x01010101) << 4;
        high = (quants >> 4 & 0x0f0f0f0f) | (above & 0x02020202) << 3;
    }
};

struct Q6_K {
    static constexpr int32_t KIND = KIND_Q6_K;
    static constexpr int64_t BLOCK_BYTES = 210, QUANTS_AT = 0, BITS_AT = 128, BITS_BYTES = 64;
    static constexpr bool SCALED = true, IS_PLANAR = false, HAS_MINIMA = false;
    static constexpr Parts parts(int pair) {
        return {pair / 2 * 4 + pair % 2, pair / 2 * 4 + pair % 2 + 2};
    }
    static inline void factors(const uint8_t* block, float c, Factors& out) {
        factors_of_q6_k(block, c, out.factor);
    }
    static constexpr int above_at(int pair, int v) { return pair / 2 * 8 + v; }
    static inline void four(Ints quants, Ints above, int pair, Ints& low, Ints& high) {
        above >>= pair % 2 * 2;
        low = (quants & 0x0f0f0f0f) | (above & 0x03030303) << 4;
        high = (quants >> 4 & 0x0f0f0f0f) | (above & 0x30303030);
    }
};

template <>
constexpr bool IS_SUPER<Q4_K> = true;
template <>
constexpr bool IS_SUPER<Q5_K> = true;
template <>
constexpr bool IS_SUPER<Q6_K> = true;

// y[d0..d1) += the sum over r of c[r] * rows[r][d0..d1), for whole blocks; the minima of all rows
// are subtracted first. Meanwhile the rows `next` and, unless it is null, `also` are prefetched.
template <class Format, int ROWS>
inline void add_super_rows(const uint8_t* const* rows, const uint8_t* const* next, const float* c,
                           float* y, int64_t d0, int64_t d1, const uint8_t* const* also) {
    for (int64_t d = d0; d < d1; d += SUPER_BLOCK) {
        const int64_t at = d / SUPER_BLOCK * Format::BLOCK_BYTES;
        Factors of[ROWS];
        float minimum[8] = {};
        for (int r = 0; r < ROWS; ++r) {
            for (int64_t line = 0; line < Format::BLOCK_BYTES; line += 64)
                __builtin_prefetch(next[r] + at + line);
            for (int64_t line = 0; also && line < Format::BLOCK_BYTES; line += 64)
                __builtin_prefetch(also[r] + at + line);
            Format::factors(rows[r] + at, c[r], of[r]);
            if constexpr (Format::HAS_MINIMA)
                for (int i = 0; i < 8; ++i) minimum[i] += of[r].minimum[i];
        }
        keep_in_memory(of), keep_in_memory(minimum);
#pragma GCC unroll 4
        for (int pair = 0; pair < 4; ++pair) {
            const Parts parts = Format::parts(pair);
            float* part_y[2] = {y + d + parts.first * BLOCK, y + d + parts.second * BLOCK};
            Floats out[2 * VECTORS];
            for (int v = 0; v < 2 * VECTORS; ++v) {
                const int part = v < VECTORS ? parts.first : parts.second;
                out[v] = load_floats(part_y[v / VECTORS] + v % VECTORS * LANES);
                if constexpr (Format::HAS_MINIMA) out[v] = out[v] - broadcast(minimum[part]);
            }
            for (int r = 0; r < ROWS; ++r) {
                Floats w[2 * VECTORS];
                unpack_pair<Format>(rows[r] + at, pair, w);
                for (int v = 0; v < 2 * VECTORS; ++v) {
                    const int part = v < VECTORS ? parts.first : parts.second;
                    const int half = v % VECTORS * LANES / 16;
                    const int at = Format::HAS_MINIMA ? part : 2 * part + half;
                    out[v] = multiply_add(w[v], broadcast(of[r].factor[at]), out[v]);
                }
            }
            for (int v = 0; v < 2 * VECTORS; ++v)
                store_floats(part_y[v / VECTORS] + v % VECTORS * LANES, out[v]);
        }
    }
}
