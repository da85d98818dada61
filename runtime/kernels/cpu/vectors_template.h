// Loops over vectors in cache, which the compiler vectorises: norms, rotary embedding, the cache's halves, sums.
// Included by rows_template.h. Bits are equal at all levels (those of NaN aside), because additions have the same
// order.

// Sixteen interleaved sums, so that the compiler can vectorise them.
template <class Term>
inline float sum_of(int64_t n, const Term& term) {
    float sums[16] = {};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int lane = 0; lane < 16; ++lane) sums[lane] += term(i + lane);
    for (; i < n; ++i) sums[0] += term(i);
    for (int lane = 1; lane < 16; ++lane) sums[0] += sums[lane];
    return sums[0];
}

// y may be x.
void rms_norm(const float* x, const float* weight, float epsilon, int64_t n, float* y) {
    const float squares = sum_of(n, [=](int64_t i) { return x[i] * x[i]; });
    const float factor = 1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + epsilon);
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) y[i] = x[i] * factor * weight[i];
}

void layer_norm(const float* x, const float* weight, const float* bias, float epsilon, int64_t n,
                float* y) {
    const float mean = sum_of(n, [=](int64_t i) { return x[i]; }) / static_cast<float>(n);
    const float squares = sum_of(n, [=](int64_t i) { return (x[i] - mean) * (x[i] - mean); });
    const float factor = 1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + epsilon);
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - mean) * factor * weight[i] + bias[i];
}

void rotate(float* x, int64_t heads, const float* __restrict cos, const float* __restrict sin,
            int64_t width, bool is_adjacent) {
    const int64_t half = width / 2;
    for (int64_t h = 0; h < heads; ++h, x += width) {
        auto turn = [=](float& a, float& b, int64_t i) {
            const float before = a;
            a = before * cos[i] - b * sin[i];
            b = before * sin[i] + b * cos[i];
        };
        if (is_adjacent) {
#pragma GCC ivdep
            for (int64_t i = 0; i < half; ++i) turn(x[2 * i], x[2 * i + 1], i);
        } else {
#pragma GCC ivdep
            for (int64_t i = 0; i < half; ++i) turn(x[i], x[half + i], i);
        }
    }
}

void store_f16(const float* __restrict x, int64_t n, uint16_t* __restrict y) {
    for (int64_t i = 0; i < n; ++i) {
        uint32_t bits, sum;
        __builtin_memcpy(&bits, x + i, 4);
        const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
        float shifted;  // subnormal in f16: adding 0.5 rounds to a multiple of 2^-24
        __builtin_memcpy(&shifted, &magnitude, 4);
        shifted += 0.5f;
        __builtin_memcpy(&sum, &shifted, 4);
        const uint32_t small = sum - 0x3f000000;
        const uint32_t usual = (magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13;
        const uint32_t large = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
        const uint32_t value = magnitude < 0x38800000 ? small : magnitude >= 0x477ff000 ? large : usual;
        y[i] = static_cast<uint16_t>(sign | value);
    }
}

void add_to(float* __restrict y, const float* __restrict x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) y[i] += x[i];
}

void sum_parts(const float* part, int64_t stride, int64_t count, int64_t n, float* y) {
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) {
        Floats sum[64 / LANES];
        for (int v = 0; v < 64 / LANES; ++v) sum[v] = load_floats(part + i + v * LANES);
        for (int64_t c = 1; c < count; ++c)
            for (int v = 0; v < 64 / LANES; ++v)
                sum[v] = add_floats(sum[v], load_floats(part + c * stride + i + v * LANES));
        for (int v = 0; v < 64 / LANES; ++v) store_floats(y + i + v * LANES, sum[v]);
    }
    for (; i < n; ++i) {
        y[i] = part[i];
        for (int64_t c = 1; c < count; ++c) y[i] += part[c * stride + i];
    }
}
