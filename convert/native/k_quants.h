// q2_K, q3_K, q4_K, q5_K and q6_K, as in quantize_row_q2_K_ref and its like of ggml-quants.c in
// ggml-org/llama.cpp and, with importances, quantize_row_q2_K_impl and its like, to the byte. Included
// inside the anonymous namespace of each encode_<level>.cpp, by encode_template.h.
//
// Layouts of q4_K, q5_K and q6_K: runtime/kernels/cpu/k_formats.h.
// q2_K   16 bytes, each with a scale s (low nibble) and a minimum t of 16 values, 64 bytes of quants q
//        (byte i of each half: values i, i + 32, i + 64, i + 96), f16 d, f16 m; value = d*s*q - m*t
// q3_K   32 bytes of third bits (byte i, bit j: value 32 * j + i), 64 bytes of quants as q2_K's, 12 bytes
//        of 16 scales s (low nibbles, then high ones, of 8 bytes; two high bits each in 4), f16 d;
//        value = d * (s - 32) * (q - 4)

constexpr int SUPER_BLOCK = 256;
constexpr int GROUP = 16;  // values per scale of q2_K, q3_K and q6_K

// ---- q4_K and q5_K ----------------------------------------------------------------------------

struct Numbers {
    float d, m;
    uint8_t scale[8], minimum[8];
};

// By the largest scale and the largest minimum.
inline void round_numbers(const Fit& fit, Numbers& numbers) {
    float most_scale = 0, most_minimum = 0;
    for (int part = 0; part < 8; ++part) {
        if (fit.scale[part] > most_scale) most_scale = fit.scale[part];
        if (fit.minimum[part] > most_minimum) most_minimum = fit.minimum[part];
    }
    numbers.d = most_scale / 63.0f, numbers.m = most_minimum / 63.0f;
    const float inverse_d = most_scale > 0 ? 63.0f / most_scale : 0.0f;
    const float inverse_m = most_minimum > 0 ? 63.0f / most_minimum : 0.0f;
    for (int part = 0; part < 8; ++part) {
        const uint8_t s = static_cast<uint8_t>(nearest(inverse_d * fit.scale[part]));
        const uint8_t t = static_cast<uint8_t>(nearest(inverse_m * fit.minimum[part]));
        numbers.scale[part] = s < 63 ? s : 63, numbers.minimum[part] = t < 63 ? t : 63;
    }
}

// Writes d, m and the 6-bit numbers to the 16 bytes at p, and the quants for these to `fit`.
template <int MOST>
inline void write_numbers(const Eight* x, const Numbers& of, Fit& fit, uint8_t* p) {
    const float d = write_half(of.d, p), m = write_half(of.m, p + 2);
    uint8_t* numbers = p + 4;
    for (int part = 0; part < 8; ++part) {
        const uint8_t scale = of.scale[part], minimum = of.minimum[part];
        if (part < 4) {
            numbers[part] = scale, numbers[part + 4] = minimum;
        } else {
            numbers[part + 4] = static_cast<uint8_t>((scale & 15) | (minimum & 15) << 4);
            numbers[part - 4] = static_cast<uint8_t>(numbers[part - 4] | scale >> 4 << 6);
            numbers[part] = static_cast<uint8_t>(numbers[part] | minimum >> 4 << 6);
        }
        const float factor = d * static_cast<float>(scale);
        if (factor == 0.0f) continue;
        const float taken_off = m * static_cast<float>(minimum);
        for (int i = 0; i < BLOCK; ++i)
            fit.quant[i][part] = between(nearest((x[i][part] + taken_off) / factor), 0, MOST);
    }
}

inline void write_nibbles(const EightInts* quant, uint8_t* p) {
    for (int pair = 0; pair < 4; ++pair)
        for (int i = 0; i < BLOCK; ++i)
            p[pair * BLOCK + i] =
                static_cast<uint8_t>((quant[i][2 * pair] & 15) | (quant[i][2 * pair + 1] & 15) << 4);
}

