// Blocks of 32 values with one scale, of 8 bits, or of 4 or 5 with or without a minimum. Included inside the
// anonymous namespace of each encode_<level>.cpp, by encode_template.h. `Weighted` searches the scales of
// eight blocks at a time by importances, as the _impl functions of ggml-quants.c do.

inline int32_t block_largest(const float* x) {  // as a signed number, which SSE2 compares faster
    int32_t largest = 0;
    for (int i = 0; i < BLOCK; ++i) {
        int32_t m = static_cast<int32_t>(magnitude(x[i]));
        largest = m > largest ? m : largest;
    }
    return largest;
}

// 1 / scale, or 0 if that is infinite: gguf then writes zeros too, by casting infinity and NaN.
inline float inverse_of(float scale) { return magnitude(scale) < 0x00200001 ? 0.0f : 1.0f / scale; }

// A scale whose inverse is infinite.
inline bool is_flushed(float scale) { return magnitude(scale) != 0 && magnitude(scale) < 0x00200001; }

// The quants of a block of 4 or 5 bits, from 0 to 15 or 31, after its f16 numbers.
template <int BITS>
inline void write_quants(const int32_t* q, uint8_t* p) {
    if (BITS == 5) {
        uint32_t fifth = 0;
        for (int i = 0; i < BLOCK; ++i) fifth |= static_cast<uint32_t>(q[i] >> 4 & 1) << i;
        __builtin_memcpy(p, &fifth, 4);
        p += 4;
    }
    uint8_t nibbles[BLOCK / 2];
    for (int i = 0; i < BLOCK / 2; ++i)
        nibbles[i] = static_cast<uint8_t>((q[i] & 15) | (q[i + BLOCK / 2] & 15) << 4);
    __builtin_memcpy(p, nibbles, sizeof nibbles);
}

// Eight blocks whose scales were searched: `minimum` is null for blocks without one.
template <int BITS>
inline void write_eight(const float* scale, const float* minimum, const EightInts* quant, uint8_t* p) {
    for (int b = 0; b < 8; ++b) {
        int32_t q[BLOCK];
        for (int i = 0; i < BLOCK; ++i) q[i] = quant[i][b];
        write_scale(scale[b], p);
        p += 2;
        if (minimum) write_scale(-minimum[b], p), p += 2;
        write_quants<BITS>(q, p);
        p += BITS == 5 ? 20 : 16;
    }
}

struct ToQ8_0 {
    static constexpr int32_t KIND = KIND_Q8_0;
    static constexpr int64_t BLOCK_VALUES = 32, VALUES = 32, BYTES = 34;
    using Weighted = ToQ8_0;
    static inline void pack(const float* x, uint8_t* p) {
        const float scale = float_of(block_largest(x)) / 127.0f, inverse = inverse_of(scale);
        int8_t q[BLOCK];
        for (int i = 0; i < BLOCK; ++i) {
            float scaled = x[i] * inverse;
            // Just below one half, with the sign of x: with 0.5, 0.49999997 would become 1.
            float half = float_of(0x3EFFFFFF | (bits_of(scaled) & 0x80000000));
            q[i] = static_cast<int8_t>(static_cast<int32_t>(scaled + half));
        }
        write_scale(scale, p);
        __builtin_memcpy(p + 2, q, sizeof q);
    }
};

// value = scale * (quant - MOST)
template <int32_t NUMBER, int BITS>
struct AroundZero {
    static constexpr int32_t KIND = NUMBER;
    static constexpr int MOST = 1 << (BITS - 1);
    static constexpr int64_t BLOCK_VALUES = 32, VALUES = 32, BYTES = 2 + 4 * BITS;
    static inline void pack(const float* x, uint8_t* p) {
        const int32_t largest = block_largest(x);
        int32_t first = BLOCK;  // the first of those with the largest magnitude gives the sign
        for (int i = 0; i < BLOCK; ++i) {
            int32_t here = static_cast<int32_t>(magnitude(x[i])) == largest ? i : BLOCK;
            first = here < first ? here : first;
        }
        const float scale = x[first] / -static_cast<float>(MOST), inverse = inverse_of(scale);
        // gguf writes quants of 0 where a scale is flushed, and the middle for a scale of 0.
        const float offset = is_flushed(scale) ? 0.0f : static_cast<float>(MOST) + 0.5f;
        int32_t q[BLOCK];
        for (int i = 0; i < BLOCK; ++i) {
            int32_t cut = static_cast<int32_t>(x[i] * inverse + offset);
            q[i] = cut < 2 * MOST - 1 ? cut : 2 * MOST - 1;
        }
        write_scale(scale, p);
        write_quants<BITS>(q, p + 2);
    }

