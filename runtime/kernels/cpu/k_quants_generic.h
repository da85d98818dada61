// The K-quants for rows_generic.cpp; see k_quants_template.h.

// The factors and minima of the eight parts of a q4_K or q5_K block, times c. Of the 6-bit numbers
// in its 12 bytes, the first four scales and the first four minima are the low six bits of bytes
// 0-3 and 4-7; the others are in the nibbles of bytes 8-11, with their upper two bits at the top of
// bytes 0-3 and 4-7.
inline void factors_with_minima(const uint8_t* block, float c, float* factor, float* minimum) {
    const float d = c * f16_to_float(block), m = c * f16_to_float(block + 2);
    const uint8_t* p = block + 4;
    for (int i = 0; i < 4; ++i) {
        factor[i] = d * static_cast<float>(p[i] & 63);
        factor[i + 4] = d * static_cast<float>((p[i + 8] & 15) | (p[i] >> 6 << 4));
        minimum[i] = m * static_cast<float>(p[i + 4] & 63);
        minimum[i + 4] = m * static_cast<float>((p[i + 8] >> 4) | (p[i + 4] >> 6 << 4));
    }
}

inline void factors_of_q6_k(const uint8_t* block, float c, float* factor) {
    const int8_t* scales = reinterpret_cast<const int8_t*>(block + 192);
    const float d = c * f16_to_float(block + 208);
    for (int i = 0; i < 16; ++i) factor[i] = d * static_cast<float>(scales[i]);
}

// The quants of a pair's parts, 64 integers, without an offset.
template <class F>
inline void ints_of_pair(const uint8_t* block, int pair, int32_t* q) {
    const uint8_t *quants = block + F::QUANTS_AT + 32 * pair, *bits = block + F::BITS_AT;
    for (int i = 0; i < 32; ++i) {
        const int above = F::BITS_BYTES == 64   ? bits[pair / 2 * 32 + i] >> pair % 2 * 2
                          : F::BITS_BYTES == 32 ? bits[i] >> 2 * pair
                                                : 0;
        const int low = F::BITS_BYTES == 64 ? above & 3 : above & 1;
        const int high = F::BITS_BYTES == 64 ? above >> 4 & 3 : above >> 1 & 1;
        q[i] = (quants[i] & 15) | low << 4;
        q[i + 32] = (quants[i] >> 4) | high << 4;
    }
}

template <class F>
inline void unpack_pair(const uint8_t* block, int pair, Floats* w) {
    int32_t q[64];
    ints_of_pair<F>(block, pair, q);
    for (int v = 0; v < 16; ++v) {
        const Ints quants = {q[4 * v], q[4 * v + 1], q[4 * v + 2], q[4 * v + 3]};
        w[v] = __builtin_convertvector(quants - (F::BITS_BYTES == 64 ? 32 : 0), Floats);
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
    F::factors(block[0], 1.0f, of);
    for (int pair = 0; pair < 4; ++pair) {
        int32_t quants[64];
        ints_of_pair<F>(block[0], pair, quants);
        for (int i = 0; i < 2; ++i) {
            const int p = i == 0 ? F::parts(pair).first : F::parts(pair).second;
            const int16_t* values = reinterpret_cast<const int16_t*>(x.values + p * x.stride);
            const int32_t* q = quants + 32 * i;
            float term;
            if constexpr (F::HAS_MINIMA) {
                const float product = static_cast<float>(product_of(q, values, 32));
                term = __builtin_fmaf(of.factor[p], product,
                                      of.minimum[p] * static_cast<float>(-x.sum[p]));
            } else {
                const int32_t first = product_of(q, values, 16) - 32 * x.first_sum[p];
                const int32_t last =
                    product_of(q + 16, values + 16, 16) - 32 * (x.sum[p] - x.first_sum[p]);
                term = __builtin_fmaf(of.factor[2 * p + 1], static_cast<float>(last),
                                      of.factor[2 * p] * static_cast<float>(first));
            }
            sums.part[p] = __builtin_fmaf(x.scale[p], term, sums.part[p]);
        }
    }
}

inline void store_super(const SuperSums& sums, float* to) {
    __builtin_memcpy(to, sums.part, sizeof sums.part);
}