template <int32_t NUMBER, int BITS>
struct EightParts {
    static constexpr int32_t KIND = NUMBER;
    static constexpr int MOST = (1 << BITS) - 1;
    static constexpr int64_t BLOCK_VALUES = 256, VALUES = 256, BYTES = 16 + 32 * BITS;

    static __attribute__((noinline)) void pack(const float* x, uint8_t* p) {
        constexpr Trials TRIALS = BITS == 4 ? Trials{-1.0f, 0.1f, 20} : Trials{-0.5f, 0.1f, 15};
        Eight parts[BLOCK], sum = {}, average, weight[BLOCK];
        parts_of<BLOCK>(x, parts);
        for (int i = 0; i < BLOCK; ++i) sum += parts[i] * parts[i];
        sum /= 32.0f;
        for (int part = 0; part < 8; ++part) average[part] = __builtin_sqrtf(sum[part]);
        for (int i = 0; i < BLOCK; ++i) {
            magnitudes(parts[i], weight[i]);
            weight[i] = average + weight[i];
        }
        Fit fit;
        fit_with_minimum<BLOCK, MOST, false, false>(parts, weight, TRIALS, fit);
        Numbers numbers;
        round_numbers(fit, numbers);
        write(parts, numbers, fit, p);
    }

    struct Weighted {
        static constexpr int64_t VALUES = EightParts::VALUES, BYTES = EightParts::BYTES;
        static constexpr bool READS_ROW = false;
        static __attribute__((noinline)) void pack(const float* x, const float* importance, float,
                                                   uint8_t* p) {
            Eight parts[BLOCK], importances[BLOCK], weight[BLOCK];
            float sums[8];
            parts_of<BLOCK>(x, parts);
            parts_of<BLOCK>(importance, importances);
            weigh<BLOCK>(parts, importances, 2 * sum_of_squares(x, SUPER_BLOCK) / SUPER_BLOCK, weight);
            add_up<BLOCK>(weight, sums);
            Fit fit;
            fit_with_minimum<BLOCK, MOST, false, true>(parts, weight, {-0.9f, 0.05f, 36}, fit);
            Numbers numbers;
            numbers.d = fit_positive<8, 63>(fit.scale, sums, numbers.scale);
            numbers.m = fit_positive<8, 63>(fit.minimum, sums, numbers.minimum);
            write(parts, numbers, fit, p);
        }
    };

  private:
    static inline void write(const Eight* parts, const Numbers& numbers, Fit& fit, uint8_t* p) {
        write_numbers<MOST>(parts, numbers, fit, p);
        p += 16;
        if (BITS == 5) {
            for (int i = 0; i < BLOCK; ++i) {
                int32_t fifth = 0;
                for (int part = 0; part < 8; ++part) fifth |= fit.quant[i][part] >> 4 << part;
                p[i] = static_cast<uint8_t>(fifth);
            }
            p += 32;
        }
        write_nibbles(fit.quant, p);
    }
};
using ToQ4K = EightParts<KIND_Q4_K, 4>;
using ToQ5K = EightParts<KIND_Q5_K, 5>;

// ---- groups of 16 values --------------------------------------------------------------------------

// The quants of eight groups in the order of the values.
inline void put_groups(const EightInts* quant, uint8_t* quants) {
    for (int i = 0; i < GROUP; ++i)
        for (int g = 0; g < 8; ++g) quants[g * GROUP + i] = static_cast<uint8_t>(quant[i][g]);
}

// The importances of eight groups, times sqrt(mean square + x^2), and their sums.
inline void weigh_groups(const Eight* x, const float* importance, float mean_square, Eight* weight,
                         float* sums) {
    Eight importances[GROUP];
    parts_of<GROUP>(importance, importances);
    weigh<GROUP>(x, importances, mean_square, weight);
    add_up<GROUP>(weight, sums);
}

