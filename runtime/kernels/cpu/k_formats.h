// The K-quants of llama.cpp (block_q2_K to block_q6_K in its ggml-common.h): blocks of 256 values in
// eight parts of 32. A part, or each of its two halves, has a scale s, and in some types a minimum t:
//   value = d*s*(quant - LESS) - m*t
// k_tiles.h says where a block has its parts.
//
// q4_K, q5_K   f16 d, f16 m, 12 bytes of eight 6-bit scales and eight minima, for q5_K 32 bytes of fifth
//              bits, nibbles. Parts 2i and 2i+1 are the low and high nibbles of bytes 32i .. 32i+31.
// q6_K         nibbles, the two bits above them, 16 int8 scales, d; LESS = 32. In each half of the
//              block, parts 0 and 2 are the low and high nibbles of the first 32 bytes, parts 1 and 3 those
//              of the last 32.
// q3_K         bit p of 32 bytes is the third bit of part p; in each half of the block, parts 0 to 3 have
//              the lowest two bits, ... the highest two bits of 32 bytes; 16 6-bit scales that count from
//              -32; d; LESS = 4
// q2_K         16 bytes with a scale (low nibble) and a minimum each, two bits as in q3_K, d, m
// iq4_xs       d, the upper two bits of eight scales, their nibbles; scales count from -32. Low nibbles of 16
//              bytes are the first half of a part, high ones the second; they are places in IQ4_VALUES; LESS =
//              128
// tq2_0        64 bytes of two bits as in q2_K, d; LESS = 1
// iq1_table, iq2_table             as q3_K; its quants are places in a table; d is times a power of two, UNIT
// iq3_xxs_table, iq3_s_table       as iq4_xs, with other tables; likewise
// The last four are made from a file's types with grids (src/hotsplit/native/table_blocks.cpp).
//
// Each type defines
//   parts(pair), quants_at(pair, v), above_at(pair, v)   a pair's parts; the place, in four bytes, of
//         vector v of the bytes that hold their quants, and of those that hold the bits above them
//   four(quants, above, pair, low, high)   the quants of a pair's two parts as bytes
//   numbers(load, keep)   the scales, then the minima, as int8: load(i) gives bytes i to i + 3 of the
//         scale bytes, keep(i, four) takes numbers i to i + 3
//   numbers(words, keep)  in iq4_xs: `words` are the 16-bit numbers, keep(i, number) takes one number
// whose vectors are of any length: in a tile they have four bytes of each row, or four numbers of
// each row.

// The values of iq4_nl's and iq4_xs's codes (kvalues_iq4nl in ggml-common.h) plus 128.
alignas(16) constexpr uint8_t IQ4_VALUES[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                129, 141, 153, 166, 181, 197, 217, 241};
// Those of the table types (`levels` in weight_types.py), likewise; of eight codes, repeated.
alignas(16) constexpr uint8_t IQ1_VALUES[16] = {121, 129, 137, 128, 119, 127, 135, 128,
                                                121, 129, 137, 128, 119, 127, 135, 128};
alignas(16) constexpr uint8_t IQ2_VALUES[16] = {136, 153, 171, 128, 120, 103, 85, 128,
                                                136, 153, 171, 128, 120, 103, 85, 128};
alignas(16) constexpr uint8_t IQ3_XXS_VALUES[16] = {132, 140, 148, 156, 164, 172, 180, 190,
                                                    124, 116, 108, 100, 92,  84,  76,  66};
alignas(16) constexpr uint8_t IQ3_S_VALUES[16] = {129, 131, 133, 135, 137, 139, 141, 143,
                                                  127, 125, 123, 121, 119, 117, 115, 113};

struct Super {};
template <class Format>
constexpr bool IS_SUPER = __is_base_of(Super, Format);

// Types of grid_formats.h, which have tiles only.
struct Grid {};
template <class Format>
constexpr bool IS_GRID = __is_base_of(Grid, Format);
template <class Format>
struct GridTile;

template <int32_t NUMBER, int RANGES_OF_PART, bool MINIMA, int32_t OFFSET, int DIVISOR = 1>
struct SuperFormat : Super {
    static constexpr int32_t KIND = NUMBER;
    static constexpr SuperShape SHAPE = super_shape(KIND);
    static constexpr int64_t BLOCK_BYTES = SHAPE.block_bytes, QUANTS_AT = SHAPE.quants_at,
                             BITS_AT = SHAPE.bits_at, BITS_BYTES = SHAPE.bit_bytes;
    static constexpr bool SCALED = true, IS_PLANAR = false;
    static constexpr int RANGES = RANGES_OF_PART;  // of a part, each with its scale
    static constexpr int NUM_FACTORS = 8 * RANGES;
    static constexpr bool HAS_MINIMA = MINIMA;
    static constexpr int32_t LESS = OFFSET;
    static constexpr float UNIT = 1.0f / DIVISOR;     // d is times this
    static constexpr const uint8_t* TABLE = nullptr;  // quants are places in it
    static constexpr bool HAS_NUMBERS = true;         // false: each scale is d
    static constexpr bool ARE_NUMBERS_BYTES = false;  // the scale bytes are the numbers
    static constexpr bool HAS_WORDS = false;          // numbers come from the 16-bit numbers
    // Nibbles of bytes are the halves of one part, rather than of two parts.
    static constexpr bool SHARES_HALVES = false;
};

