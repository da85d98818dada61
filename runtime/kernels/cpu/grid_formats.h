// Products of tiles of llama.cpp's types of 256 and 512 entries, IQ2_XXS, IQ2_XS, IQ3_XXS and IQ3_S, as files have them
// (dequantize_row_iq* in its ggml-quants.c), with AVX-512 VBMI and GFNI. With more entries,
// products took longer than those of the table types. Included by rows_grids.cpp, after rows_template.h.
//
// Four or eight values are an entry of a grid, a sign each, and a scale of 16 or 32 values, an odd number. Tiles
// (k_tiles.h) have four bytes of each of sixteen rows side by side, so a vector has four indices of each row. A grid is
// kept as bytes with the codes of two or four values of an entry (set_grid), and a byte permutation looks up 128 of
// them. With a value's sign beside its code, a last permutation gives the value plus 128.
//
// A vector of bytes then has, of each row, a value of four entries of four, or of two entries of eight and another of
// the same two. Vectors are therefore packed in another order: FORM_GRIDS is FORM_BYTES with each sixteen values
// transposed as 4 x 4. The sum over a part, and over its half, is an exact integer, and terms are those of the table
// types (k_formats.h), so results are the same bits.
//
// Each type defines, for one part of a block,
//   entries(tile, place, p, bytes)     values 16h + 4k + j of a part, plus 128: byte k of each row in bytes[4h + j]
//   number(tile, place, p, range)      the odd number of the scale of a part, or of its half `range`
// and, for a block, d(tile, place).

inline Bits qwords(uint64_t v) { return _mm512_set1_epi64(static_cast<int64_t>(v)); }
inline Bits bytes_at(const uint8_t* p) { return bits(load_in_order(p)); }

// The matrix of a vgf2p8affineqb that moves bits: bit i of a byte is bit of[i] of the old one, or 0 if that is -1.
struct BitPlaces {
    int of[8];
};
constexpr uint64_t moving(BitPlaces places) {
    uint64_t matrix = 0;
    for (int i = 0; i < 8; ++i)
        if (places.of[i] >= 0) matrix |= uint64_t{1} << places.of[i] << 8 * (7 - i);
    return matrix;
}
constexpr int O = -1;
template <uint64_t MATRIX>
inline Bits affine(Bits bytes) {
    return _mm512_gf2p8affine_epi64_epi8(bytes, qwords(MATRIX), 0);
}

// Eight bits of each number of 32 for each of its bytes: from bit FIRST, FIRST + STEP, ... on.
template <int FIRST, int STEP>
inline Bits bits_from(Bits numbers) {
    uint64_t at = 0;
    for (int k = 0; k < 8; ++k) at |= uint64_t(k / 4 * 32 + FIRST + k % 4 * STEP) << 8 * k;
    return _mm512_multishift_epi64_epi8(qwords(at), numbers);
}

// Byte `which` of each number of 32, four times.
inline Bits byte_of_four(Bits numbers, int which) {
    const Bits rows = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
    return _mm512_shuffle_epi8(numbers,
                               _mm512_add_epi8(rows, _mm512_set1_epi8(static_cast<char>(which))));
}

// Bytes 2 * h and 2 * h + 1 of each number of a and b: a's first, b's first, a's second, b's second.
struct TwoOfBoth {
    alignas(64) uint8_t at[2][64];
    constexpr TwoOfBoth() : at() {
        for (int h = 0; h < 2; ++h)
            for (int i = 0; i < 64; ++i) at[h][i] = i / 4 * 4 + 2 * h + i % 4 / 2 + i % 2 * 64;
    }
};
constexpr TwoOfBoth TWO_OF_BOTH;
// Byte FIRST of each number of 16 bits, those of a before those of b in each number of 32.
template <int FIRST>
struct Alternate {
    alignas(64) uint8_t at[64];
    constexpr Alternate() : at() {
        for (int i = 0; i < 64; ++i) at[i] = i / 4 * 4 + i % 2 * 2 + FIRST + i % 4 / 2 * 64;
    }
};
template <int FIRST>
constexpr Alternate<FIRST> ALTERNATE;