// The lower two bits of the quants, four values a byte.
inline void write_pairs_of_bits(const uint8_t* quants, uint8_t* p) {
    for (int half = 0; half < 2; ++half)
        for (int i = 0; i < 32; ++i) {
            const uint8_t* q = quants + 128 * half + i;
            p[32 * half + i] = static_cast<uint8_t>((q[0] & 3) | (q[32] & 3) << 2 | (q[64] & 3) << 4 |
                                                    (q[96] & 3) << 6);
        }
}

struct ToQ2K {
    static constexpr int32_t KIND = KIND_Q2_K;
    static constexpr int64_t BLOCK_VALUES = 256, VALUES = 256, BYTES = 84;

    static __attribute__((noinline)) void pack(const float* x, uint8_t* p) {
        float scales[16], minima[16];
        uint8_t quants[SUPER_BLOCK], numbers[16];
        for (int half = 0; half < 2; ++half) {
            Eight groups[GROUP], weight[GROUP];
            parts_of<GROUP>(x + 128 * half, groups);
            for (int i = 0; i < GROUP; ++i) magnitudes(groups[i], weight[i]);
            Fit fit;
            fit_with_minimum<GROUP, 3, true, false>(groups, weight, {-0.5f, 0.1f, 15}, fit);
            put(fit, half, scales, minima, quants);
        }
        __builtin_memset(numbers, 0, sizeof numbers);
        const float d = round_to_nibbles(scales, 0, numbers), m = round_to_nibbles(minima, 4, numbers);
        write(x, numbers, d, m, quants, p);
    }

    struct Weighted {
        static constexpr int64_t VALUES = 256, BYTES = 84;
        static constexpr bool READS_ROW = false;
        static __attribute__((noinline)) void pack(const float* x, const float* importance, float,
                                                   uint8_t* p) {
            float scales[16], minima[16], sums[16];
            uint8_t quants[SUPER_BLOCK], numbers[16], minimum_numbers[16];
            const float mean_square = sum_of_squares(x, SUPER_BLOCK) / SUPER_BLOCK;
            for (int half = 0; half < 2; ++half) {
                Eight groups[GROUP], weight[GROUP];
                parts_of<GROUP>(x + 128 * half, groups);
                weigh_groups(groups, importance + 128 * half, mean_square, weight, sums + 8 * half);
                Fit fit;
                fit_with_minimum<GROUP, 3, false, true>(groups, weight, {-0.9f, 0.05f, 36}, fit);
                put(fit, half, scales, minima, quants);
            }
            const float d = fit_positive<16, 15>(scales, sums, numbers);
            const float m = fit_positive<16, 15>(minima, sums, minimum_numbers);
            for (int g = 0; g < 16; ++g)
                numbers[g] = static_cast<uint8_t>(numbers[g] | minimum_numbers[g] << 4);
            write(x, numbers, d, m, quants, p);
        }
    };

  private:
    static inline void put(const Fit& fit, int half, float* scales, float* minima, uint8_t* quants) {
        __builtin_memcpy(scales + 8 * half, fit.scale, sizeof fit.scale);
        __builtin_memcpy(minima + 8 * half, fit.minimum, sizeof fit.minimum);
        put_groups(fit.quant, quants + 128 * half);
    }

    // Ors the numbers 0 .. 15 into the bytes, `shift` bits up; returns their unit.
    static inline float round_to_nibbles(const float* values, int shift, uint8_t* numbers) {
        float most = 0;
        for (int g = 0; g < 16; ++g) most = values[g] > most ? values[g] : most;
        if (!(most > 0)) return 0.0f;
        const float inverse = 15.0f / most;
        for (int g = 0; g < 16; ++g)
            numbers[g] = static_cast<uint8_t>(numbers[g] | nearest(inverse * values[g]) << shift);
        return most / 15.0f;
    }

