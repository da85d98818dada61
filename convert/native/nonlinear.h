// Types whose quants are places in a table: iq4_nl, iq4_xs (quantize_row_iq4_nl_impl of ggml-quants.c) and
// mxfp4 (OCP Microscaling Formats, 1.0, section 6.3; the scale as in ggml). Included inside the anonymous
// namespace of each encode_<level>.cpp, by encode_template.h.
//
// iq4_nl   f16 d, 16 bytes of nibbles q; value = d * TABLE[q]; values 0..15 are in the low nibbles
// iq4_xs   f16 d, two high bits of eight scales s (16 bits), the low nibbles of the eight (4 bytes), then
//          iq4_nl's nibbles of each part of 32; value = d * (s - 32) * TABLE[q]
// mxfp4    a byte e, nibbles; value = 2^(e - 128) * (0, 1, 2, 3, 4, 6, 8, 12 or, from 8 on, their negatives)

constexpr int32_t TABLE[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                               1,    13,   25,  38,  53,  69,  89,  113};

// The place of the table's nearest value, the larger of two as near; 0 for NaN.
inline void place_of(const Eight& x, EightInts& place) {
    const Eight doubled = x + x;
    place = EightInts{};
    for (int j = 1; j < 16; ++j)
        place -= doubled >= static_cast<float>(TABLE[j - 1] + TABLE[j]);  // true is -1
}

inline void nearest_value(const Eight& x, Eight& value) {
    const Eight doubled = x + x;
    EightInts sum = EightInts{} + TABLE[0];
    for (int j = 1; j < 16; ++j)
        sum += (doubled >= static_cast<float>(TABLE[j - 1] + TABLE[j])) & (TABLE[j] - TABLE[j - 1]);
    value = __builtin_convertvector(sum, Eight);
}

// The scales of eight parts of 32 values; trial t takes (TABLE[0] + t) / largest as the inverse scale.
inline void fit_to_table(const Eight* x, const Eight* weight, Eight& scale) {
    const Eight zero = {};
    Eight largest, signed_largest, value;
    largest_of<BLOCK>(x, largest, signed_largest);
    const EightInts is_zero = largest < 1e-15f;
    Eight best = zero;
    for (int trial = -8; trial <= 7; ++trial) {  // -8: the plain scale, the first to be tried
        const bool is_first = trial == -8;
        const Eight inverse = is_first ? 1.0f / (-signed_largest / static_cast<float>(TABLE[0]))
                                       : static_cast<float>(trial + TABLE[0]) / signed_largest;
        Eight sum_qx = zero, sum_q2 = zero;
        for (int i = 0; i < BLOCK; ++i) {
            nearest_value(inverse * x[i], value);
            sum_qx += weight[i] * value * x[i];
            sum_q2 += weight[i] * value * value;
        }
        Eight new_scale = sum_qx / sum_q2;
        EightInts is_better = (sum_q2 > zero) & (sum_qx * sum_qx > best * sum_q2);
        if (is_first) {
            new_scale = sum_q2 > zero ? new_scale : zero;
            is_better = zero == zero;
        }
        scale = is_better ? new_scale : scale;
        best = is_better ? new_scale * sum_qx : best;
    }
    scale = is_zero ? zero : scale;
}

// The weights of errors: by importances (null: none), or x^2.
inline void weigh_parts(const Eight* x, const float* importance, const float* mean_square,
                        Eight* weight) {
    if (!importance) return squares<BLOCK>(x, weight);
    Eight importances[BLOCK];
    parts_of<BLOCK>(importance, importances);
    for (int i = 0; i < BLOCK; ++i)
        for (int p = 0; p < 8; ++p)
            weight[i][p] = importances[i][p] * __builtin_sqrtf(mean_square[p] + x[i][p] * x[i][p]);
}

inline void inverses(const Eight& scale, Eight& inverse) {
    const Eight zero = {};
    inverse = scale != zero ? 1.0f / scale : zero;
}

// Eight blocks.
struct ToIQ4_NL {
    static constexpr int32_t KIND = KIND_IQ4_NL;
    static constexpr int64_t BLOCK_VALUES = 32, VALUES = 8 * 32, BYTES = 8 * 18;
    static inline void pack(const float* x, uint8_t* p) { search(x, nullptr, p); }

    struct Weighted {
        static constexpr int64_t VALUES = ToIQ4_NL::VALUES, BYTES = ToIQ4_NL::BYTES;
        static constexpr bool READS_ROW = false;
        static inline void pack(const float* x, const float* importance, float, uint8_t* p) {
            search(x, importance, p);
        }
    };

