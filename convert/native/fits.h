// The searches for scales of ggml-quants.c in ggml-org/llama.cpp, to the byte: the same sums in the same
// order. Included inside the anonymous namespace of each encode_<level>.cpp, by encode_template.h.
//
// Eight parts of COUNT values are fitted in parallel, one per lane; lanes never interact.

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

// Part p, value i: parts[i][p] = x[p * COUNT + i].
template <int COUNT>
inline void parts_of(const float* x, Eight* parts) {
    for (int i = 0; i < COUNT; ++i)
        for (int p = 0; p < 8; ++p) parts[i][p] = x[p * COUNT + i];
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

inline float sum_of_squares(const float* x, int64_t count) {
    float sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += x[i] * x[i];
    return sum;
}

// importance * sqrt(mean square + x^2): the weights of errors if there are importances.
template <int COUNT>
inline void weigh(const Eight* x, const Eight* importance, float mean_square, Eight* weight) {
    for (int i = 0; i < COUNT; ++i) {
        const Eight sum = mean_square + x[i] * x[i];
        Eight root;
        for (int p = 0; p < 8; ++p) root[p] = __builtin_sqrtf(sum[p]);
        weight[i] = importance[i] * root;
    }
}

template <int COUNT>
inline void squares(const Eight* x, Eight* weight) {
    for (int i = 0; i < COUNT; ++i) weight[i] = x[i] * x[i];
}

// The sums of the weights of eight parts.
template <int COUNT>
inline void add_up(const Eight* weight, float* sums) {
    Eight sum = {};
    for (int i = 0; i < COUNT; ++i) sum += weight[i];
    for (int p = 0; p < 8; ++p) sums[p] = sum[p];
}

// ---- value = scale * quant - minimum ------------------------------------------------------------

// Trial t takes (first + step * t + MOST) / range as the inverse scale.
struct Trials {
    float first, step;
    int count;
};

// The quants are those of the best trial, which remain if a scale is rounded to zero.
struct Fit {
    float scale[8], minimum[8];
    EightInts quant[BLOCK];
};

// ABSOLUTE: errors count by their magnitude, not their square. BOUNDED: values are clipped before they
// are rounded (make_qkx3_quants), which differs where the range is zero or nearly so.
template <int MOST, bool BOUNDED>
inline void quantise(const Eight& value, EightInts& quant) {
    if (!BOUNDED) return nearest_in(value, 0, MOST, quant);
    const Eight zero = {}, most = zero + static_cast<float>(MOST);
    const Eight clipped = value < most ? value : most;
    nearest_in(value > zero ? clipped : zero, 0, MOST, quant);
}

template <bool ABSOLUTE>
inline void error_of(const Eight& off, Eight& error) {
    if (ABSOLUTE) return magnitudes(off, error);
    error = off * off;
}

// make_qkx2_quants and make_qkx3_quants: each trial fits scale and minimum by least squares; better
// ones change the range of later ones.
template <int COUNT, int MOST, bool ABSOLUTE, bool BOUNDED>
inline void fit_with_minimum(const Eight* x, const Eight* weight, const Trials& trials, Fit& fit) {
    Eight least = x[0], most = x[0], sum_w = weight[0], sum_x = sum_w * x[0];
    for (int i = 1; i < COUNT; ++i) {
        least = x[i] < least ? x[i] : least;
        most = x[i] > most ? x[i] : most;
        sum_w += weight[i];
        sum_x += weight[i] * x[i];
    }
    const Eight zero = {};
    least = least > zero ? zero : least;
    const EightInts is_flat = most == least;
    const Eight first_inverse = static_cast<float>(MOST) / (most - least), first_least = least;
    Eight scale = 1.0f / first_inverse, best_error = zero, inverse = first_inverse, error;
    Eight best_inverse = first_inverse, best_least = least;
    EightInts quant, is_first = {};
    is_first = ~is_first;
    for (int i = 0; i < COUNT; ++i) {
        quantise<MOST, false>(inverse * (x[i] - least), quant);
        error_of<ABSOLUTE>(scale * __builtin_convertvector(quant, Eight) + least - x[i], error);
        best_error += weight[i] * error;
    }
    for (int trial = 0; trial <= trials.count; ++trial) {
        inverse = (trials.first + trials.step * static_cast<float>(trial) + static_cast<float>(MOST)) /
                  (most - least);
        Eight sum_l = zero, sum_l2 = zero, sum_xl = zero, quants[COUNT];
        for (int i = 0; i < COUNT; ++i) {
            quantise<MOST, BOUNDED>(inverse * (x[i] - least), quant);
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
        Eight new_error = zero;
        for (int i = 0; i < COUNT; ++i) {
            error_of<ABSOLUTE>(new_scale * quants[i] + new_least - x[i], error);
            new_error += weight[i] * error;
        }
        const EightInts is_better = (determinant > zero) & (new_error < best_error);
        is_first &= ~is_better;
        best_inverse = is_better ? inverse : best_inverse;
        best_least = is_better ? least : best_least;
        best_error = is_better ? new_error : best_error;
        scale = is_better ? new_scale : scale;
        least = is_better ? new_least : least;
    }
    for (int p = 0; p < 8; ++p) {
        fit.scale[p] = is_flat[p] ? 0.0f : scale[p];
        fit.minimum[p] = -least[p];
    }
    for (int i = 0; i < COUNT; ++i) {
        EightInts first;
        quantise<MOST, false>(first_inverse * (x[i] - first_least), first);
        quantise<MOST, BOUNDED>(best_inverse * (x[i] - best_least), quant);
        quant = is_first ? first : quant;
        fit.quant[i] = is_flat ? EightInts{} : quant;
    }
}

// ---- value = scale * (quant - MOST) -------------------------------------------------------------

// The sign and magnitude of each part's largest value, the first of equal ones.
template <int COUNT>
inline void largest_of(const Eight* x, Eight& largest, Eight& signed_largest) {
    Eight here;
    largest = signed_largest = Eight{};
    for (int i = 0; i < COUNT; ++i) {
        magnitudes(x[i], here);
        signed_largest = here > largest ? x[i] : signed_largest;
        largest = here > largest ? here : largest;
    }
}

// make_qx_quants with rmse_type 1: quants from 0 to 2 * MOST - 1.
template <int COUNT, int MOST>
inline void fit_around_zero(const Eight* x, const Eight* weight, float* scales, EightInts* quant) {
    const Eight zero = {};
    Eight largest, signed_largest;
    largest_of<COUNT>(x, largest, signed_largest);
    const EightInts is_zero = largest < 1e-15f;
    Eight scale = zero, best = zero, best_inverse = zero;
    for (int trial = -10; trial <= 9; ++trial) {  // -10: the plain inverse, the first to be tried
        if (trial == 0) continue;
        const bool is_first = trial == -10;
        const float most = static_cast<float>(MOST);
        const Eight inverse =
            -(is_first ? most : most + 0.1f * static_cast<float>(trial)) / signed_largest;
        Eight sum_lx = zero, sum_l2 = zero;
        EightInts rounded;
        for (int i = 0; i < COUNT; ++i) {
            nearest_in(inverse * x[i], -MOST, MOST - 1, rounded);
            const Eight l = __builtin_convertvector(rounded, Eight);
            sum_lx += weight[i] * x[i] * l;
            sum_l2 += weight[i] * l * l;
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
    for (int i = 0; i < COUNT; ++i) {
        EightInts rounded;
        nearest_in(best_inverse * x[i], -MOST, MOST - 1, rounded);
        quant[i] = is_zero ? EightInts{} : rounded + MOST;
    }
}

// make_q3_quants: rounds, then changes one quant after another while that helps, five times at most.
template <int COUNT, int MOST>
inline void fit_by_descent(const Eight* x, float* scales, EightInts* quant) {
    const Eight zero = {};
    Eight largest, signed_largest, l[COUNT], sum_lx = zero, sum_l2 = zero;
    largest_of<COUNT>(x, largest, signed_largest);
    const EightInts is_zero = largest < 1e-15f;
    const Eight inverse = -static_cast<float>(MOST) / signed_largest;
    EightInts rounded;
    for (int i = 0; i < COUNT; ++i) {
        nearest_in(inverse * x[i], -MOST, MOST - 1, rounded);
        l[i] = __builtin_convertvector(rounded, Eight);
        const Eight weight = x[i] * x[i];
        sum_lx += weight * x[i] * l[i];
        sum_l2 += weight * l[i] * l[i];
    }
    for (int pass = 0; pass < 5; ++pass) {
        EightInts has_changed = {};
        for (int i = 0; i < COUNT; ++i) {
            const Eight weight = x[i] * x[i];
            Eight new_lx = sum_lx - weight * x[i] * l[i], new_l2 = sum_l2 - weight * l[i] * l[i];
            EightInts is_better = new_lx > zero;
            nearest_in(x[i] * new_l2 / new_lx, -MOST, MOST - 1, rounded);
            const Eight new_l = __builtin_convertvector(rounded, Eight);
            new_lx += weight * x[i] * new_l;
            new_l2 += weight * new_l * new_l;
            is_better &= (new_l != l[i]) & (new_l2 > zero) &
                         (new_lx * new_lx * sum_l2 > sum_lx * sum_lx * new_l2);
            l[i] = is_better ? new_l : l[i];
            sum_lx = is_better ? new_lx : sum_lx;
            sum_l2 = is_better ? new_l2 : sum_l2;
            has_changed |= is_better;
        }
        bool is_done = true;
        for (int p = 0; p < 8; ++p) is_done &= has_changed[p] == 0;
        if (is_done) break;
    }
    for (int p = 0; p < 8; ++p)
        scales[p] = is_zero[p] || !(sum_l2[p] > 0) ? 0.0f : sum_lx[p] / sum_l2[p];
    for (int i = 0; i < COUNT; ++i)
        quant[i] = is_zero ? EightInts{} : __builtin_convertvector(l[i], EightInts) + MOST;
}

// ---- scales of a super-block as integers ----------------------------------------------------------

// make_qp_quants: x = scale * quant for COUNT values of at least 0; returns the scale.
template <int COUNT, int MOST>
inline float fit_positive(const float* x, const float* weight, uint8_t* quant) {
    float most = 0;
    for (int i = 0; i < COUNT; ++i) most = x[i] > most ? x[i] : most;
    __builtin_memset(quant, 0, COUNT);
    if (most < 1e-15f) return 0.0f;
    float best_inverse = static_cast<float>(MOST) / most, best_error = 0;
    for (int trial = -5; trial <= 4; ++trial) {  // -5: the plain inverse, the first to be tried
        if (trial == 0) continue;
        const bool is_first = trial == -5;
        const float inverse =
            is_first ? best_inverse
                     : (0.1f * static_cast<float>(trial) + static_cast<float>(MOST)) / most;
        const float scale = 1.0f / inverse;
        float error = 0;
        for (int i = 0; i < COUNT; ++i) {
            const int32_t rounded = nearest(inverse * x[i]);
            const int32_t l = is_first         ? static_cast<uint8_t>(rounded)
                              : rounded < MOST ? rounded
                                               : MOST;
            const float off = x[i] - scale * static_cast<float>(l);
            error += weight[i] * off * off;
        }
        if (!is_first && !(error < best_error)) continue;
        best_error = error;
        best_inverse = inverse;
    }
    float sum_lx = 0, sum_l2 = 0;
    for (int i = 0; i < COUNT; ++i) {
        const int32_t rounded = nearest(best_inverse * x[i]), l = rounded < MOST ? rounded : MOST;
        quant[i] = static_cast<uint8_t>(l);
        sum_lx += weight[i] * x[i] * static_cast<float>(l);
        sum_l2 += weight[i] * static_cast<float>(l) * static_cast<float>(l);
    }
    for (int pass = 0; pass < 5; ++pass) {
        bool has_changed = false;
        for (int i = 0; i < COUNT; ++i) {
            const float w = weight[i], l = static_cast<float>(quant[i]);
            float new_lx = sum_lx - w * x[i] * l, new_l2 = sum_l2 - w * l * l;
            if (!(new_lx > 0 && new_l2 > 0)) continue;
            const int32_t rounded = nearest(x[i] * new_l2 / new_lx);
            const int32_t number = rounded < MOST ? rounded : MOST;
            if (number == quant[i]) continue;
            const float new_l = static_cast<float>(number);
            new_lx += w * x[i] * new_l;
            new_l2 += w * new_l * new_l;
            if (!(new_lx * new_lx * sum_l2 > sum_lx * sum_lx * new_l2)) continue;
            quant[i] = static_cast<uint8_t>(number);
            sum_lx = new_lx, sum_l2 = new_l2, has_changed = true;
        }
        if (!has_changed) break;
    }
    return sum_l2 > 0 ? sum_lx / sum_l2 : 0.0f;
}
