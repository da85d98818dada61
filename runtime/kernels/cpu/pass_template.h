// Products of pairs of a token and a neuron, for pass.cpp. Included by rows_template.h.
//
// Weights are moved to f32 first, a panel of some rows and columns at a time, which stays in the
// second cache while all tokens use it.

// Columns d .. d + n - 1 of a row, whole blocks of it but for its end, as f32.
template <class Format>
inline void unpack_columns(const uint8_t* row, const uint8_t* next, int64_t D, int64_t d, int64_t n,
                           float* out) {
    if constexpr (Format::IS_PLANAR) {
        for (int64_t b = d / BLOCK; b < (d + n) / BLOCK; ++b, out += BLOCK) {
            const Floats scale = scale_f16(Format::scale(row, D / BLOCK, b));
            if (b % 4 == 0) __builtin_prefetch(Format::quants(next, D / BLOCK, b));
            Floats w[VECTORS];
            Format::unpack(Format::quants(row, D / BLOCK, b), w);
            for (int v = 0; v < VECTORS; ++v) store_floats(out + v * LANES, mul(w[v], scale));
        }
    } else {
        constexpr int64_t VALUES = IS_SUPER<Format> ? SUPER_BLOCK : BLOCK;
        const int64_t at = d / VALUES * Format::BLOCK_BYTES;
        unpack_row<Format, ToF32>(row + at, next + at, n, reinterpret_cast<uint8_t*>(out));
    }
}

// Rows that are asked for before they are unpacked.
constexpr int64_t PANEL_AHEAD = 6;

template <class Format>
void unpack_panel(const Rows& rows, const uint8_t* chosen, int64_t count, int64_t d0, int64_t d1,
                  const Panel& panel) {
    const int64_t step = IS_SUPER<Format> ? SUPER_BLOCK : panel.columns;
    for (int64_t i = 0; i < count; ++i) {
        const uint8_t* row = row_of(rows, chosen[i]);
        const uint8_t* next =
            i + PANEL_AHEAD < count ? row_of(rows, chosen[i + PANEL_AHEAD]) : row;
        float* out = panel.data + chosen[i] * panel.columns;
        const int64_t piece = panel.num_rows * panel.columns;
        for (int64_t d = d0; d < d1; d += step) {
            const int64_t n = d1 - d < step ? d1 - d : step;
            if (!IS_SUPER<Format> || panel.columns == SUPER_BLOCK) {
                unpack_columns<Format>(row, next, rows.D, d, n, out);
                if constexpr (!IS_SUPER<Format>)
                    for (int64_t j = n; j < panel.columns; ++j) out[j] = 0.0f;
                out += piece;
                continue;
            }
            alignas(64) float values[SUPER_BLOCK];
            unpack_columns<Format>(row, next, rows.D, d, n, values);
            for (int64_t j = 0; j < SUPER_BLOCK; j += panel.columns, out += piece)
                __builtin_memcpy(out, values + j, panel.columns * sizeof(float));
        }
    }
}

typedef float Four __attribute__((vector_size(16)));

// The sums of four vectors.
inline Four sums_of(Floats a, Floats b, Floats c, Floats d) {
#if defined(LEVEL_AVX512)
    const __m512 ab = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
    const __m512 cd = _mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d);
    const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512 all = _mm512_castpd_ps(low) + _mm512_castpd_ps(high);
    const __m256 half = _mm512_castps512_ps256(all) + _mm512_extractf32x8_ps(all, 1);
    return _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1);
#elif defined(LEVEL_AVX2)
    const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm256_castps256_ps128(all) + _mm256_extractf128_ps(all, 1);
#else
    Four four;
    store_sums(a, b, c, d, reinterpret_cast<float*>(&four));
    return four;
#endif
}

// Where the sums of four products go when the next four are half done: waiting for the additions
// that they end with would keep the processor from beginning the next.
struct Late {
    Floats part[4];
    float* to;

    inline void store() const {
        Four all;
        __builtin_memcpy(&all, to, sizeof(all));
        all += sums_of(part[0], part[1], part[2], part[3]);
        __builtin_memcpy(to, &all, sizeof(all));
    }
};

// Columns d0 .. d1-1 of four products. SHARED of four in a row have the same row.
template <int SHARED, int SUMS>
inline void dot_four(const float* const* row, const float* const* token, int64_t d0, int64_t d1,
                     Floats (*part)[4]) {
    for (int64_t d = d0; d < d1; d += SUMS * LANES)
        for (int s = 0; s < SUMS; ++s)
            for (int i = 0; i < 4; ++i)
                part[s][i] = multiply_add(load_floats(row[i / SHARED * SHARED] + d + s * LANES),
                                          load_floats(token[i] + d + s * LANES), part[s][i]);
}

