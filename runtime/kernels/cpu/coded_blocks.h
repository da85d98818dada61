// Types with blocks of 32 values whose bits are codes: their values are small integers from a table or of five bits,
// times a scale. Included by rows_template.h.
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

// Bytes of values plus BIAS in a vector that holds a block, or half of it.
constexpr int CODE_VECTORS = LANES < 8 ? 2 : 1;

template <class Type, int64_t HEAD, int64_t BYTES>
struct Coded : Interleaved<BYTES, HEAD> {
    static constexpr bool HAS_NIBBLES = false, IS_CODED = true, HAS_FIFTH = BYTES == 20;
    static constexpr int64_t NIBBLES_AT = BYTES - 16;

    // Four bytes of each of LANES rows' quants at a time -> eight vectors of value plus BIAS, in order.
    static inline void bytes_of_lanes(const Ints* quarter, Ints* bytes) {
        for (int v = 0; v < 8; ++v) {
            Ints code = quarter[v % 4 + HAS_FIFTH] >> v / 4 * 4 & 0x0f0f0f0f;
            if constexpr (HAS_FIFTH) code |= fifth_bits(quarter[0], v);
            bytes[v] = Type::values(code);
        }
    }

    // A row's block -> 32 signed values.
    static inline void signed_bytes(const uint8_t* quants, uint8_t* out) {
        for (int i = 0; i < CODE_VECTORS; ++i) {
            const Ints v = add_to_bytes(Type::values(codes(quants, i)), -Type::BIAS);
            __builtin_memcpy(out + BLOCK / CODE_VECTORS * i, &v, BLOCK / CODE_VECTORS);
        }
    }

    // A block of a row -> 32 values, times their scale and plus their minimum.
    static inline void unpack(const uint8_t* block, Floats* w) {
        alignas(64) uint8_t bytes[CODE_VECTORS * 4 * LANES];
        for (int i = 0; i < CODE_VECTORS; ++i) {
            const Ints v = Type::values(codes(block + HEAD, i));
            __builtin_memcpy(bytes + BLOCK / CODE_VECTORS * i, &v, sizeof v);
        }
        const Floats scale = broadcast(number_at<Type, 0>(block));
        for (int v = 0; v < VECTORS; ++v) {
            const Ints number = ints_of(dwords_of(bytes + v * LANES)) - Type::BIAS;
            w[v] = mul(to_floats(number), scale);
            if constexpr (Type::NUMBERS == 2)
                w[v] = add_floats(w[v], broadcast(number_at<Type, 1>(block)));
        }
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