    struct Weighted {
        static constexpr int64_t VALUES = 8 * 32, BYTES = 8 * AroundZero::BYTES;
        static constexpr bool READS_ROW = true;
        static __attribute__((noinline)) void pack(const float* x, const float* importance,
                                                   float mean_square, uint8_t* p) {
            Eight parts[BLOCK], importances[BLOCK], weight[BLOCK];
            EightInts quant[BLOCK];
            float scale[8];
            parts_of<BLOCK>(x, parts);
            parts_of<BLOCK>(importance, importances);
            weigh<BLOCK>(parts, importances, mean_square, weight);
            fit_around_zero<BLOCK, MOST>(parts, weight, scale, quant);
            write_eight<BITS>(scale, nullptr, quant, p);
        }
    };
};
using ToQ4_0 = AroundZero<KIND_Q4_0, 4>;
using ToQ5_0 = AroundZero<KIND_Q5_0, 5>;

// The least value of a block, of zeros the first, and the largest.
inline void range_of(const float* x, float& least, float& most) {
    Eight low, high, here;
    __builtin_memcpy(&low, x, sizeof low);
    high = low;
    for (int i = 8; i < BLOCK; i += 8) {
        __builtin_memcpy(&here, x + i, sizeof here);
        low = here < low ? here : low;
        high = here > high ? here : high;
    }
    least = low[0], most = high[0];
    for (int p = 1; p < 8; ++p) {
        least = low[p] < least ? low[p] : least;
        most = high[p] > most ? high[p] : most;
    }
    for (int i = BLOCK - 1; least == 0 && i >= 0; --i)
        if (x[i] == 0) least = x[i];
}

// value = scale * quant + minimum
template <int32_t NUMBER, int BITS>
struct WithMinimum {
    static constexpr int32_t KIND = NUMBER;
    static constexpr int MOST = (1 << BITS) - 1;
    static constexpr int64_t BLOCK_VALUES = 32, VALUES = 32, BYTES = 4 + 4 * BITS;
    static inline void pack(const float* x, uint8_t* p) {
        float least, most;
        range_of(x, least, most);
        const float scale = (most - least) / static_cast<float>(MOST), inverse = inverse_of(scale);
        const float offset = is_flushed(scale) ? 0.0f : 0.5f;
        int32_t q[BLOCK];
        for (int i = 0; i < BLOCK; ++i) {
            int32_t cut = static_cast<int32_t>((x[i] - least) * inverse + offset);
            q[i] = cut < MOST ? cut : MOST;
        }
        write_scale(scale, p);
        write_scale(least, p + 2);
        write_quants<BITS>(q, p + 4);
    }

    struct Weighted {
        static constexpr int64_t VALUES = 8 * 32, BYTES = 8 * WithMinimum::BYTES;
        static constexpr bool READS_ROW = true;
        static __attribute__((noinline)) void pack(const float* x, const float* importance,
                                                   float mean_square, uint8_t* p) {
            Eight parts[BLOCK], importances[BLOCK], weight[BLOCK];
            Fit fit;
            parts_of<BLOCK>(x, parts);
            parts_of<BLOCK>(importance, importances);
            weigh<BLOCK>(parts, importances, mean_square, weight);
            fit_with_minimum<BLOCK, MOST, false, true>(parts, weight, {-0.9f, 0.05f, 36}, fit);
            write_eight<BITS>(fit.scale, fit.minimum, fit.quant, p);
        }
    };
};
using ToQ4_1 = WithMinimum<KIND_Q4_1, 4>;
using ToQ5_1 = WithMinimum<KIND_Q5_1, 5>;
