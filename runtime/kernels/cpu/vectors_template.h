// Loops over vectors in cache, most of which the compiler vectorises: norms, rotary embedding, the cache's halves,
// sums, comparisons with limits. Included by rows_template.h. Bits are equal at all levels (those of NaN aside),
// because additions have the same order.

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

uint64_t above(const float* x, int64_t n, float limit) {
    uint64_t open = 0;
#ifdef LEVEL_AVX512
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 there = first_of_16(n - i);
        const __m512 values = _mm512_maskz_loadu_ps(there, x + i);
        open |=
            static_cast<uint64_t>(_mm512_mask_cmp_ps_mask(there, values, broadcast(limit), _CMP_NLE_UQ))
            << i;
    }
#else
    for (int64_t i = 0; i < n; ++i) open |= static_cast<uint64_t>(!(x[i] <= limit)) << i;
#endif
    return open;
}

void keep_only(float* x, uint64_t mask) {
    for (int64_t i = 0; i < 64; ++i) {
#ifdef LEVEL_AVX512
        if (i % 16 == 0)
            _mm512_storeu_ps(x + i, _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> i), x + i));
#else
        uint32_t value;
        __builtin_memcpy(&value, x + i, 4);
        value &= 0u - static_cast<uint32_t>(mask >> i & 1);
        __builtin_memcpy(x + i, &value, 4);
#endif
    }
}

int64_t choose(const float* score, int64_t n, float limit, int32_t* chosen) {
    int64_t count = 0, i = 0;
#ifdef LEVEL_AVX512
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (; i + 16 <= n; i += 16) {
        const __mmask16 above =
            _mm512_cmp_ps_mask(load_floats(score + i), broadcast(limit), _CMP_NLE_UQ);
        const __m512i which = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(i)));
        _mm512_mask_compressstoreu_epi32(chosen + count, above, which);
        count += __builtin_popcount(above);
    }
#endif
    for (; i < n; ++i) {
        chosen[count] = static_cast<int32_t>(i);
        count += !(score[i] <= limit);
    }
    return count;
}
