// The K-quants for rows_generic.cpp; see k_quants_template.h.

template <class F>
inline void factors_of(const uint8_t* block, float c, Factors& to) {
    int8_t number[32];
    auto load = [&](int i) {
        int32_t four;
        __builtin_memcpy(&four, block + F::SHAPE.scales_at + i, 4);
        return four;
    };
    auto keep = [&](int i, int32_t four) { __builtin_memcpy(number + i, &four, 4); };
    const uint8_t* halves = block + F::SHAPE.halves_at;
    if constexpr (!F::HAS_NUMBERS) {
        __builtin_memset(number, 1, sizeof number);
    } else if constexpr (F::HAS_WORDS) {
        uint16_t words[3];
        __builtin_memcpy(words, halves + 2, sizeof words);
        F::numbers(words, [&](int i, int one) { number[i] = static_cast<int8_t>(one); });
    } else if constexpr (F::ARE_NUMBERS_BYTES) {
        __builtin_memcpy(number, block + F::SHAPE.scales_at, F::SHAPE.scale_bytes);
    } else {
        F::numbers(load, keep);
    }
    const float d = c * (F::UNIT * f16_to_float(halves)),
                m = F::HAS_MINIMA ? c * f16_to_float(halves + 2) : 0.0f;
    for (int i = 0; i < F::NUM_FACTORS; ++i) {
        to.factor[i] = d * static_cast<float>(number[i]);
        if (F::HAS_MINIMA) to.minimum[i] = m * static_cast<float>(number[F::NUM_FACTORS + i]);
    }
}

// The quants of a pair's parts, 64 integers, without an offset.
template <class F>
inline void ints_of_pair(const uint8_t* block, int pair, int32_t* q) {
    const uint8_t *quants = block + F::QUANTS_AT, *bits = block + F::BITS_AT;
    for (int v = 0; v < 8; ++v) {
        int32_t four = 0, above = 0, of[2];
        __builtin_memcpy(&four, quants + 4 * F::quants_at(pair, v), 4);
        if (F::BITS_BYTES > 0) __builtin_memcpy(&above, bits + 4 * F::above_at(pair, v), 4);
        F::four(four, above, pair, of[0], of[1]);
        for (int j = 0; j < 2; ++j) {
            const int at = F::SHARES_HALVES ? v / 4 * 32 + v % 4 * 4 + 16 * j : 32 * j + 4 * v;
            for (int i = 0; i < 4; ++i) q[at + i] = of[j] >> 8 * i & 255;
        }
    }
}

template <class F>
inline void unpack_pair(const uint8_t* block, int pair, Floats* w) {
    int32_t q[64];
    ints_of_pair<F>(block, pair, q);
    for (int v = 0; v < 16; ++v) {
        const Ints quants = {q[4 * v], q[4 * v + 1], q[4 * v + 2], q[4 * v + 3]};
        w[v] = __builtin_convertvector(quants - F::LESS, Floats);
    }
}

inline int32_t product_of(const int32_t* q, const int16_t* x, int count) {
    int32_t product = 0;
    for (int i = 0; i < count; ++i) product += q[i] * x[i];
    return product;
}

constexpr int SUPER_ROWS = 1;
struct SuperSums {
    float part[8];
};

template <class F>
inline void add_super(const uint8_t* const* block, const SuperX& x, SuperSums& sums) {
    Factors of;
    factors_of<F>(block[0], 1.0f, of);
    for (int pair = 0; pair < 4; ++pair) {
        int32_t quants[64];
        ints_of_pair<F>(block[0], pair, quants);
        for (int i = 0; i < 2; ++i) {
            const int p = i == 0 ? F::parts(pair).first : F::parts(pair).second;
            const int16_t* values = reinterpret_cast<const int16_t*>(x.values + p * x.stride);
            constexpr int LENGTH = 32 / F::RANGES;
            float product[2], less[2];
            for (int r = 0; r < F::RANGES; ++r) {
                const int32_t sum = sum_of_range<F>(r, x.sum[p], x.first_sum[p]);
                const int first = LENGTH * r;
                const int32_t all = product_of(quants + 32 * i + first, values + first, LENGTH);
                product[r] = static_cast<float>(all - F::LESS * sum);
                less[r] = static_cast<float>(-sum);
            }
            const int at = F::RANGES * p;
            const float term = term_of<F>(of.factor + at, product, of.minimum + at, less);
            sums.part[p] = __builtin_fmaf(x.scale[p], term, sums.part[p]);
        }
    }
}

inline void store_super(const SuperSums& sums, float* to) {
    __builtin_memcpy(to, sums.part, sizeof sums.part);
}
