// Activations and the exponentials of attention, a vector at a time: gcc leaves such loops scalar below AVX-512.
// Included by rows_template.h. Bits are equal at all levels (those of NaN aside), because additions have the same
// order and none is fused with a multiplication.

// The lanes of a where `which` has all bits set, the lanes of b elsewhere.
inline Floats chosen(Ints which, Floats a, Floats b) {
    return reinterpret_cast<Floats>((which & reinterpret_cast<Ints>(a)) |
                                    (~which & reinterpret_cast<Ints>(b)));
}

// exp as 2^n * p(r), with the remainder |r| <= log(2) / 2 and a Taylor polynomial p of degree 7. Below -87, x
// counts as -87.
inline Floats exp_of(Floats x) {
    x = chosen(x < broadcast(-87.0f), broadcast(-87.0f), x);  // NaN stays
    const Floats shifted = x * broadcast(1.44269504f) + broadcast(12582912.0f),
                 n = shifted - broadcast(12582912.0f);
    const Floats r = (x - n * broadcast(0.693145752f)) - n * broadcast(1.42860677e-6f);
    constexpr float factors[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    Floats p = broadcast(1.0f / 5040);
    for (float factor : factors) p = p * r + broadcast(factor);
    return p * reinterpret_cast<Floats>((reinterpret_cast<Ints>(shifted) - 0x4b400000 + 127) << 23);
}

// 1 / (1 + exp(-x)), with relative error 3e-7 where it is above 1e-38.
inline Floats sigmoid_of(Floats x) {
    const Floats y = chosen(x < broadcast(-88.0f), broadcast(88.0f), broadcast(-0.0f) - x);
    return broadcast(1.0f) / (broadcast(1.0f) + exp_of(y));
}

// x[i] = f(x[i]) for i < n
template <class Function>
inline void map(float* x, int64_t n, const Function& f) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store_floats(x + i, f(load_floats(x + i)));
    if (i < n) {
        float rest[LANES] = {};
        __builtin_memcpy(rest, x + i, (n - i) * sizeof(float));
        store_floats(rest, f(load_floats(rest)));
        __builtin_memcpy(x + i, rest, (n - i) * sizeof(float));
    }
}

void smooth(float* x, int64_t n, int32_t activation) {
    if (activation == ACTIVATION_SILU)
        map(x, n, [](Floats v) { return v * sigmoid_of(v); });
    else if (activation == ACTIVATION_GELU_TANH)  // 1 + tanh(u) = 2 sigmoid(2 u)
        map(x, n, [](Floats v) {
            return v * sigmoid_of(broadcast(1.59576912f) * (v + broadcast(0.044715f) * v * v * v));
        });
    else
        for (int64_t i = 0; i < n; ++i)
            x[i] = 0.5f * x[i] * (1.0f + __builtin_erff(x[i] * 0.70710678f));
}

// tanh, with relative error 4e-7: near 0 by its series, where 1 - exp(-2 |x|) would cancel.
inline Floats tanh_of(Floats x) {
    const Floats one = broadcast(1.0f), size = chosen(x < zero(), broadcast(-0.0f) - x, x);
    const Floats power = exp_of(broadcast(-2.0f) * size), large = (one - power) / (one + power);
    constexpr float factors[] = {-17.0f / 315, 2.0f / 15, -1.0f / 3, 1.0f};
    const Floats square = x * x;
    Floats series = broadcast(62.0f / 2835);
    for (float factor : factors) series = series * square + broadcast(factor);
    return chosen(size < broadcast(0.3f), x * series,
                  chosen(x < zero(), broadcast(-0.0f) - large, large));
}

void soft_cap(float* x, int64_t n, float cap) {
    map(x, n, [=](Floats v) { return broadcast(cap) * tanh_of(v / broadcast(cap)); });
}

// As sum_of(): sixteen interleaved sums of the exponentials.
float exp_sum(float* x, int64_t n, float shift) {
    Floats sum[16 / LANES];
    for (Floats& each : sum) each = zero();
    const int64_t whole = n / 16 * 16;
    for (int64_t i = 0; i < whole; i += 16)
        for (int v = 0; v < 16 / LANES; ++v) {
            float* to = x + i + v * LANES;
            const Floats power = exp_of(load_floats(to) - broadcast(shift));
            store_floats(to, power);
            sum[v] = sum[v] + power;
        }
    map(x + whole, n - whole, [=](Floats v) { return exp_of(v - broadcast(shift)); });
    float sums[16];
    for (int v = 0; v < 16 / LANES; ++v) store_floats(sums + v * LANES, sum[v]);
    for (int64_t i = whole; i < n; ++i) sums[0] += x[i];
    for (int lane = 1; lane < 16; ++lane) sums[0] += sums[lane];
    return sums[0];
}

// The largest of x [n], n > 0; NaN is skipped, unless it is the first.
inline float largest_score(const float* x, int64_t n) {
    Floats top = broadcast(x[0]);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const Floats v = load_floats(x + i);
        top = chosen(v > top, v, top);
    }
    float tops[LANES];
    store_floats(tops, top);
    for (; i < n; ++i) tops[0] = x[i] > tops[0] ? x[i] : tops[0];
    for (int lane = 1; lane < LANES; ++lane) tops[0] = tops[lane] > tops[0] ? tops[lane] : tops[0];
    return tops[0];
}
