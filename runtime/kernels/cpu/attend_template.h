// Attention of one token over a part of the cache: all queries that share a key-value head at once,
// so that every key and value is read and unpacked once. Included by rows_template.h.
//
// The including file defines store_sums(a, b, c, d, y): y[0..3] = sum(a), sum(b), sum(c), sum(d).

// Rows that are unpacked before they are used; at most 16 * MAX_HEAD_WIDTH floats, which a first
// cache holds.
constexpr int64_t TILE = 16;

template <class Format>
inline void unpack_tile(const uint8_t* first, int64_t stride, int64_t n, int64_t left, int64_t W,
                        float* tile) {
    const int64_t padded = padded_head(W);
    for (int64_t c = 0; c < n; ++c) {
        const uint8_t* row = first + c * stride;
        const uint8_t* next = c + TILE < left ? row + TILE * stride : row;
        float* out = tile + c * padded;
        unpack_row<Format>(row, next, W, out);
        for (int64_t i = W; i < padded; ++i) out[i] = 0.0f;
    }
    for (int64_t i = n * padded; i < TILE * padded; ++i) tile[i] = 0.0f;
}

// score[c] = scale * query . tile[c] for all c < TILE
inline void score_tile(const float* tile, const float* query, int64_t padded, float scale,
                       float* score) {
    for (int64_t c = 0; c < TILE; c += 4) {
        const float* key = tile + c * padded;
        Floats sum0 = zero(), sum1 = zero(), sum2 = zero(), sum3 = zero();
        for (int64_t i = 0; i < padded; i += LANES) {
            const Floats q = load_floats(query + i);
            sum0 = multiply_add(q, load_floats(key + i), sum0);
            sum1 = multiply_add(q, load_floats(key + padded + i), sum1);
            sum2 = multiply_add(q, load_floats(key + 2 * padded + i), sum2);
            sum3 = multiply_add(q, load_floats(key + 3 * padded + i), sum3);
        }
        store_sums(sum0, sum1, sum2, sum3, score + c);
    }
    for (int64_t c = 0; c < TILE; ++c) score[c] *= scale;
}

// out[g] += sum over c < TILE of weight[g * stride + c] * tile[c], for g < QUERIES, in columns
// i0 <= i < i1, COLUMNS vectors of them at a time
template <int QUERIES, int COLUMNS>
inline void mix_columns(const float* tile, const float* weight, int64_t stride, int64_t padded,
                        int64_t i0, int64_t i1, float* out) {
    for (int64_t i = i0; i < i1; i += COLUMNS * LANES) {
        Floats sum[QUERIES][COLUMNS];
        for (int g = 0; g < QUERIES; ++g)
            for (int v = 0; v < COLUMNS; ++v)
                sum[g][v] = load_floats(out + g * padded + i + v * LANES);
        for (int64_t c = 0; c < TILE; ++c) {
            Floats value[COLUMNS];
            for (int v = 0; v < COLUMNS; ++v)
                value[v] = load_floats(tile + c * padded + i + v * LANES);
            for (int g = 0; g < QUERIES; ++g) {
                const Floats by = broadcast(weight[g * stride + c]);
                for (int v = 0; v < COLUMNS; ++v)
                    sum[g][v] = multiply_add(value[v], by, sum[g][v]);
            }
        }
        for (int g = 0; g < QUERIES; ++g)
            for (int v = 0; v < COLUMNS; ++v)
                store_floats(out + g * padded + i + v * LANES, sum[g][v]);
    }
}

// Eight sums at a time, or each addition would wait for the one before it.
template <int QUERIES>
inline void mix_tile(const float* tile, const float* weight, int64_t stride, int64_t padded,
                     float* out) {
    constexpr int COLUMNS = 8 / QUERIES;
    const int64_t whole = padded / (COLUMNS * LANES) * (COLUMNS * LANES);
    mix_columns<QUERIES, COLUMNS>(tile, weight, stride, padded, 0, whole, out);
    mix_columns<QUERIES, 1>(tile, weight, stride, padded, whole, padded, out);
}

template <class Format>
void attend(const AttendPart& a) {
    const int64_t padded = padded_head(a.W), room = padded_part(a.n);
    alignas(64) float tile[TILE * MAX_HEAD_WIDTH];
    for (int64_t c = 0; c < a.n; c += TILE) {
        const int64_t n = a.n - c < TILE ? a.n - c : TILE;
        unpack_tile<Format>(a.key + c * a.stride, a.stride, n, a.n - c, a.W, tile);
        for (int64_t g = 0; g < a.G; ++g)
            score_tile(tile, a.query + g * padded, padded, a.scale, a.score + g * room + c);
    }
    for (int64_t g = 0; g < a.G; ++g) {
        float* score = a.score + g * room;
        float top = score[0];
        for (int64_t c = 1; c < a.n; ++c) top = score[c] > top ? score[c] : top;
        a.top[g] = top;
        // Where every score is minus infinity there is nothing to add, and no difference to take.
        a.total[g] = exp_sum(score, a.n, top == -__builtin_inff() ? 0.0f : top);
        for (int64_t c = a.n; c < room; ++c) score[c] = 0.0f;
    }
    for (int64_t i = 0; i < a.G * padded; ++i) a.out[i] = 0.0f;
    for (int64_t c = 0; c < a.n; c += TILE) {
        const int64_t n = a.n - c < TILE ? a.n - c : TILE;
        unpack_tile<Format>(a.value + c * a.stride, a.stride, n, a.n - c, a.W, tile);
        int64_t g = 0;
        for (; g + 4 <= a.G; g += 4)
            mix_tile<4>(tile, a.score + g * room + c, room, padded, a.out + g * padded);
        for (; g < a.G; ++g)
            mix_tile<1>(tile, a.score + g * room + c, room, padded, a.out + g * padded);
    }
}