// Of q4_K and q5_K.
struct SixBitNumbers {
    static constexpr Parts parts(int pair) { return {2 * pair, 2 * pair + 1}; }
    static constexpr int quants_at(int pair, int v) { return 8 * pair + v; }

    // The first four scales and the first four minima are the low six bits of bytes 0-3 and 4-7; the
    // others are in the nibbles of bytes 8-11, with their upper two bits at the top of bytes 0-3 and 4-7.
    template <class Load, class Keep>
    static inline void numbers(const Load& load, const Keep& keep) {
        const auto first = load(0), second = load(4), third = load(8);
        keep(0, first & 0x3f3f3f3f);
        keep(4, (third & 0x0f0f0f0f) | (first >> 2 & 0x30303030));
        keep(8, second & 0x3f3f3f3f);
        keep(12, (third >> 4 & 0x0f0f0f0f) | (second >> 2 & 0x30303030));
    }
};

struct Q4_K : SuperFormat<KIND_Q4_K, 1, true, 0>, SixBitNumbers {
    static constexpr int above_at(int, int) { return 0; }
    template <class V>
    static inline void four(V quants, V, int, V& low, V& high) {
        low = quants & 0x0f0f0f0f;
        high = quants >> 4 & 0x0f0f0f0f;
    }
};

struct Q5_K : SuperFormat<KIND_Q5_K, 1, true, 0>, SixBitNumbers {
    static constexpr int above_at(int, int v) { return v; }
    template <class V>
    static inline void four(V quants, V above, int pair, V& low, V& high) {
        above >>= 2 * pair;
        low = (quants & 0x0f0f0f0f) | (above & 0x01010101) << 4;
        high = (quants >> 4 & 0x0f0f0f0f) | (above & 0x02020202) << 3;
    }
};

// Of q6_K, q3_K and q2_K.
struct PairsOfHalves {
    static constexpr Parts parts(int pair) {
        return {pair / 2 * 4 + pair % 2, pair / 2 * 4 + pair % 2 + 2};
    }
};

struct Q6_K : SuperFormat<KIND_Q6_K, 2, false, 32>, PairsOfHalves {
    static constexpr bool ARE_NUMBERS_BYTES = true;
    static constexpr int quants_at(int pair, int v) { return 8 * pair + v; }
    static constexpr int above_at(int pair, int v) { return pair / 2 * 8 + v; }
    template <class V>
    static inline void four(V quants, V above, int pair, V& low, V& high) {
        above >>= pair % 2 * 2;
        low = (quants & 0x0f0f0f0f) | (above & 0x03030303) << 4;
        high = (quants >> 4 & 0x0f0f0f0f) | (above & 0x30303030);
    }
};

// Of q3_K and the table types that are like it.
struct ThreeBits : PairsOfHalves {
    static constexpr int quants_at(int pair, int v) { return pair / 2 * 8 + v; }
    static constexpr int above_at(int, int v) { return v; }
    template <class V>
    static inline void codes(V quants, V above, int pair, V& low, V& high) {
        quants >>= pair % 2 * 2;
        above >>= parts(pair).first;
        low = (quants & 0x03030303) | (above & 0x01010101) << 2;
        high = (quants >> 4 & 0x03030303) | (above & 0x04040404);
    }
    // The low four bits of scales 0-7 and 8-15 are the nibbles of bytes 0-7, the upper two bits of
    // scales 4i .. 4i+3 are bits 2i and 2i+1 of bytes 8-11. They count from -32.
    template <class Load, class Keep>
    static inline void numbers(const Load& load, const Keep& keep) {
        const auto first = load(0), second = load(4), third = load(8);
        auto number = [&](auto nibbles, auto upper) {
            const auto turned = ((nibbles & 0x0f0f0f0f) | (upper & 0x03030303) << 4) ^ 0x20202020;
            return turned | (turned & 0x20202020) << 1 | (turned & 0x20202020) << 2;
        };
        keep(0, number(first, third));
        keep(4, number(second, third >> 2));
        keep(8, number(first >> 4, third >> 4));
        keep(12, number(second >> 4, third >> 6));
    }
};

