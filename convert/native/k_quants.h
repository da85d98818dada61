// q4_K, q5_K and q6_K, as in quantize_row_q4_K_ref, _q5_K_ref and _q6_K_ref of ggml-quants.c in
// ggml-org/llama.cpp, to the byte: the same sums in the same order. Included inside the anonymous
// namespace of each encode_<level>.cpp, by encode_template.h.
//
// Eight parts of a block are fitted in parallel, one per lane; lanes never interact. Layouts:
// runtime/kernels/cpu/k_quants_template.h.

constexpr int SUPER_BLOCK = 256;

typedef float Eight __attribute__((vector_size(32)));
typedef int32_t EightInts __attribute__((vector_size(32)));

// Rounds to the nearest integer if the magnitude is below 2^22; otherwise returns what ggml's
// nearest_int does with its assertion off.
inline int32_t nearest(float x) {
    return static_cast<int32_t>(bits_of(x + 12582912.0f) & 0x007fffff) - 0x00400000;
}

inline void nearest_in(const Eight& x, int32_t least, int32_t most, EightInts& out) {
    const Eight shifted = x + 12582912.0f;
    EightInts bits;
    __builtin_memcpy(&bits, &shifted, sizeof bits);
    bits = (bits & 0x007fffff) - 0x00400000;
    const EightInts none = {}, low = none + least, high = none + most;
    bits = bits < low ? low : bits;
    out = bits > high ? high : bits;
}

inline int32_t between(int32_t value, int32_t least, int32_t most) {
    return value < least ? least : value > most ? most : value;
}

inline void magnitudes(const Eight& x, Eight& out) {
    EightInts bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    bits &= 0x7fffffff;
    __builtin_memcpy(&out, &bits, sizeof bits);
}

// Writes an f16 to p; returns the value it reads back as.
inline float write_half(float x, uint8_t* p) {
    write_scale(x, p);
    uint8_t halves[BLOCK * 2] = {};
    __builtin_memcpy(halves, p, 2);
    float back[BLOCK];
    f16_to_floats(halves, back);
    return back[0];
}

// ---- q4_K and q5_K ----------------------------------------------------------------------------

// Fits value = scale * quant - minimum for eight parts; keeps the quants of the best trial, which
// remain if a scale is rounded to zero.
struct Fit {
    float scale[8], minimum[8];
    EightInts quant[BLOCK];
};

// make_qkx2_quants: trial t takes (first + 0.1 t + MOST) / range as the inverse scale, then fits
// scale and minimum by least squares; better trials change the range of later ones.
template <int MOST, int TRIALS>
inline void fit_with_minimum(const Eight* x, float first, Fit& fit) {
    Eight squares = {}, average, weight[BLOCK];
    for (int i = 0; i < BLOCK; ++i) squares += x[i] * x[i];
    squares /= 32.0f;
    for (int p = 0; p < 8; ++p) average[p] = __builtin_sqrtf(squares[p]);
    for (int i = 0; i < BLOCK; ++i) {
        magnitudes(x[i], weight[i]);
        weight[i] = average + weight[i];
    }
    Eight least = x[0], most = x[0], sum_w = weight[0], sum_x = sum_w * x[0];
    for (int i = 1; i < BLOCK; ++i) {
        least = x[i] < least ? x[i] : least;
        most = x[i] > most ? x[i] : most;
        sum_w += weight[i];
        sum_x += weight[i] * x[i];
    }
    const Eight zero = {};
    least = least > zero ? zero : least;
    const EightInts is_flat = most == least;
    Eight inverse = static_cast<float>(MOST) / (most - least), scale = 1.0f / inverse;
    Eight best_error = zero, best_inverse = inverse, best_least = least;
    EightInts quant;
    for (int i = 0; i < BLOCK; ++i) {
        nearest_in(inverse * (x[i] - least), 0, MOST, quant);
        const Eight off = scale * __builtin_convertvector(quant, Eight) + least - x[i];
        best_error += weight[i] * (off * off);
    }
    for (int trial = 0; trial <= TRIALS; ++trial) {
        inverse =
            (first + 0.1f * static_cast<float>(trial) + static_cast<float>(MOST)) / (most - least);
        Eight sum_l = zero, sum_l2 = zero, sum_xl = zero, quants[BLOCK];
        for (int i = 0; i < BLOCK; ++i) {
            nearest_in(inverse * (x[i] - least), 0, MOST, quant);
            quants[i] = __builtin_convertvector(quant, Eight);
            const Eight weighted = weight[i] * quants[i];
            sum_l += weighted;
            sum_l2 += weighted * quants[i];
            sum_xl += weighted * x[i];
        }
        const Eight determinant = sum_w * sum_l2 - sum_l * sum_l;
        Eight new_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant;
        Eight new_least = (sum_l2 * sum_x - sum_l * sum_xl) / determinant;
        new_scale = new_least > zero ? sum_xl / sum_l2 : new_scale;
        new_least = new_least > zero ? zero : new_least;
        Eight error = zero;
        for (int i = 0; i < BLOCK; ++i) {
            const Eight off = new_scale * quants[i] + new_least - x[i];
            error += weight[i] * (off * off);
        }
        const EightInts is_better = (determinant > zero) & (error < best_error);
        best_inverse = is_better ? inverse : best_inverse;
        best_least = is_better ? least : best_least;
        best_error = is_better ? error : best_error;
        scale = is_better ? new_scale : scale;
        least = is_better ? new_least : least;
    }
    for (int p = 0; p < 8; ++p) {
        fit.scale[p] = is_flat[p] ? 0.0f : scale[p];
        fit.minimum[p] = -least[p];
    }
    for (int i = 0; i < BLOCK; ++i) {
        nearest_in(best_inverse * (x[i] - best_least), 0, MOST, quant);
        fit.quant[i] = is_flat ? EightInts{} : quant;
    }
}