// The eight signs of which seven are stored in the bits at `places`; the number of minus signs is even.
constexpr uint64_t with_parity(BitPlaces places) {
    uint64_t matrix = moving(places);
    for (int i = 0; i < 7; ++i) matrix |= uint64_t{1} << places.of[i];
    return matrix;
}

// Looks up bytes in a table of 2^INDEX_BITS. The indices have seven bits in `index` and the others in the masks `upper`.
// The bits of `also` are added.
template <int INDEX_BITS>
__attribute__((always_inline)) inline Bits codes(const uint8_t* table, Bits index,
                                                 const __mmask64* upper, Bits also);
// The two halves of 256 entries and `also` are joined by one instruction.
template <>
__attribute__((always_inline)) inline Bits codes<8>(const uint8_t* table, Bits index,
                                                    const __mmask64* upper, Bits also) {
    Bits of[2];
    for (int i = 0; i < 2; ++i) {
        const uint8_t* at = table + 128 * i;
        of[i] = _mm512_maskz_permutex2var_epi8(i ? upper[0] : _knot_mask64(upper[0]), load_64_bytes(at),
                                               index, load_64_bytes(at + 64));
    }
    return _mm512_ternarylogic_epi32(of[0], of[1], also, 0xfe);
}
template <>
__attribute__((always_inline)) inline Bits codes<9>(const uint8_t* table, Bits index,
                                                    const __mmask64* upper, Bits also) {
    Bits of[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const uint8_t* at = table + 128 * i;
        of[i] = _mm512_permutex2var_epi8(load_64_bytes(at), index, load_64_bytes(at + 64));
    }
    const Bits low = _mm512_mask_blend_epi8(upper[0], of[0], of[1]),
               high = _mm512_mask_blend_epi8(upper[0], of[2], of[3]);
    return _mm512_or_si512(_mm512_mask_blend_epi8(upper[1], low, high), also);
}

// Values of a code's lowest bits and a sign above them, plus 128: of a byte's bits FIRST .. FIRST + BITS - 1 and the bit SIGN.
template <const uint8_t* VALUES, int FIRST, int BITS, int SIGN>
struct ValuesOfByte {
    alignas(64) uint8_t of[64];
    constexpr ValuesOfByte() : of() {
        for (int i = 0; i < 64; ++i)
            of[i] = VALUES[(i >> FIRST & ((1 << BITS) - 1)) | (i >> SIGN & 1) << BITS];
    }
};
template <const uint8_t* VALUES, int FIRST, int BITS, int SIGN>
constexpr ValuesOfByte<VALUES, FIRST, BITS, SIGN> VALUES_OF_BYTE;
template <const uint8_t* VALUES, int FIRST, int BITS, int SIGN>
inline Ints values_of(Bits bytes) {
    const Bits table = load_64_bytes(VALUES_OF_BYTE<VALUES, FIRST, BITS, SIGN>.of);
    return ints(_mm512_permutexvar_epi8(bytes, table));
}
// In the low bits; the others are anything.
inline Bits upper_nibbles(Bits bytes) { return _mm512_srli_epi16(bytes, 4); }

template <int32_t NUMBER, int RANGES, int DIVISOR>
struct GridFormat : Grid, SuperFormat<NUMBER, RANGES, false, 128, DIVISOR> {
    static Floats d(const uint8_t* tile, const SuperPlace& place) {
        return mul(load_f16(tile + place.halves), broadcast(1.0f / DIVISOR));
    }