// sum[p] += row . token. Every product is summed in the same way, so it does not matter with which
// others it is computed.
template <int SHARED>
inline void dot_quads(const PairList& list, int64_t begin, int64_t count, const float* panel,
                      const float* x, int64_t columns, float* sum, Late& late) {
    // Of one product, so that not each addition waits for the one before it; where vectors are long
    // there are too few of them for that to be worth one more addition.
    constexpr int SUMS = LANES < 16 ? 2 : 1;
    for (int64_t p = begin; p < begin + count; p += 4) {
        const float *row[4], *token[4];
        for (int i = 0; i < 4; ++i) {
            row[i] = panel + list.row[p + i / SHARED * SHARED];
            token[i] = x + list.token[p + i];
        }
        Floats part[SUMS][4];
        for (int s = 0; s < SUMS; ++s)
            for (int i = 0; i < 4; ++i) part[s][i] = zero();
        dot_four<SHARED, SUMS>(row, token, 0, columns / 2, part);
        asm volatile("" ::: "memory");  // or it is moved to where it waits
        late.store();
        asm volatile("" ::: "memory");
        dot_four<SHARED, SUMS>(row, token, columns / 2, columns, part);
        for (int i = 0; i < 4; ++i)
            late.part[i] = SUMS == 2 ? part[0][i] + part[SUMS - 1][i] : part[0][i];
        late.to = sum + p;
    }
}

inline void dot_list(const PairList& list, const float* panel, const float* x, int64_t columns,
                     float* sum) {
    float nowhere[4] = {};
    Late late = {{zero(), zero(), zero(), zero()}, nowhere};
    const int64_t twos = list.fours, ones = twos + (list.twos + 3) / 4 * 4;
    dot_quads<4>(list, 0, list.fours, panel, x, columns, sum, late);
    dot_quads<2>(list, twos, list.twos, panel, x, columns, sum, late);
    dot_quads<1>(list, ones, list.ones, panel, x, columns, sum, late);
    late.store();
}

void dot_pairs(const PairList& list, const float* panel, const float* x, int64_t columns,
               float* sum) {
    // A number of columns that the compiler knows.
    if (columns == PASS_CHUNK)
        dot_list(list, panel, x, PASS_CHUNK, sum);
    else
        dot_list(list, panel, x, columns, sum);
}

// y[t] += sum over p of value[p] * panel row index[p], for p from first[t * stride] to what follows
// it, in order.
constexpr int ADD_VECTORS = 8;
void add_pairs(const float* panel, const uint8_t* index, const float* value, const int32_t* first,
               int64_t stride, int64_t num_tokens, float* y) {
    constexpr int64_t COLUMNS = ADD_VECTORS * LANES;
    for (int64_t t = 0; t < num_tokens; ++t, y += PASS_CHUNK, first += stride) {
        const int64_t begin = first[0], end = first[1];
        if (begin == end) continue;
        Floats sum[ADD_VECTORS];
        for (int v = 0; v < ADD_VECTORS; ++v) sum[v] = load_floats(y + v * LANES);
        for (int64_t p = begin; p < end; ++p) {
            const float* row = panel + index[p] * COLUMNS;
            const Floats by = broadcast(value[p]);
            for (int v = 0; v < ADD_VECTORS; ++v)
                sum[v] = multiply_add(load_floats(row + v * LANES), by, sum[v]);
        }
        for (int v = 0; v < ADD_VECTORS; ++v) store_floats(y + v * LANES, sum[v]);
    }
}
static_assert(PASS_CHUNK % (ADD_VECTORS * LANES) == 0, "pieces of a chunk");

// Sets `bit` of mask[i] where a gate is not below or at the limit (its magnitude, where told so).
void mark_gates(const float* gate, int64_t n, float limit, bool is_magnitude, uint32_t bit,
                uint32_t* mask) {
    if (is_magnitude)
        for (int64_t i = 0; i < n; ++i)
            mask[i] |= !(__builtin_fabsf(gate[i]) <= limit) ? bit : 0;
    else
        for (int64_t i = 0; i < n; ++i) mask[i] |= !(gate[i] <= limit) ? bit : 0;
}

void mark_named(const uint8_t* named, int64_t n, uint32_t bit, uint32_t* mask) {
    for (int64_t i = 0; i < n; ++i) mask[i] |= named[i] ? bit : 0;
}
