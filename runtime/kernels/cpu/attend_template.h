// Attention over a part of the cache for all queries that share a key-value head, of one or several
// tokens, so that every key and value is read and unpacked once. Included by rows_template.h.
//
// Each rows_<level>.cpp defines store_sums(a, b, c, d, y): y[0..3] = sum(a), sum(b), sum(c), sum(d).

// Rows unpacked at a time: at most 16 * MAX_HEAD_WIDTH floats, which fit into L1 or, of the widest, nearly.
constexpr int64_t TILE = 16;

template <class Format>
inline void unpack_tile(const uint8_t* first, const int64_t* place, int64_t stride, int64_t left,
                        int64_t W, float* tile) {
    const int64_t padded = padded_head(W), n = left < TILE ? left : TILE;
    auto at = [=](int64_t c) { return first + (place ? place[c] : c) * stride; };
    for (int64_t c = 0; c < n; ++c) {
        const uint8_t* row = at(c);
        const uint8_t* next = c + TILE < left ? at(c + TILE) : row;
        float* out = tile + c * padded;
        unpack_row<Format>(row, next, W, out);
        for (int64_t i = W; i < padded; ++i) out[i] = 0.0f;
    }
    for (int64_t i = n * padded; i < TILE * padded; ++i) tile[i] = 0.0f;
}

// score[q * room + c] = scale * query[q] . tile[c] for all c < TILE and q < QUERIES
template <int QUERIES>
inline void score_tile(const float* tile, const float* query, int64_t padded, float scale, float* score,
                       int64_t room) {
    for (int64_t c = 0; c < TILE; c += 4) {
        const float* key = tile + c * padded;
        Floats sum[QUERIES][4];
        for (int q = 0; q < QUERIES; ++q)
            for (int j = 0; j < 4; ++j) sum[q][j] = zero();
        for (int64_t i = 0; i < padded; i += LANES) {
            Floats keys[4];
            for (int j = 0; j < 4; ++j) keys[j] = load_floats(key + j * padded + i);
            for (int q = 0; q < QUERIES; ++q) {
                const Floats x = load_floats(query + q * padded + i);
                for (int j = 0; j < 4; ++j) sum[q][j] = multiply_add(x, keys[j], sum[q][j]);
            }
        }
#ifdef LEVEL_AVX512
        if constexpr (QUERIES == 4) {
            store_sixteen_sums(sum, score + c, room);
            continue;
        }
#endif
        for (int q = 0; q < QUERIES; ++q)
            store_sums(sum[q][0], sum[q][1], sum[q][2], sum[q][3], score + q * room + c);
    }
    for (int q = 0; q < QUERIES; ++q)
        for (int64_t c = 0; c < TILE; ++c) score[q * room + c] *= scale;
}

// out[g] += sum over c < TILE of weight[g * stride + c] * tile[c], for g < QUERIES, in columns
// i0 <= i < i1, COLUMNS vectors at a time
template <int QUERIES, int COLUMNS>
inline void mix_columns(const float* tile, const float* weight, int64_t stride, int64_t padded,
                        int64_t i0, int64_t i1, float* out) {
    for (int64_t i = i0; i < i1; i += COLUMNS * LANES)
        add_weighted<QUERIES, COLUMNS>(out + i, padded, TILE, [&](int64_t c, Floats* value) {
            for (int v = 0; v < COLUMNS; ++v) value[v] = load_floats(tile + c * padded + i + v * LANES);
        }, [&](int g, int64_t c) { return broadcast(weight[g * stride + c]); });
}

// Up to eight independent sums at a time, to hide the latency of multiply-adds.
template <int QUERIES>
inline void mix_tile(const float* tile, const float* weight, int64_t stride, int64_t padded,
                     float* out) {
    constexpr int COLUMNS = 8 / QUERIES;
    const int64_t whole = padded / (COLUMNS * LANES) * (COLUMNS * LANES);
    mix_columns<QUERIES, COLUMNS>(tile, weight, stride, padded, 0, whole, out);
    mix_columns<QUERIES, 1>(tile, weight, stride, padded, whole, padded, out);
}

// Calls body(position, tile) for every tile of the rows in `runs` that a query attends to.
template <class Format, class Body>
inline void each_tile(const AttendPart& a, const uint8_t* const* runs, const int64_t* place,
                      int64_t stride, int64_t W, const Body& body) {
    alignas(64) float tile[TILE * MAX_HEAD_WIDTH];
    for (int64_t start = 0; start < a.n; start += a.run) {
        const int64_t length = a.n - start < a.run ? a.n - start : a.run;
        const uint8_t* first = runs[start / a.run];
        for (int64_t c = 0; c < length; c += TILE) {
            if (start + c + TILE <= a.first) continue;
            if (place)
                unpack_tile<Format>(first, place + c, stride, length - c, W, tile);
            else
                unpack_tile<Format>(first + c * stride, nullptr, stride, length - c, W, tile);
            body(start + c, tile);
        }
    }
}

// Replaces the n scores of one query with exp(score - top), followed by zeros up to `room`; `top`
// becomes the largest score, `total` the sum of the exponentials.
inline void weigh(float* score, int64_t n, int64_t room, float& top, float& total) {
    top = -__builtin_inff(), total = 0.0f;
    if (n) {
        top = largest_score(score, n);
        // If every score is -inf, 0 is subtracted instead of top, which would give NaN. The part then
        // has no share beside parts with a finite top.
        total = exp_sum(score, n, top == -__builtin_inff() ? 0.0f : top);
    }
    for (int64_t c = n; c < room; ++c) score[c] = 0.0f;
}

// Prefetches the scattered values of a tile, which arrive while its keys are scored.
inline void prefetch_values(const AttendPart& a, int64_t c) {
    for (int64_t i = c; i < c + TILE && i < a.n; ++i) {
        const uint8_t* row = a.value[0] + a.value_place[i] * a.value_bytes;
        for (int64_t at = 0; at < a.value_bytes; at += 64) __builtin_prefetch(row + at);
    }
}

template <class Format>
void weigh_keys(const AttendPart& a) {
    const int64_t padded = padded_head(a.W), room = padded_part(a.n);
    each_tile<Format>(a, a.key, a.key_place, a.key_bytes, a.W, [&](int64_t c, const float* tile) {
        if (a.value_place) prefetch_values(a, c);
        in_steps<4, 3, 2, 1>(0, a.num_queries, [&](auto count, int64_t q) {
            score_tile<count>(tile, a.query + q * padded, padded, a.scores.scale,
                              a.score + q * room + c, room);
        });
    });
    for (int64_t q = 0; q < a.num_queries; ++q) {
        const int64_t from = a.from ? a.from[q] : 0;
        float* score = a.score + q * room;
        for (int64_t c = 0; c < from; ++c) score[c] = 0.0f;
        finish_scores(a.scores, score + from, a.count[q] - from, soft_cap);
        weigh(score + from, a.count[q] - from, room - from, a.top[q], a.total[q]);
    }
}

template <class Format>
void mix_values(const AttendPart& a) {
    const int64_t W = a.value_width, padded = padded_head(W), room = padded_part(a.n);
    for (int64_t i = 0; i < a.num_queries * padded; ++i) a.out[i] = 0.0f;
    each_tile<Format>(a, a.value, a.value_place, a.value_bytes, W, [&](int64_t c, const float* tile) {
        in_steps<4, 3, 2, 1>(0, a.num_queries, [&](auto count, int64_t q) {
            mix_tile<count>(tile, a.score + q * room + c, room, padded, a.out + q * padded);
        });
    });
}
