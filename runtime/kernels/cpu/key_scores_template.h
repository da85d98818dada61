// Integer dot products, scores, softmax mass and the choice of the largest, for the selection of
// keys (key_selection.h). Included by rows_template.h.
//
// Rows are bytes from 0 to 127, or codes of two bits; queries are signed bytes from -127 to 127, so the
// sum of two products fits into 16 bits and every instruction set gives the same sums. Widths are
// multiples of SELECT_WIDTH.

#if defined(LEVEL_AVX512) || defined(LEVEL_AVX2)
// Rows are in lanes of four bytes, so that sums need no additions across lanes. Sixteen bytes of each row
// are transposed at a time.
inline Ints broadcast_word(const int8_t* p) {
    int32_t word;
    __builtin_memcpy(&word, p, 4);
    return Ints{} + word;
}

// sum + the products of unsigned bytes of `row` and signed bytes of x, four in each lane
inline Ints add_byte_products(Ints sum, Ints row, Ints x) {
#if defined(__AVX512VNNI__) && defined(LEVEL_AVX512)
    return ints(_mm512_dpbusd_epi32(bits(sum), bits(row), bits(x)));
#elif defined(LEVEL_AVX512)
    const __m512i pairs = _mm512_maddubs_epi16(bits(row), bits(x));
    return sum + ints(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#elif defined(__AVXVNNI__)
    return ints(_mm256_dpbusd_avx_epi32(bits(sum), bits(row), bits(x)));
#else
    const __m256i pairs = _mm256_maddubs_epi16(bits(row), bits(x));
    return sum + ints(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

// sum[q] = the products of LANES rows with each of QUERIES queries
template <bool IS_CODED, int QUERIES>
inline void add_rows(const SelectDots& d, const uint8_t* const* row, const int8_t* query, Ints* sum) {
    constexpr int PARTS = IS_CODED ? 4 : 1;  // values of a byte
    for (int q = 0; q < QUERIES; ++q) sum[q] = Ints{};
    for (int64_t at = 0; at < d.width / PARTS; at += 16) {
        Ints word[4];
        bytes_of(row, at, 16, word);
        for (int part = 0; part < PARTS; ++part)
            for (int w = 0; w < 4; ++w) {
                const Ints values = IS_CODED ? word[w] >> 2 * part & 0x03030303 : word[w];
                const int8_t* x = query + at * PARTS + part * 16 + 4 * w;
                for (int q = 0; q < QUERIES; ++q)
                    sum[q] = add_byte_products(sum[q], values, broadcast_word(x + q * d.width));
            }
    }
}

// The last row replaces missing rows at the end.
template <bool IS_CODED, class RowAt>
inline void select_dots(const SelectDots& d, const RowAt& row_at) {
    for (int64_t i = 0; i < d.n; i += LANES) {
        const int64_t left = d.n - i < LANES ? d.n - i : LANES;
        const uint8_t* row[LANES];
        for (int64_t j = 0; j < LANES; ++j) row[j] = row_at(i + (j < left ? j : left - 1));
        in_steps<8, 4, 1>(0, d.num_queries, [&](auto count, int64_t g) {
            constexpr int QUERIES = count;
            Ints sum[QUERIES];
            add_rows<IS_CODED, QUERIES>(d, row, d.query + g * d.width, sum);
            for (int q = 0; q < QUERIES; ++q) {
                int32_t* out = d.out + (g + q) * d.stride + i;
                int32_t total[LANES];
                __builtin_memcpy(left == LANES ? out : total, sum + q, sizeof *sum);
                for (int64_t j = 0; left < LANES && j < left; ++j) out[j] = total[j];
            }
        });
    }
}
#else
template <bool IS_CODED, class RowAt>
inline void select_dots(const SelectDots& d, const RowAt& row_at) {
    for (int64_t i = 0; i < d.n; ++i)
        for (int64_t at = 0; at < d.width; at += SELECT_WIDTH) {
            const uint8_t* row = row_at(i) + (IS_CODED ? at / 4 : at);
            int32_t value[SELECT_WIDTH];
            for (int w = 0; w < SELECT_WIDTH; ++w)
                value[w] = IS_CODED ? row[w % 16] >> w / 16 * 2 & 3 : row[w];
            for (int64_t g = 0; g < d.num_queries; ++g) {
                const int8_t* x = d.query + g * d.width + at;
                int32_t total = at ? d.out[g * d.stride + i] : 0;
                for (int w = 0; w < SELECT_WIDTH; ++w) total += value[w] * x[w];
                d.out[g * d.stride + i] = total;
            }
        }
}
#endif

void dot_bytes(const SelectDots& d) {
    select_dots<false>(d, [&](int64_t i) { return d.row[i]; });
}

void dot_codes(const SelectDots& d) {
    select_dots<true>(d, [&](int64_t i) { return d.row[0] + i * d.width / 4; });
}

void scale_dots(const SelectScores& d) {
    for (int64_t g = 0; g < d.num_queries; ++g) {
        const int32_t* dot = d.dot + g * d.n;
        const int32_t times = d.times, offset = d.offset[g];
        const float *factor = d.factor, by = d.by[g];
        const float center = d.center ? d.center[g * d.center_stride] : 0.0f;
        float* score = d.score + g * d.stride;
        for (int64_t i = 0; i < d.n; ++i)
            score[i] = center + static_cast<float>(times * dot[i] - offset) * factor[i] * by;
    }
}

void share_mass(float* score, int64_t num_queries, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = 0.0f;
    for (int64_t g = 0; g < num_queries; ++g) {
        float* own = score + g * n;
        const float inverse = 1.0f / exp_sum(own, n, largest_score(own, n));
        for (int64_t i = 0; i < n; ++i) out[i] += own[i] * inverse;
    }
}

// Bisects the bits of the scores instead of sorting; none is negative, so the bits are in the same order.
// Each step counts without a branch.
void choose_largest(const float* score, int64_t n, int64_t k, int32_t* bits, int32_t* chosen) {
    constexpr int32_t INFINITE = 0x7f800000;
    int32_t low = INFINITE, high = 0;
    for (int64_t i = 0; i < n; ++i) {
        int32_t own;
        __builtin_memcpy(&own, score + i, 4);
        own &= 0x7fffffff;
        bits[i] = own = own < INFINITE ? own : INFINITE;
        low = own < low ? own : low;
        high = own > high ? own : high;
    }
    auto count_from = [=](int32_t least) {
        int32_t count = 0;
        for (int64_t i = 0; i < n; ++i) count += bits[i] >= least;
        return count;
    };
    // At least k scores are at or above `low`, at most k at or above `high`.
    int64_t above = 0;  // number at or above `high`
    for (++high; high - low > 1 && above < k;) {
        const int32_t middle = low + (high - low) / 2;
        const int64_t count = count_from(middle);
        if (count > k)
            low = middle;
        else
            high = middle, above = count;
    }
    int64_t equal = k - above;  // number of scores equal to `low` to take
    for (int64_t i = 0, c = 0; c < k; ++i) {
        chosen[c] = static_cast<int32_t>(i);
        const bool is_last = equal > 0 && bits[i] == low;
        equal -= is_last;
        c += is_last || bits[i] >= high;
    }
}