    static inline void write(const float* x, const uint8_t* numbers, float d, float m, uint8_t* quants,
                             uint8_t* p) {
        d = write_half(d, p + 80), m = write_half(m, p + 82);
        __builtin_memcpy(p, numbers, 16);
        for (int g = 0; g < 16; ++g) {
            const float factor = d * static_cast<float>(numbers[g] & 15);
            if (factor == 0.0f) continue;
            const float taken_off = m * static_cast<float>(numbers[g] >> 4);
            for (int i = GROUP * g; i < GROUP * (g + 1); ++i)
                quants[i] = static_cast<uint8_t>(between(nearest((x[i] + taken_off) / factor), 0, 3));
        }
        write_pairs_of_bits(quants, p + 16);
    }
};

// Rounds values to d * number again, where a group's number is not zero.
template <int MOST>
inline void requantise(const float* x, float d, const int32_t* numbers, uint8_t* quants) {
    for (int g = 0; g < 16; ++g) {
        const float factor = d * static_cast<float>(numbers[g]);
        if (factor == 0.0f) continue;
        for (int i = GROUP * g; i < GROUP * (g + 1); ++i)
            quants[i] = static_cast<uint8_t>(between(nearest(x[i] / factor), -MOST, MOST - 1) + MOST);
    }
}

// The scale of largest magnitude, with its sign; 0 if all are.
inline float largest_scale(const float* scales) {
    float largest = 0, signed_largest = 0;
    for (int g = 0; g < 16; ++g)
        if (__builtin_fabsf(scales[g]) > largest)
            largest = __builtin_fabsf(scales[g]), signed_largest = scales[g];
    return signed_largest;
}

struct ToQ3K {
    static constexpr int32_t KIND = KIND_Q3_K;
    static constexpr int64_t BLOCK_VALUES = 256, VALUES = 256, BYTES = 110;

    static __attribute__((noinline)) void pack(const float* x, uint8_t* p) {
        float scales[16];
        uint8_t quants[SUPER_BLOCK];
        for (int half = 0; half < 2; ++half) {
            Eight groups[GROUP];
            EightInts quant[GROUP];
            parts_of<GROUP>(x + 128 * half, groups);
            fit_by_descent<GROUP, 4>(groups, scales + 8 * half, quant);
            put_groups(quant, quants + 128 * half);
        }
        // Without a scale, ggml leaves the bits of all numbers at zero.
        int32_t numbers[16];
        const float largest = largest_scale(scales), inverse = largest != 0 ? -32.0f / largest : 0.0f;
        for (int g = 0; g < 16; ++g)
            numbers[g] = largest != 0 ? between(nearest(inverse * scales[g]), -32, 31) : -32;
        write(x, numbers, largest != 0 ? 1.0f / inverse : 0.0f, quants, p);
    }

    struct Weighted {
        static constexpr int64_t VALUES = 256, BYTES = 110;
        static constexpr bool READS_ROW = false;
        static __attribute__((noinline)) void pack(const float* x, const float* importance, float,
                                                   uint8_t* p) {
            float scales[16], sums[16], unit[8];
            uint8_t quants[SUPER_BLOCK];
            const float mean_square = 2 * sum_of_squares(x, SUPER_BLOCK) / SUPER_BLOCK;
            for (int half = 0; half < 2; ++half) {
                Eight groups[GROUP], weight[GROUP];
                EightInts quant[GROUP];
                parts_of<GROUP>(x + 128 * half, groups);
                weigh_groups(groups, importance + 128 * half, mean_square, weight, sums + 8 * half);
                fit_around_zero<GROUP, 4>(groups, weight, scales + 8 * half, quant);
                put_groups(quant, quants + 128 * half);
            }
            Eight lanes[16], weight[16];  // all lanes are the same
            EightInts quant[16];
            for (int g = 0; g < 16; ++g) lanes[g] = Eight{} + scales[g], weight[g] = Eight{} + sums[g];
            fit_around_zero<16, 32>(lanes, weight, unit, quant);
            int32_t numbers[16];
            for (int g = 0; g < 16; ++g) numbers[g] = quant[g][0] - 32;
            write(x, numbers, unit[0], quants, p);
        }
    };

