// Types whose bits are codes: their values are small integers from a table or of one to five bits, times a scale, in
// blocks of 32, or of 64 or 128 values. Included by rows_template.h.
//
// Products unpack a block to bytes, value plus BIAS, and then have the arithmetic of blocks_template.h. Rows are
// summed one by one in f32, like those of K-quants: no file has a transposed matrix of such a type. A type is a
// struct with
//   BIAS              added to values to make them non-negative bytes
//   values(codes)     value plus BIAS of each byte of a vector of codes
// where a code is a nibble, and the fifth bit if the type has such bits. A level defines
//   look_up(table, v)         bytes v of a table of 16 bytes
//   add_to_bytes(v, n)        adds n to each byte
//   fifth_bits(numbers, v)    bits 4 * v .. 4 * v + 3 of each number, times 16, as its bytes
//   nibbles_of_block(p, i) fifths_of_block(p, i)   vector i of the 32 nibbles at p, in the order of values, or of 32
//                             bits times 16, as bytes; i < CODE_VECTORS; bytes past the 32nd are arbitrary
//   dwords_of(p)              LANES bytes, without a sign

// 32 values from bytes, value plus BIAS, times the scale of their block or half block, and plus its minimum.
template <class Type>
inline void scale_bytes_of_block(const uint8_t* bytes, const uint8_t* head, Floats* w) {
    float numbers[2] = {number_at<Type, 0>(head)};
    if constexpr (Type::NUMBERS == 2) numbers[1] = number_at<Type, 1>(head);
    for (int v = 0; v < VECTORS; ++v) {
        const Ints number = ints_of(dwords_of(bytes + v * LANES)) - Type::BIAS;
        const bool is_second = Type::RANGES == 2 && v * LANES >= BLOCK / 2;
        w[v] = mul(to_floats(number), broadcast(numbers[is_second]));
        if constexpr (Type::RANGES == 1 && Type::NUMBERS == 2)
            w[v] = add_floats(w[v], broadcast(numbers[1]));
    }
}

// Bytes of values plus BIAS in a vector that holds a block, or half of it.
constexpr int CODE_VECTORS = LANES < 8 ? 2 : 1;

template <class Type, int64_t HEAD, int64_t BYTES>
struct Coded : Interleaved<BYTES, HEAD> {
    static constexpr bool HAS_NIBBLES = false, IS_CODED = true, HAS_FIFTH = BYTES == 20;
    static constexpr int64_t NIBBLES_AT = BYTES - 16;

    // Four bytes of each of LANES rows' quants at a time -> values 4 * v .. 4 * v + 3 plus BIAS.
    static inline Ints bytes_of_lanes(const Ints* quarter, int v) {
        Ints code = quarter[v % 4 + HAS_FIFTH] >> v / 4 * 4 & 0x0f0f0f0f;
        if constexpr (HAS_FIFTH) code |= fifth_bits(quarter[0], v);
        return Type::values(code);
    }
    static inline void bytes_of_lanes(const Ints* quarter, Ints* bytes) {
        for (int v = 0; v < 8; ++v) bytes[v] = bytes_of_lanes(quarter, v);
    }

    // A row's block -> 32 signed values.
    static inline void signed_bytes(const uint8_t* quants, uint8_t* out) {
        for (int i = 0; i < CODE_VECTORS; ++i) {
            const Ints v = add_to_bytes(Type::values(codes(quants, i)), -Type::BIAS);
            __builtin_memcpy(out + BLOCK / CODE_VECTORS * i, &v, BLOCK / CODE_VECTORS);
        }
    }

    // Block b of a row -> 32 values, times their scale and plus their minimum.
    static inline void unpack(const uint8_t* row, int64_t b, Floats* w) {
        const uint8_t* block = row + b * Type::BLOCK_BYTES;
        alignas(64) uint8_t bytes[CODE_VECTORS * 4 * LANES];
        for (int i = 0; i < CODE_VECTORS; ++i) {
            const Ints v = Type::values(codes(block + HEAD, i));
            __builtin_memcpy(bytes + BLOCK / CODE_VECTORS * i, &v, sizeof v);
        }
        scale_bytes_of_block<Type>(bytes, block, w);
    }

  private:
    static inline Ints codes(const uint8_t* quants, int i) {
        Ints code = nibbles_of_block(quants + NIBBLES_AT, i);
        if constexpr (HAS_FIFTH) code |= fifths_of_block(quants, i);
        return code;
    }
};

// e8m0 exponent e, 16 bytes of nibbles, values 0 .. 15 in the low ones: codes of e2m1 (OCP Microscaling Formats, v1.0).
// The table has twice their values, and the scale is 2^(e - 128).
struct MXFP4 : Coded<MXFP4, 1, 16> {
    static constexpr int32_t BIAS = 12;
    alignas(16) static constexpr uint8_t TABLE[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                      12, 11, 10, 9,  8,  6,  4,  0};
    static inline Ints values(Ints codes) { return look_up(TABLE, codes); }
};