  protected:
    // Four bytes of each row: number i of those before and of those in the quants.
    static Bits of_bits(const uint8_t* tile, const SuperPlace& place, int i) {
        return bytes_at(tile + place.bits + 4 * TILE_ROWS * i);
    }
    static Bits of_quants(const uint8_t* tile, const SuperPlace& place, int i) {
        return bytes_at(tile + place.quants + 4 * TILE_ROWS * i);
    }
    static Ints odd(Bits numbers) {  // of the low four bits
        return (ints(numbers) & 15) * 2 + 1;
    }
    static Ints odd_of_top(Bits numbers) { return ((ints(numbers) >> 27) & 30) | 1; }
    // Nibble `which` of scale byte i.
    static Ints odd_of_nibble(const uint8_t* tile, const SuperPlace& place, int i, int which) {
        return odd(_mm512_srli_epi32(dwords_of(tile + place.scales + TILE_ROWS * i), 4 * which));
    }
};

// Of types with entries of four values. `signs`: eight bits of each two entries.
template <int32_t NUMBER, int DIVISOR, const uint8_t* VALUES, int INDEX_BITS>
struct FoursFormat : GridFormat<NUMBER, 1, DIVISOR> {
    static constexpr int PER_ENTRY = 4;
    alignas(64) static inline uint8_t grid[2][1 << INDEX_BITS];  // the codes of two values, in nibbles

  protected:
    template <int H>
    __attribute__((always_inline)) static void sixteen(Bits index, const __mmask64* upper, Bits signs,
                                                       Ints* bytes) {
        const Bits own = bits_from<16 * H, 4>(signs);
        const Bits sign[2] = {affine<moving({O, O, O, 0, O, O, O, 1})>(own),
                              affine<moving({O, O, O, 2, O, O, O, 3})>(own)};
#pragma GCC unroll 2
        for (int t = 0; t < 2; ++t) {
            const Bits both = codes<INDEX_BITS>(grid[t], index, upper, sign[t]);
            bytes[4 * H + 2 * t] = values_of<VALUES, 0, 3, 3>(both);
            bytes[4 * H + 2 * t + 1] = values_of<VALUES, 0, 3, 3>(upper_nibbles(both));
        }
    }
};

struct IQ3_XXS : FoursFormat<KIND_IQ3_XXS, 4, IQ3_XXS_VALUES, 8> {
    __attribute__((always_inline)) static void entries(const uint8_t* tile, const SuperPlace& place,
                                                       int p, Ints* bytes) {
        const Bits signs =
            affine<with_parity({0, 1, 2, 3, 4, 5, 6, O})>(bits_from<0, 7>(of_bits(tile, place, p)));
        auto half = [&](auto h) __attribute__((always_inline)) {
            const Bits index = of_quants(tile, place, 2 * p + h);
            const __mmask64 upper = _mm512_movepi8_mask(index);
            sixteen<h>(index, &upper, signs, bytes);
        };
        half(Count<0>{}), half(Count<1>{});
    }
    static Ints number(const uint8_t* tile, const SuperPlace& place, int p, int) {
        return odd_of_top(of_bits(tile, place, p));
    }
};

struct IQ3_S : FoursFormat<KIND_IQ3_S, 1, IQ3_S_VALUES, 9> {
    __attribute__((always_inline)) static void entries(const uint8_t* tile, const SuperPlace& place,
                                                       int p, Ints* bytes) {
        const Bits signs = of_bits(tile, place, p);
        const Bits ninth = byte_of_four(of_quants(tile, place, 16 + p / 4), p % 4);
        auto half = [&](auto h) __attribute__((always_inline)) {
            const Bits index = of_quants(tile, place, 2 * p + h);
            const __mmask64 upper[2] = {
                _mm512_movepi8_mask(index),
                _mm512_test_epi8_mask(ninth, _mm512_set1_epi32(0x08040201u << 4 * h))};
            sixteen<h>(index, upper, signs, bytes);
        };
        half(Count<0>{}), half(Count<1>{});
    }
    static Ints number(const uint8_t* tile, const SuperPlace& place, int p, int) {
        return odd_of_nibble(tile, place, p / 2, p % 2);
    }
};

