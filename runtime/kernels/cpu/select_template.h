// Integer dot products, scores, softmax mass and the choice of the largest, for the selection of
// keys (select.h). Included by rows_template.h.
//
// Rows are bytes from 0 to 127, or codes of two bits; queries are signed bytes from -127 to 127, so the
// sum of two products fits into 16 bits and every instruction set gives the same sums. Widths are
// multiples of SELECT_WIDTH.

#if defined(LEVEL_AVX512) || defined(LEVEL_AVX2)
// Rows are in lanes of four bytes, so that sums need no additions across lanes. Sixteen bytes of each row
// are transposed at a time.
#ifdef LEVEL_AVX512
typedef __m512i Words;
inline Words no_words() { return _mm512_setzero_si512(); }
inline Words words_of(const int8_t* p) {
    int32_t word;
    __builtin_memcpy(&word, p, 4);
    return _mm512_set1_epi32(word);
}
inline void store_words(int32_t* p, Words x) { _mm512_storeu_si512(p, x); }

inline Words add_products(Words sum, Words row, Words x) {
#ifdef __AVX512VNNI__
    return _mm512_dpbusd_epi32(sum, row, x);
#else
    const __m512i pairs = _mm512_maddubs_epi16(row, x);
    return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#endif
}

// 16 bytes from each of rows 0, 4, 8 and 12
inline Words every_fourth(const uint8_t* const* row, int64_t at) {
    __m512i all = _mm512_castsi128_si512(load_16_bytes(row[0] + at));
    all = _mm512_inserti32x4(all, load_16_bytes(row[4] + at), 1);
    all = _mm512_inserti32x4(all, load_16_bytes(row[8] + at), 2);
    return _mm512_inserti32x4(all, load_16_bytes(row[12] + at), 3);
}

inline Words low_words(Words a, Words b) { return _mm512_unpacklo_epi32(a, b); }
inline Words high_words(Words a, Words b) { return _mm512_unpackhi_epi32(a, b); }
inline Words low_pairs(Words a, Words b) { return _mm512_unpacklo_epi64(a, b); }
inline Words high_pairs(Words a, Words b) { return _mm512_unpackhi_epi64(a, b); }
inline Words two_bits(Words codes, int shift) {
    return _mm512_and_si512(_mm512_srli_epi32(codes, shift), _mm512_set1_epi8(3));
}
#else
typedef __m256i Words;
inline Words no_words() { return _mm256_setzero_si256(); }
inline Words words_of(const int8_t* p) {
    int32_t word;
    __builtin_memcpy(&word, p, 4);
    return _mm256_set1_epi32(word);
}
inline void store_words(int32_t* p, Words x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }

inline Words add_products(Words sum, Words row, Words x) {
#ifdef __AVXVNNI__
    return _mm256_dpbusd_avx_epi32(sum, row, x);
#else
    const __m256i pairs = _mm256_maddubs_epi16(row, x);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

// 16 bytes from each of rows 0 and 4
inline Words every_fourth(const uint8_t* const* row, int64_t at) {
    const __m256i first = _mm256_castsi128_si256(load_16_bytes(row[0] + at));
    return _mm256_inserti128_si256(first, load_16_bytes(row[4] + at), 1);
}

inline Words low_words(Words a, Words b) { return _mm256_unpacklo_epi32(a, b); }
inline Words high_words(Words a, Words b) { return _mm256_unpackhi_epi32(a, b); }
inline Words low_pairs(Words a, Words b) { return _mm256_unpacklo_epi64(a, b); }
inline Words high_pairs(Words a, Words b) { return _mm256_unpackhi_epi64(a, b); }
inline Words two_bits(Words codes, int shift) {
    return _mm256_and_si256(_mm256_srli_epi32(codes, shift), _mm256_set1_epi8(3));
}
#endif

constexpr int64_t ROWS = sizeof(Words) / 4;  // rows at a time

// word[w] = bytes 4 w .. 4 w + 3 from `at` on of each row
inline void transpose_words(const uint8_t* const* row, int64_t at, Words* word) {
    Words part[4];
    for (int j = 0; j < 4; ++j) part[j] = every_fourth(row + j, at);
    const Words a = low_words(part[0], part[1]), b = high_words(part[0], part[1]);
    const Words c = low_words(part[2], part[3]), d = high_words(part[2], part[3]);
    word[0] = low_pairs(a, c), word[1] = high_pairs(a, c);
    word[2] = low_pairs(b, d), word[3] = high_pairs(b, d);
}

// sum[q] [ROWS] = the products of all rows with each of QUERIES queries
template <bool IS_CODED, int QUERIES>
inline void add_rows(const SelectDots& d, const uint8_t* const* row, const int8_t* query, Words* sum) {
    constexpr int PARTS = IS_CODED ? 4 : 1;  // values of a byte
    for (int q = 0; q < QUERIES; ++q) sum[q] = no_words();
    for (int64_t at = 0; at < d.width / PARTS; at += 16) {
        Words word[4];
        transpose_words(row, at, word);
        for (int part = 0; part < PARTS; ++part)
            for (int w = 0; w < 4; ++w) {
                const Words values = IS_CODED ? two_bits(word[w], 2 * part) : word[w];
                const int8_t* x = query + at * PARTS + part * 16 + 4 * w;
                for (int q = 0; q < QUERIES; ++q)
                    sum[q] = add_products(sum[q], values, words_of(x + q * d.width));
            }
    }
}

// The last row replaces missing rows at the end.
template <bool IS_CODED, class RowAt>
inline void select_dots(const SelectDots& d, const RowAt& row_at) {
    for (int64_t i = 0; i < d.n; i += ROWS) {
        const int64_t left = d.n - i < ROWS ? d.n - i : ROWS;
        const uint8_t* row[ROWS];
        for (int64_t j = 0; j < ROWS; ++j) row[j] = row_at(i + (j < left ? j : left - 1));
        auto add = [&](int64_t g, auto count) {
            constexpr int QUERIES = decltype(count)::VALUE;
            Words sum[QUERIES];
            add_rows<IS_CODED, QUERIES>(d, row, d.query + g * d.width, sum);
            for (int q = 0; q < QUERIES; ++q) {
                int32_t* out = d.out + (g + q) * d.stride + i;
                int32_t total[ROWS];
                store_words(left == ROWS ? out : total, sum[q]);
                for (int64_t j = 0; left < ROWS && j < left; ++j) out[j] = total[j];
            }
        };
        int64_t g = 0;
        for (; g + 8 <= d.num_queries; g += 8) add(g, Queries<8>());
        for (; g + 4 <= d.num_queries; g += 4) add(g, Queries<4>());
        for (; g < d.num_queries; ++g) add(g, Queries<1>());
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

// Converts scores [G, n] of queries that share keys to their softmax mass summed over queries, `out` [n].
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