// f16 scale, 16 bytes of nibbles, likewise.
struct IQ4_NL : Coded<IQ4_NL, 2, 16> {
    static constexpr int32_t BIAS = 128;
    static inline Ints values(Ints codes) { return look_up(IQ4_VALUES, codes); }
};

// f16 scale, a number whose bit i is the fifth of value i, 16 bytes of nibbles.
struct Q5_0 : Coded<Q5_0, 2, 20> {
    static constexpr int32_t BIAS = 16;
    static inline Ints values(Ints codes) { return codes; }
};

// f16 scale and f16 minimum, then as in Q4_0 and Q5_0, but codes are values.
struct Q4_1 : Coded<Q4_1, 4, 16> {
    static constexpr int32_t BIAS = 0;
    static inline Ints values(Ints codes) { return codes; }
};

struct Q5_1 : Coded<Q5_1, 4, 20> {
    static constexpr int32_t BIAS = 0;
    static inline Ints values(Ints codes) { return codes; }
};

// Types of BITS bits in which SPAN blocks of 32 values share a head of HEAD bytes. A type has, in addition to BIAS,
//   four(words, v)    vector v of the values plus BIAS as bytes, from a block's words of 32 bits: int32_t, or vectors
//                     with a word of each row
//   place(i)          the value that byte i of these vectors has; HAS_ORDER: not value i, so x is packed in this order
// Rows that are not in tiles are unpacked a word at a time: matrices of such types are small enough to be in memory.
template <class Type, int BITS, int64_t HEAD, int64_t SPAN>
struct Spanned : Interleaved<4 * BITS, HEAD, SPAN> {
    static constexpr bool HAS_NIBBLES = false, IS_CODED = true;

    static inline Ints bytes_of_lanes(const Ints* words, int v) { return Type::four(words, v); }
    static inline void bytes_of_lanes(const Ints* words, Ints* bytes) {
        for (int v = 0; v < 8; ++v) bytes[v] = Type::four(words, v);
    }

    // A row's block -> 32 signed values, in the order of x.
    static inline void signed_bytes(const uint8_t* quants, uint8_t* out) {
        bytes_of_block(quants, out);
        for (int i = 0; i < BLOCK; ++i) out[i] = static_cast<uint8_t>(out[i] - Type::BIAS);
    }

    // Block b of a row -> 32 values, times their scales.
    static inline void unpack(const uint8_t* row, int64_t b, Floats* w) {
        alignas(64) uint8_t some[BLOCK], bytes[BLOCK];
        bytes_of_block(Type::quants(row, 0, b), some);
        for (int i = 0; i < BLOCK; ++i) bytes[Type::place(i)] = some[i];
        scale_bytes_of_block<Type>(bytes, Type::scale(row, 0, b), w);
    }

  private:
    static inline void bytes_of_block(const uint8_t* quants, uint8_t* out) {
        int32_t words[BITS];
        __builtin_memcpy(words, quants, sizeof words);
        for (int v = 0; v < 8; ++v) {
            const int32_t bytes = Type::four(words, v);
            __builtin_memcpy(out + 4 * v, &bytes, 4);
        }
    }
};

// f16 scale, 64 values of two bits: -1, 0, 1 or 2.
struct Q2_0 : Spanned<Q2_0, 2, 2, 2> {
    static constexpr bool HAS_ORDER = true;
    static constexpr int32_t BIAS = 1;
    template <class Word>
    static inline Word four(const Word* words, int v) {
        return words[v / 4] >> v % 4 * 2 & 0x03030303;
    }
    static constexpr int64_t place(int64_t i) { return i / 16 * 16 + i % 4 * 4 + i / 4 % 4; }
};

// f16 scale, 128 values of one bit: -1 or 1.
struct Q1_0 : Spanned<Q1_0, 1, 2, 4> {
    static constexpr bool HAS_ORDER = true;
    static constexpr int32_t BIAS = 1;
    template <class Word>
    static inline Word four(const Word* words, int v) {
        return (words[0] >> v & 0x01010101) << 1;
    }
    static constexpr int64_t place(int64_t i) { return i % 4 * 8 + i / 4; }
};

// Four scales of type ue4m3, each for 16 values, codes of e2m1 as in MXFP4: each 16 values have eight bytes, the first
// eight values in the low nibbles. The scales are halved, as TABLE has twice the values. Its rows begin with a factor
// (row_factors.h), of which this knows nothing.
struct NVFP4 : Spanned<NVFP4, 4, 4, 2> {
    static constexpr bool HAS_ORDER = false;
    static constexpr int64_t NUMBER_BYTES = 1, NUMBERS = 2, RANGES = 2;
    static constexpr int32_t BIAS = MXFP4::BIAS;

    static inline const uint8_t* scale(const uint8_t* row, int64_t n, int64_t b) {
        return Interleaved::scale(row, n, b) + b % SPAN * NUMBERS;
    }
    template <class Word>
    static inline Word four(const Word* words, int v) {
        return look_up(MXFP4::TABLE, words[v / 4 * 2 + v % 2] >> v % 4 / 2 * 4 & 0x0f0f0f0f);
    }
    static constexpr int64_t place(int64_t i) { return i; }
};