  private:
    static inline void write(const float* x, const int32_t* numbers, float d, uint8_t* quants,
                             uint8_t* p) {
        __builtin_memset(p, 0, 32);
        __builtin_memset(p + 96, 0, 12);
        for (int g = 0; g < 16; ++g) {
            const int32_t number = numbers[g] + 32;
            p[96 + g % 8] = static_cast<uint8_t>(p[96 + g % 8] | (number & 15) << 4 * (g / 8));
            p[104 + g % 4] = static_cast<uint8_t>(p[104 + g % 4] | number >> 4 << 2 * (g / 4));
        }
        requantise<4>(x, write_half(d, p + 108), numbers, quants);
        for (int i = 0; i < SUPER_BLOCK; ++i)
            p[i % 32] = static_cast<uint8_t>(p[i % 32] | quants[i] >> 2 << i / 32);
        write_pairs_of_bits(quants, p + 32);
    }
};

struct ToQ6K {
    static constexpr int32_t KIND = KIND_Q6_K;
    static constexpr int64_t BLOCK_VALUES = 256, VALUES = 256, BYTES = 210;
    static inline void pack(const float* x, uint8_t* p) { search(x, nullptr, p); }

    struct Weighted {
        static constexpr int64_t VALUES = 256, BYTES = 210;
        static constexpr bool READS_ROW = false;
        static inline void pack(const float* x, const float* importance, float, uint8_t* p) {
            search(x, importance, p);
        }
    };

  private:
    // Errors are weighed by the importances alone or, without any, by x^2.
    static __attribute__((noinline)) void search(const float* x, const float* importance, uint8_t* p) {
        float scales[16];
        uint8_t quants[SUPER_BLOCK];
        for (int half = 0; half < 2; ++half) {
            Eight groups[GROUP], weight[GROUP];
            EightInts quant[GROUP];
            parts_of<GROUP>(x + 128 * half, groups);
            if (importance)
                parts_of<GROUP>(importance + 128 * half, weight);
            else
                squares<GROUP>(groups, weight);
            fit_around_zero<GROUP, 32>(groups, weight, scales + 8 * half, quant);
            put_groups(quant, quants + 128 * half);
        }
        const float largest = largest_scale(scales);
        if (__builtin_fabsf(largest) < 1e-15f) {
            __builtin_memset(p, 0, BYTES);
            return;
        }
        const float inverse = -128.0f / largest, d = write_half(1.0f / inverse, p + 208);
        int32_t numbers[16];
        for (int g = 0; g < 16; ++g) {
            const int32_t number = nearest(inverse * scales[g]);
            numbers[g] = static_cast<int8_t>(number < 127 ? number : 127);
            p[192 + g] = static_cast<uint8_t>(numbers[g]);
        }
        requantise<32>(x, d, numbers, quants);
        write_quants(quants, p);
    }

    static inline void write_quants(const uint8_t* quants, uint8_t* p) {
        for (int half = 0; half < 2; ++half) {
            const uint8_t* q = quants + 128 * half;
            uint8_t *nibbles = p + 64 * half, *upper = p + 128 + 32 * half;
            for (int i = 0; i < 64; ++i)
                nibbles[i] = static_cast<uint8_t>((q[i] & 15) | (q[i + 64] & 15) << 4);
            for (int i = 0; i < 32; ++i)
                upper[i] = static_cast<uint8_t>(q[i] >> 4 | q[i + 32] >> 4 << 2 | q[i + 64] >> 4 << 4 |
                                                q[i + 96] >> 4 << 6);
        }
    }
};
