// Byte dot products for the selection of keys. Included by rows_template.h.
//
// Rows are bytes from 0 to 127, queries signed bytes from -127 to 127, so the sum of two products fits
// into 16 bits and every instruction set gives the same sums. Widths are multiples of SELECT_WIDTH.

#ifdef LEVEL_AVX512
typedef __m512i SelectBytes;
inline SelectBytes select_bytes(const void* p) { return _mm512_loadu_si512(p); }
inline SelectBytes no_sums() { return _mm512_setzero_si512(); }

inline SelectBytes add_products(SelectBytes sum, SelectBytes row, SelectBytes x) {
#ifdef __AVX512VNNI__
    return _mm512_dpbusd_epi32(sum, row, x);
#else
    const __m512i pairs = _mm512_maddubs_epi16(row, x);
    return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#endif
}

// out[0..3] = the sums of a, b, c and d
inline void store_totals(SelectBytes a, SelectBytes b, SelectBytes c, SelectBytes d, int32_t* out) {
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    const __m512i all =
        _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    const __m256i half =
        _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    const __m128i sums =
        _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), sums);
}

// 64 values of two bits, as select.h packs them
inline SelectBytes code_values(const uint8_t* code) {
    const __m512i all = _mm512_broadcast_i32x4(load_16_bytes(code));
    const __m512i shift = _mm512_set_epi64(6, 6, 4, 4, 2, 2, 0, 0);
    return _mm512_and_si512(_mm512_srlv_epi64(all, shift), _mm512_set1_epi8(3));
}
#elif defined(LEVEL_AVX2)
struct SelectBytes {
    __m256i half[2];
};
inline SelectBytes select_bytes(const void* p) {
    const __m256i* from = static_cast<const __m256i*>(p);
    return {{_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)}};
}
inline SelectBytes no_sums() { return {{_mm256_setzero_si256(), _mm256_setzero_si256()}}; }

inline SelectBytes add_products(SelectBytes sum, const SelectBytes& row, const SelectBytes& x) {
    for (int i = 0; i < 2; ++i) {
#ifdef __AVXVNNI__
        sum.half[i] = _mm256_dpbusd_avx_epi32(sum.half[i], row.half[i], x.half[i]);
#else
        const __m256i pairs = _mm256_maddubs_epi16(row.half[i], x.half[i]);
        sum.half[i] =
            _mm256_add_epi32(sum.half[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
    }
    return sum;
}

inline void store_totals(const SelectBytes& a, const SelectBytes& b, const SelectBytes& c, const SelectBytes& d,
                         int32_t* out) {
    auto joined = [](const SelectBytes& x) { return _mm256_add_epi32(x.half[0], x.half[1]); };
    const __m256i all = _mm256_hadd_epi32(_mm256_hadd_epi32(joined(a), joined(b)),
                                          _mm256_hadd_epi32(joined(c), joined(d)));
    const __m128i sums =
        _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), sums);
}

inline SelectBytes code_values(const uint8_t* code) {
    const __m256i all = _mm256_broadcastsi128_si256(load_16_bytes(code));
    const __m256i three = _mm256_set1_epi8(3);
    auto shifted = [&](__m256i by) { return _mm256_and_si256(_mm256_srlv_epi64(all, by), three); };
    return {{shifted(_mm256_set_epi64x(2, 2, 0, 0)), shifted(_mm256_set_epi64x(6, 6, 4, 4))}};
}
#else
struct SelectBytes {
    int32_t value[SELECT_WIDTH];
};
inline SelectBytes select_bytes(const void* p) {
    SelectBytes found;
    for (int i = 0; i < SELECT_WIDTH; ++i) found.value[i] = static_cast<const int8_t*>(p)[i];
    return found;
}
inline SelectBytes no_sums() { return {}; }

inline SelectBytes add_products(SelectBytes sum, const SelectBytes& row, const SelectBytes& x) {
    for (int i = 0; i < SELECT_WIDTH; ++i) sum.value[i] += row.value[i] * x.value[i];
    return sum;
}

inline void store_totals(const SelectBytes& a, const SelectBytes& b, const SelectBytes& c, const SelectBytes& d,
                         int32_t* out) {
    const SelectBytes* each[4] = {&a, &b, &c, &d};
    for (int j = 0; j < 4; ++j) {
        out[j] = 0;
        for (int i = 0; i < SELECT_WIDTH; ++i) out[j] += each[j]->value[i];
    }
}

inline SelectBytes code_values(const uint8_t* code) {
    SelectBytes found;
    for (int i = 0; i < SELECT_WIDTH; ++i) found.value[i] = code[i % 16] >> i / 16 * 2 & 3;
    return found;
}
#endif

// Processes four rows at a time; the first row replaces missing rows at the end. `load` is called once
// for rows of one vector, since codes take longer to unpack than to multiply.
template <class Load>
inline void select_dots(const SelectDots& d, int64_t row_step, const Load& load) {
    for (int64_t i = 0; i < d.n; i += 4) {
        const int64_t left = d.n - i;
        SelectBytes first[4];
        for (int64_t j = 0; j < 4; ++j) first[j] = load(i + (j < left ? j : 0), 0);
        for (int64_t g = 0; g < d.num_queries; ++g) {
            const int8_t* x = d.query + g * d.width;
            SelectBytes sum[4];
            const SelectBytes values = select_bytes(x);
            for (int64_t j = 0; j < 4; ++j) sum[j] = add_products(no_sums(), first[j], values);
            for (int64_t w = SELECT_WIDTH; w < d.width; w += SELECT_WIDTH) {
                const SelectBytes more = select_bytes(x + w);
                for (int64_t j = 0; j < 4; ++j)
                    sum[j] = add_products(sum[j], load(i + (j < left ? j : 0), w * row_step / 4),
                                          more);
            }
            int32_t total[4];
            store_totals(sum[0], sum[1], sum[2], sum[3], total);
            for (int64_t j = 0; j < 4 && j < left; ++j) d.out[g * d.stride + i + j] = total[j];
        }
    }
}

void dot_bytes(const SelectDots& d) {
    select_dots(d, 4, [&](int64_t i, int64_t at) { return select_bytes(d.row[i] + at); });
}

void dot_codes(const SelectDots& d) {
    select_dots(d, 1, [&](int64_t i, int64_t at) {
        return code_values(d.row[0] + i * d.width / 4 + at);
    });
}

// Converts scores [G, n] of queries that share keys to their softmax mass summed over queries, `out` [n].
void share_mass(float* score, int64_t num_queries, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = 0.0f;
    for (int64_t g = 0; g < num_queries; ++g) {
        float* own = score + g * n;
        float top = own[0];
        for (int64_t i = 1; i < n; ++i) top = own[i] > top ? own[i] : top;
        const float inverse = 1.0f / exp_sum(own, n, top);
        for (int64_t i = 0; i < n; ++i) out[i] += own[i] * inverse;
    }
}