struct Q3_K : SuperFormat<KIND_Q3_K, 2, false, 4>, ThreeBits {
    template <class V>
    static inline void four(V quants, V above, int pair, V& low, V& high) {
        codes(quants, above, pair, low, high);
    }
};

template <int32_t NUMBER, const uint8_t* VALUES, int DIVISOR>
struct ThreeBitTable : SuperFormat<NUMBER, 2, false, 128, DIVISOR>, ThreeBits {
    static constexpr const uint8_t* TABLE = VALUES;
    template <class V>
    static inline void four(V quants, V above, int pair, V& low, V& high) {
        codes(quants, above, pair, low, high);
        low = look_up(TABLE, low), high = look_up(TABLE, high);
    }
};

struct Q2_K : SuperFormat<KIND_Q2_K, 2, true, 0>, PairsOfHalves {
    static constexpr int quants_at(int pair, int v) { return pair / 2 * 8 + v; }
    static constexpr int above_at(int, int) { return 0; }
    template <class V>
    static inline void four(V quants, V, int pair, V& low, V& high) {
        quants >>= pair % 2 * 2;
        low = quants & 0x03030303;
        high = quants >> 4 & 0x03030303;
    }
    template <class Load, class Keep>
    static inline void numbers(const Load& load, const Keep& keep) {
        for (int i = 0; i < 16; i += 4) {
            const auto both = load(i);
            keep(i, both & 0x0f0f0f0f);
            keep(16 + i, both >> 4 & 0x0f0f0f0f);
        }
    }
};

template <int32_t NUMBER, const uint8_t* VALUES, int DIVISOR = 1>
struct FourBitTable : SuperFormat<NUMBER, 1, false, 128, DIVISOR> {
    static constexpr bool HAS_WORDS = true, SHARES_HALVES = true;
    static constexpr const uint8_t* TABLE = VALUES;
    static constexpr Parts parts(int pair) { return {2 * pair, 2 * pair + 1}; }
    static constexpr int quants_at(int pair, int v) { return 8 * pair + v; }
    static constexpr int above_at(int, int) { return 0; }
    template <class V>
    static inline void four(V quants, V, int, V& low, V& high) {
        low = look_up(TABLE, quants & 0x0f0f0f0f);
        high = look_up(TABLE, quants >> 4 & 0x0f0f0f0f);
    }
    // Two bits of each scale, then four bits of each.
    template <class W, class Keep>
    static inline void numbers(const W* words, const Keep& keep) {
        for (int i = 0; i < 8; ++i)
            keep(i, ((words[1 + i / 4] >> i % 4 * 4 & 15) | (words[0] >> 2 * i & 3) << 4) - 32);
    }
};

typedef FourBitTable<KIND_IQ4_XS, IQ4_VALUES> IQ4_XS;
typedef ThreeBitTable<KIND_IQ1_TABLE, IQ1_VALUES, 8> IQ1_Table;
typedef ThreeBitTable<KIND_IQ2_TABLE, IQ2_VALUES, 8> IQ2_Table;
typedef FourBitTable<KIND_IQ3_XXS_TABLE, IQ3_XXS_VALUES, 4> IQ3_XXS_Table;
typedef FourBitTable<KIND_IQ3_S_TABLE, IQ3_S_VALUES> IQ3_S_Table;

struct TQ2_0 : SuperFormat<KIND_TQ2_0, 1, false, 1>, PairsOfHalves {
    static constexpr bool HAS_NUMBERS = false;
    static constexpr int quants_at(int pair, int v) { return Q2_K::quants_at(pair, v); }
    static constexpr int above_at(int, int) { return 0; }
    template <class V>
    static inline void four(V quants, V above, int pair, V& low, V& high) {
        Q2_K::four(quants, above, pair, low, high);
    }
};

// The term of a part, or of a vector of parts, from its exact sums over each range: `product` of quants less
// LESS and x, `less` of minus x (only with minima). Every level rounds as this does.
template <class F, class V>
__attribute__((always_inline)) inline V term_of(const V* factor, const V* product, const V* minimum,
                                                const V* less) {
    V term;
    if constexpr (F::HAS_MINIMA) {
        term = mul(minimum[0], less[0]);
        if constexpr (F::RANGES == 2) term = fused(minimum[1], less[1], term);
        term = fused(factor[0], product[0], term);
    } else {
        term = mul(factor[0], product[0]);
    }
    if constexpr (F::RANGES == 2) term = fused(factor[1], product[1], term);
    return term;
}

// The sum of x over a range of a part, from that over the part and over its first half.
template <class F, class T>
inline T sum_of_range(int range, T sum, T first_sum) {
    return F::RANGES == 1 ? sum : range == 0 ? first_sum : sum - first_sum;
}