// Of types with entries of eight values.
template <int32_t NUMBER, const uint8_t* VALUES, int INDEX_BITS>
struct EightsFormat : GridFormat<NUMBER, 2, 8> {
    static constexpr int PER_ENTRY = 8;
    // Codes of four values: from the lowest bits, of the first, the third, the second and the last.
    alignas(64) static inline uint8_t grid[2][1 << INDEX_BITS];

  protected:
    // Of the four entries of a part. `signs`: eight bits for each entry.
    __attribute__((always_inline)) static void four(Bits index, const __mmask64* upper, Bits signs,
                                                    Ints* bytes) {
        const Bits first = codes<INDEX_BITS>(grid[0], index, upper, Bits{}),
                   last = codes<INDEX_BITS>(grid[1], index, upper, Bits{});
        auto half = [&](auto h) __attribute__((always_inline)) {
            const Bits own = bits_from<16 * h, 4>(signs);
            const Bits both = _mm512_permutex2var_epi8(first, load_64_bytes(TWO_OF_BOTH.at[h]), last);
            // The signs of two values in the places of the codes of the other two.
            const Bits of_two = _mm512_ternarylogic_epi32(both,
                                                          affine<moving({O, O, 0, O, O, O, 1, O})>(own),
                                                          _mm512_set1_epi8(0x33), 0xe4),
                       of_others = _mm512_ternarylogic_epi32(
                           both, affine<moving({O, 2, O, O, O, 3, O, O})>(own), _mm512_set1_epi8(0x33),
                           0xd8);
            bytes[4 * h] = values_of<VALUES, 0, 2, 2>(of_two);
            bytes[4 * h + 1] = values_of<VALUES, 0, 2, 2>(upper_nibbles(of_two));
            bytes[4 * h + 2] = values_of<VALUES, 2, 2, 1>(of_others);
            bytes[4 * h + 3] = values_of<VALUES, 2, 2, 1>(upper_nibbles(of_others));
        };
        half(Count<0>{}), half(Count<1>{});
    }
};

struct IQ2_XXS : EightsFormat<KIND_IQ2_XXS, IQ2_VALUES, 8> {
    __attribute__((always_inline)) static void entries(const uint8_t* tile, const SuperPlace& place,
                                                       int p, Ints* bytes) {
        const Bits signs = affine<with_parity({0, 1, 2, 3, 4, 5, 6, O})>(
                       bits_from<0, 7>(of_quants(tile, place, 2 * p + 1))),
                   index = of_quants(tile, place, 2 * p);
        const __mmask64 upper = _mm512_movepi8_mask(index);
        four(index, &upper, signs, bytes);
    }
    static Ints number(const uint8_t* tile, const SuperPlace& place, int p, int) {
        return odd_of_top(of_quants(tile, place, 2 * p + 1));
    }
};

struct IQ2_XS : EightsFormat<KIND_IQ2_XS, IQ2_VALUES, 9> {
    // Nine bits of an index and seven signs in each number of 16 bits.
    __attribute__((always_inline)) static void entries(const uint8_t* tile, const SuperPlace& place,
                                                       int p, Ints* bytes) {
        const Bits two = of_quants(tile, place, 2 * p), others = of_quants(tile, place, 2 * p + 1);
        const Bits index = _mm512_permutex2var_epi8(two, load_64_bytes(ALTERNATE<0>.at), others),
                   above = _mm512_permutex2var_epi8(two, load_64_bytes(ALTERNATE<1>.at), others);
        const __mmask64 upper[2] = {_mm512_movepi8_mask(index),
                                    _mm512_test_epi8_mask(above, _mm512_set1_epi8(1))};
        four(index, upper, affine<with_parity({1, 2, 3, 4, 5, 6, 7, O})>(above), bytes);
    }
    static Ints number(const uint8_t* tile, const SuperPlace& place, int p, int range) {
        return odd_of_nibble(tile, place, p, range);
    }
};