  private:
    static __attribute__((noinline)) void search(const float* x, const float* importance, uint8_t* p) {
        Eight parts[BLOCK], weight[BLOCK], scale, inverse;
        EightInts quant[BLOCK];
        float mean_square[8], scales[8];
        for (int b = 0; b < 8; ++b) mean_square[b] = sum_of_squares(x + BLOCK * b, BLOCK) * (2.0f / 32);
        parts_of<BLOCK>(x, parts);
        weigh_parts(parts, importance, mean_square, weight);
        fit_to_table(parts, weight, scale);
        inverses(scale, inverse);
        for (int i = 0; i < BLOCK; ++i) place_of(inverse * parts[i], quant[i]);
        for (int b = 0; b < 8; ++b) scales[b] = scale[b];
        write_eight<4>(scales, nullptr, quant, p);
    }
};

struct ToIQ4_XS {
    static constexpr int32_t KIND = KIND_IQ4_XS;
    static constexpr int64_t BLOCK_VALUES = 256, VALUES = 256, BYTES = 136;
    static inline void pack(const float* x, uint8_t* p) { search(x, nullptr, p); }

    struct Weighted {
        static constexpr int64_t VALUES = ToIQ4_XS::VALUES, BYTES = ToIQ4_XS::BYTES;
        static constexpr bool READS_ROW = false;
        static inline void pack(const float* x, const float* importance, float, uint8_t* p) {
            search(x, importance, p);
        }
    };

  private:
    static __attribute__((noinline)) void search(const float* x, const float* importance, uint8_t* p) {
        Eight parts[BLOCK], weight[BLOCK], scale, inverse;
        const float whole = sum_of_squares(x, VALUES) * (2.0f / 256);
        const float mean_square[8] = {whole, whole, whole, whole, whole, whole, whole, whole};
        parts_of<BLOCK>(x, parts);
        weigh_parts(parts, importance, mean_square, weight);
        fit_to_table(parts, weight, scale);
        float largest = 0, signed_largest = 0;
        for (int b = 0; b < 8; ++b)
            if (__builtin_fabsf(scale[b]) > largest)
                largest = __builtin_fabsf(scale[b]), signed_largest = scale[b];
        const float d = -signed_largest / 32.0f, inverse_d = d != 0 ? 1.0f / d : 0.0f;
        uint32_t high = 0;
        __builtin_memset(p + 4, 0, 4);
        for (int b = 0; b < 8; ++b) {
            const int32_t number = between(nearest(inverse_d * scale[b]), -32, 31);
            scale[b] = d * static_cast<float>(number);
            p[4 + b / 2] = static_cast<uint8_t>(p[4 + b / 2] | ((number + 32) & 15) << 4 * (b % 2));
            high |= static_cast<uint32_t>((number + 32) >> 4) << 2 * b;
        }
        write_scale(d, p);
        p[2] = static_cast<uint8_t>(high), p[3] = static_cast<uint8_t>(high >> 8);
        inverses(scale, inverse);
        EightInts quant[BLOCK];
        for (int i = 0; i < BLOCK; ++i) place_of(inverse * parts[i], quant[i]);
        for (int b = 0; b < 8; ++b)
            for (int i = 0; i < 16; ++i)
                p[8 + 16 * b + i] = static_cast<uint8_t>(quant[i][b] | quant[i + 16][b] << 4);
    }
};

struct ToMXFP4 {
    static constexpr int32_t KIND = KIND_MXFP4;
    static constexpr int64_t BLOCK_VALUES = 32, VALUES = 32, BYTES = 17;
    using Weighted = ToMXFP4;
    // Of two values as near, the smaller magnitude. ggml's exponent wraps around below 2^-125; here it
    // stays 0.
    static inline void pack(const float* x, uint8_t* p) {
        constexpr float HALFWAY[7] = {0.5f, 1.5f, 2.5f, 3.5f, 5, 7, 10};
        const float largest = float_of(static_cast<uint32_t>(block_largest(x)));
        const int32_t exponent =
            largest > 0 ? static_cast<int32_t>(__builtin_floorf(__builtin_log2f(largest))) + 125 : 0;
        const uint32_t e = exponent > 0 ? static_cast<uint32_t>(exponent) : 0;
        const float scale = float_of(e > 1 ? (e - 1) << 23 : 0x00200000u << e);
        int32_t q[BLOCK];
        for (int i = 0; i < BLOCK; ++i) {
            const float size = float_of(magnitude(x[i]));
            int32_t place = 0;
            for (float middle : HALFWAY) place += size > middle * scale;
            q[i] = place && x[i] < 0 ? place + 8 : place;
        }
        p[0] = static_cast<uint8_t>(e);
        write_quants<4>(q, p + 1);
    }
};