// Writes d, m and the 6-bit numbers to the 16 bytes at p, and the quants for these to `fit`.
template <int MOST>
inline void write_numbers(const Eight* x, Fit& fit, uint8_t* p) {
    float most_scale = 0, most_minimum = 0;
    for (int part = 0; part < 8; ++part) {
        if (fit.scale[part] > most_scale) most_scale = fit.scale[part];
        if (fit.minimum[part] > most_minimum) most_minimum = fit.minimum[part];
    }
    const float d = write_half(most_scale / 63.0f, p), m = write_half(most_minimum / 63.0f, p + 2);
    const float inverse_d = most_scale > 0 ? 63.0f / most_scale : 0.0f;
    const float inverse_m = most_minimum > 0 ? 63.0f / most_minimum : 0.0f;
    uint8_t* numbers = p + 4;
    for (int part = 0; part < 8; ++part) {
        const uint8_t s = static_cast<uint8_t>(nearest(inverse_d * fit.scale[part]));
        const uint8_t t = static_cast<uint8_t>(nearest(inverse_m * fit.minimum[part]));
        const uint8_t scale = s < 63 ? s : 63, minimum = t < 63 ? t : 63;
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

inline void parts_of(const float* x, Eight* parts) {
    for (int i = 0; i < BLOCK; ++i)
        for (int p = 0; p < 8; ++p) parts[i][p] = x[p * BLOCK + i];
}

inline void write_nibbles(const EightInts* quant, uint8_t* p) {
    for (int pair = 0; pair < 4; ++pair)
        for (int i = 0; i < BLOCK; ++i)
            p[pair * BLOCK + i] =
                static_cast<uint8_t>((quant[i][2 * pair] & 15) | (quant[i][2 * pair + 1] & 15) << 4);
}

struct ToQ4K {
    static constexpr int64_t VALUES = SUPER_BLOCK, BLOCK_BYTES = 144;
    static inline void pack(const float* x, uint8_t* p) {
        Eight parts[BLOCK];
        Fit fit;
        parts_of(x, parts);
        fit_with_minimum<15, 20>(parts, -1.0f, fit);
        write_numbers<15>(parts, fit, p);
        write_nibbles(fit.quant, p + 16);
    }
};

struct ToQ5K {
    static constexpr int64_t VALUES = SUPER_BLOCK, BLOCK_BYTES = 176;
    static inline void pack(const float* x, uint8_t* p) {
        Eight parts[BLOCK];
        Fit fit;
        parts_of(x, parts);
        fit_with_minimum<31, 15>(parts, -0.5f, fit);
        write_numbers<31>(parts, fit, p);
        for (int i = 0; i < BLOCK; ++i) {
            int32_t fifth = 0;
            for (int part = 0; part < 8; ++part) fifth |= fit.quant[i][part] >> 4 << part;
            p[16 + i] = static_cast<uint8_t>(fifth);
        }
        write_nibbles(fit.quant, p + 48);
    }
};

// ---- q6_K -------------------------------------------------------------------------------------

constexpr int GROUP = 16;  // values per scale

// make_qx_quants with rmse_type 1, for eight groups: value = scale * (quant - 32).
inline void fit_around_zero(const Eight* x, float* scales, EightInts* quant) {
    const Eight zero = {};
    Eight largest = zero, signed_largest = zero, here;
    for (int i = 0; i < GROUP; ++i) {
        magnitudes(x[i], here);
        signed_largest = here > largest ? x[i] : signed_largest;
        largest = here > largest ? here : largest;
    }
    const EightInts is_zero = largest < 1e-15f;
    Eight scale = zero, best = zero, best_inverse = zero;
    for (int trial = -10; trial <= 9; ++trial) {  // -10: the plain inverse, the first to be tried
        if (trial == 0) continue;
        const bool is_first = trial == -10;
        const Eight inverse =
            -(is_first ? 32.0f : 32.0f + 0.1f * static_cast<float>(trial)) / signed_largest;
        Eight sum_lx = zero, sum_l2 = zero;
        EightInts rounded;
        for (int i = 0; i < GROUP; ++i) {
            nearest_in(inverse * x[i], -32, 31, rounded);
            const Eight l = __builtin_convertvector(rounded, Eight), weight = x[i] * x[i];
            sum_lx += weight * x[i] * l;
            sum_l2 += weight * l * l;
        }
        Eight new_scale = sum_lx / sum_l2;
        EightInts is_better = (sum_l2 > zero) & (sum_lx * sum_lx > best * sum_l2);
        if (is_first) {
            new_scale = sum_l2 != zero ? new_scale : zero;
            is_better = zero == zero;
        }
        scale = is_better ? new_scale : scale;
        best = is_better ? new_scale * sum_lx : best;
        best_inverse = is_better ? inverse : best_inverse;
    }
    for (int p = 0; p < 8; ++p) scales[p] = is_zero[p] ? 0.0f : scale[p];
    for (int i = 0; i < GROUP; ++i) {
        EightInts rounded;
        nearest_in(best_inverse * x[i], -32, 31, rounded);
        quant[i] = is_zero ? EightInts{} : rounded + 32;
    }
}

struct ToQ6K {
    static constexpr int64_t VALUES = SUPER_BLOCK, BLOCK_BYTES = 210;

    static inline void pack(const float* x, uint8_t* p) {
        float scales[16];
        uint8_t quants[SUPER_BLOCK];
        for (int half = 0; half < 2; ++half) {
            Eight groups[GROUP];
            EightInts quant[GROUP];
            for (int i = 0; i < GROUP; ++i)
                for (int g = 0; g < 8; ++g) groups[i][g] = x[(8 * half + g) * GROUP + i];
            fit_around_zero(groups, scales + 8 * half, quant);
            for (int i = 0; i < GROUP; ++i)
                for (int g = 0; g < 8; ++g)
                    quants[(8 * half + g) * GROUP + i] = static_cast<uint8_t>(quant[i][g]);
        }
        float largest = 0, signed_largest = 0;
        for (float scale : scales)
            if (__builtin_fabsf(scale) > largest)
                largest = __builtin_fabsf(scale), signed_largest = scale;
        if (largest < 1e-15f) {
            __builtin_memset(p, 0, BLOCK_BYTES);
            return;
        }
        write_numbers(x, scales, signed_largest, quants, p);
        write_quants(quants, p);
    }

  private:
    static inline void write_numbers(const float* x, const float* scales, float largest,
                                     uint8_t* quants, uint8_t* p) {
        const float inverse = -128.0f / largest, d = write_half(1.0f / inverse, p + 208);
        for (int g = 0; g < 16; ++g) {
            const int32_t number = nearest(inverse * scales[g]);
            const int8_t scale = static_cast<int8_t>(number < 127 ? number : 127);
            p[192 + g] = static_cast<uint8_t>(scale);
            const float factor = d * static_cast<float>(scale);
            if (factor == 0.0f) continue;
            for (int i = GROUP * g; i < GROUP * (g + 1); ++i)
                quants[i] = static_cast<uint8_t>(between(nearest(x[i] / factor), -32, 31) + 32);
        }
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
