// Attention of the rows of a step over the keys and values of their sequences.
//
// A layer's keys and values are stored in blocks of positions, [blocks, K, block_length, row]; a
// table maps sequences to blocks. Positions (with a selection, the list of the selected ones) are
// split into parts of PART from the first on, whose partial sums are combined at the end, so a
// row's result does not depend on other rows, the blocks or the threads. A layer with a window skips
// the parts before it, and in the part where the window begins the tiles before it.
#pragma once
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "cache_rows.h"
#include "key_selection.h"
#include "operands.h"

// Positions per work item.
constexpr int64_t PART = 256;
constexpr int64_t TILE_KEYS = 16;  // unpacked at a time by weigh_keys
// Upper bound on the bytes of partial sums, unless one row has more; further rows are computed in the next
// batch.
constexpr int64_t PARTS_BYTES = 4 << 20;
// Most queries that share unpacked keys, unless one row has more.
constexpr int64_t SHARING_QUERIES = 32;

inline int64_t parts_of(int64_t positions) { return (positions + PART - 1) / PART; }

class Attention {
  public:
    Attention(const HsStep& step, Arena& arena) : s(step), rows_at_once(s.max_rows), selector(step) {
        int64_t most_parts = 0, most_queries = 0, most_sums = 0, most_heads = 0;
        for (const HsLayer* layer = s.layer; layer < s.layer + s.num_layers; ++layer) {
            if (!layer->attention.num_heads) continue;
            use(layer->attention);
            const int64_t own = parts_of_row(layer->attention) * H;
            const int64_t fitting =
                PARTS_BYTES / static_cast<int64_t>(own * padded_value * sizeof(float));
            rows_at_once = std::min(rows_at_once, std::max<int64_t>(1, fitting));
            most_parts = std::max(most_parts, own);
            most_queries = std::max(most_queries, H * padded);
            most_sums = std::max(most_sums, own * padded_value);
            most_heads = std::max(most_heads, K);
        }
        query = arena.take<float>(rows_at_once * most_queries);
        top = arena.take<float>(rows_at_once * most_parts);
        total = arena.take<float>(rows_at_once * most_parts);
        mixed = arena.take<float>(rows_at_once * most_sums);
        selector.take(arena, rows_at_once, most_heads);
    }

    // Sets the layer of the following calls.
    void use(const HsAttention& l) {
        W = l.head_dim, H = l.num_heads, K = l.num_kv_heads, G = H / K, padded = padded_head(W);
        V = value_size(l), padded_value = padded_head(V), together = turned_together(l);
        are_in_keys = l.value_width, value_kind = are_in_keys ? s.key_kind : s.value_kind;
        is_value_rotated = are_in_keys ? s.is_key_rotated : s.is_value_rotated;
        key_bytes = cache_row_bytes(s.key_kind, W);
        value_bytes = are_in_keys ? key_bytes : cache_row_bytes(value_kind, V);
        values = are_in_keys ? l.key + cache_row_bytes(s.key_kind, W - V) : l.value;
        chunk_rows = std::max<int64_t>(1, SHARING_QUERIES / G);
        window = l.window ? std::min(l.window, s.context_length) : s.context_length;
        table = s.table + l.table;
        scores = l.scores;
        selector.use(l);
    }

    // Records the computed rows of this step, and the other places to which their keys and values
    // are copied.
    void place(const HsRow* row, int64_t count) {
        std::array<int64_t, MAX_STEP_ROWS> computed;  // index of each row among the computed ones
        T = num_copies = 0;
        for (int64_t r = 0; r < count; ++r) {
            if (row[r].source >= 0) {
                copies[num_copies++] = {computed[row[r].source], row[r].position, row[r].sequence};
                continue;
            }
            computed[r] = T;
            places[T++] = {r, row[r].position, row[r].sequence};
        }
    }

    int64_t num_rows() const { return T; }
    int64_t position(int64_t t) const { return places[t].position; }
    int64_t number(int64_t t) const { return places[t].row; }  // index of computed row t in the step

    // Stores key and value [K, W] of row t in all their places; no value, if values are in the keys.
    void append(const HsAttention& l, int64_t t, const float* key, const float* value) {
        append(l, places[t], key, value);
        for (int64_t i = 0; i < num_copies; ++i)
            if (copies[i].row == t) append(l, copies[i], key, value);
    }

    // Summarises the blocks of keys that end with a row of this step.
    void summarise(const HsAttention& l) {
        if (!selector.is_on()) return;
        std::array<Place, MAX_STEP_ROWS> ends;
        int64_t count = 0;
        auto add = [&](const Place& place) {
            if ((place.position + 1) % s.select.block == 0) ends[count++] = place;
        };
        for (int64_t t = 0; t < T; ++t) add(places[t]);
        for (int64_t i = 0; i < num_copies; ++i) add(copies[i]);
        split(count * K * s.select.block * 16 * W, count * K, 1, 4, [&](int64_t u0, int64_t u1) {
            for (int64_t u = u0; u < u1; ++u) {
                const Place& place = ends[u / K];
                const int64_t begin = place.position + 1 - s.select.block;
                const int64_t at = place_of(place.sequence, begin) + u % K * table->block_length;
                selector.summarise(l, place.sequence, begin, u % K, l.key + at * key_bytes, key_bytes);
            }
        });
    }

    // Attends with the heads of qkv [T, stride]; writes `out` [T, H * V], multiplied by the sigmoids of `gates` of
    // the same shape, if any. Rows before `first` have none.
    void run(const HsAttention& l, const float* qkv, int64_t stride, const float* gates, Operand& out,
             int64_t first) {
        gate = gates;
        for (int64_t t = first; t < T; t += rows_at_once)
            run(l, qkv, stride, out, t, std::min(t + rows_at_once, T));
    }

  private:
    struct Place {
        int64_t row, position;
        int32_t sequence;
    };
    // Rows of one sequence at consecutive positions, which share keys and values.
    struct Chunk {
        int64_t begin, count, last;  // `last`: position of the last row
        int64_t num_keys;            // keys attended to
        int64_t first_part;          // earlier parts are before the windows of all rows
        bool is_selected;            // its only row attends to selected positions
        int64_t unit;                // its first work item

        int64_t parts() const { return parts_of(num_keys) - first_part; }
        int64_t keys_read() const { return num_keys - first_part * PART; }
    };

    // The first position that a token at `position` attends to, without a selection.
    int64_t begin_of(int64_t position) const { return std::max<int64_t>(0, position + 1 - window); }

    // Most parts of a row of this layer; the rows of a chunk count as one.
    int64_t parts_of_row(const HsAttention& l) const {
        const int64_t all = parts_of(selector.longest_of_all());
        const int64_t span = window + chunk_rows - 1;  // which may begin within a part
        return l.window ? std::min(all, parts_of(span - 1) + 1) : all;
    }

    // Offset of a position of the first head from the beginning of the cache, in rows.
    int64_t place_of(int32_t sequence, int64_t position) const {
        const int64_t length = table->block_length;
        if (table->blocks_per_sequence == 1) return table->block[sequence] * K * length + position;
        const int64_t block = table->block[sequence * table->blocks_per_sequence + position / length];
        return block * K * length + position % length;
    }

    void append(const HsAttention& l, const Place& place, const float* key, const float* value) const {
        const int64_t first = place_of(place.sequence, place.position);
        for (int64_t k = 0; k < K; ++k) {
            const int64_t at = first + k * table->block_length;
            store_cache_row(s.key_kind, key + k * W, W, l.key + at * key_bytes);
            if (value) store_cache_row(value_kind, value + k * W, W, l.value + at * value_bytes);
        }
    }

    Chunk chunk_from(int64_t t, int64_t t1, int64_t unit) const {
        const Place& place = places[t];
        if (selector.is_on() && !selector.takes_all(place.position))
            return {t, 1, place.position, selector.num_taken(place.position), 0, true, unit};
        int64_t n = 1;
        while (t + n < t1 && n < chunk_rows && places[t + n].sequence == place.sequence &&
               (!selector.is_on() || selector.takes_all(places[t + n].position)))
            ++n;
        const int64_t last = places[t + n - 1].position;
        return {t, n, last, last + 1, begin_of(place.position) / PART, false, unit};
    }

    void run(const HsAttention& l, const float* qkv, int64_t stride, Operand& out, int64_t t0,
             int64_t t1) {
        std::array<Chunk, MAX_ROWS> chunk;
        int64_t num_chunks = 0, units = 0, bytes = 0, searches = 0;
        parts = 0;
        for (int64_t t = t0; t < t1; t = chunk[num_chunks - 1].begin + chunk[num_chunks - 1].count) {
            const Chunk c = chunk[num_chunks++] = chunk_from(t, t1, units);
            parts = std::max(parts, c.parts());
            units += K * c.parts();
            bytes += c.count * c.keys_read() * K * (key_bytes + value_bytes);
            searches += c.is_selected;
            copy_queries(c, qkv, stride, t0);
        }
        split(searches ? bytes : 0, num_chunks * K, 1, 4, [&](int64_t u0, int64_t u1) {
            for (int64_t u = u0; searches && u < u1; ++u) {
                const Chunk& c = chunk[u / K];
                if (!c.is_selected) continue;
                const float* own = query + ((c.begin - t0) * H + u % K * G) * padded;
                selector.choose(l, c.begin - t0, places[c.begin].sequence, c.last, u % K, own, padded);
            }
        });
        split(bytes, units, 1, 4 * std::min<int64_t>(num_chunks, 8), [&](int64_t u0, int64_t u1) {
            int64_t c = 0;
            for (int64_t u = u0; u < u1; ++u) {
                while (c + 1 < num_chunks && chunk[c + 1].unit <= u) ++c;
                const int64_t own = chunk[c].parts(), i = u - chunk[c].unit;
                attend(l, chunk[c], i / own, i % own, t0);
            }
        });
        split((t1 - t0) * H * parts * padded_value * 4, (t1 - t0) * H, 1, 4,
              [&](int64_t i0, int64_t i1) {
            int64_t c = 0;
            for (int64_t i = i0; i < i1; ++i) {
                while (chunk[c].begin + chunk[c].count <= t0 + i / H) ++c;
                join(chunk[c], t0 + i / H, i % H, t0, out);
            }
        });
    }

    // Copies the queries of a chunk to [K, rows, G, padded].
    void copy_queries(const Chunk& c, const float* qkv, int64_t stride, int64_t t0) {
        float* to = query + (c.begin - t0) * H * padded;
        for (int64_t k = 0; k < K; ++k)
            for (int64_t r = 0; r < c.count; ++r)
                for (int64_t g = 0; g < G; ++g, to += padded) {
                    std::copy_n(qkv + (c.begin + r) * stride + (k * G + g) * W, W, to);
                    std::fill_n(to + W, padded - W, 0.0f);
                }
    }

    // Offset of the sums [rows, G] of a part.
    int64_t sums_at(const Chunk& c, int64_t kv_head, int64_t part, int64_t t0) const {
        return (c.begin - t0) * parts * H + (kv_head * parts + part) * c.count * G;
    }

    void attend(const HsAttention& l, const Chunk& c, int64_t kv_head, int64_t part, int64_t t0) {
        const int64_t at = sums_at(c, kv_head, part, t0), begin = (part + c.first_part) * PART;
        const int64_t length = table->block_length;
        const int64_t run = c.is_selected ? PART : std::min(length, PART);
        static thread_local std::vector<float> score;
        std::array<const uint8_t*, PART / LEAST_BLOCK> key, value;
        std::array<int32_t, std::max(SHARING_QUERIES, MAX_SHARED_HEADS)> count, from;
        const int64_t n = std::min(PART, c.num_keys - begin);
        const int64_t queries = c.count * G;
        AttendPart a;
        if (c.is_selected)
            a.key_place = a.value_place =
                find(l, places[c.begin].sequence, kv_head, selector.of(c.begin - t0, kv_head) + begin,
                     n, key[0], value[0]);
        // Runs before all windows need not be present, and are not read.
        const int64_t seen =
            l.window ? std::max<int64_t>(0, begin_of(places[c.begin].position) - begin) : 0;
        for (int64_t i = seen / run; !c.is_selected && i * run < n; ++i) {
            const int64_t from = place_of(places[c.begin].sequence, begin + i * run) + kv_head * length;
            key[i] = l.key + from * key_bytes, value[i] = values + from * value_bytes;
        }
        for (int64_t q = 0; q < queries; ++q)
            count[q] = static_cast<int32_t>(
                c.is_selected
                    ? n
                    : std::clamp<int64_t>(places[c.begin + q / G].position + 1 - begin, 0, n));
        if (l.window) {
            for (int64_t q = 0; q < queries; ++q)
                from[q] = static_cast<int32_t>(
                    std::clamp<int64_t>(begin_of(places[c.begin + q / G].position) - begin, 0, n));
            a.from = from.data(), a.first = from[0];
        }
        if (score.size() < static_cast<size_t>(queries * PART)) score.resize(queries * PART);
        a.key = key.data(), a.value = value.data(), a.run = run;
        a.key_bytes = key_bytes, a.value_bytes = value_bytes;
        a.n = n, a.W = W, a.value_width = V, a.num_queries = queries, a.count = count.data();
        a.query = query + ((c.begin - t0) * H + kv_head * queries) * padded;
        a.scores = l.scores, a.score = score.data();
        a.top = top + at, a.total = total + at, a.out = mixed + at * padded_value;
        kernels().weigh_keys[s.key_kind](a);
        kernels().mix_values[value_kind](a);
    }

    // Finds the keys and values at n positions: sets `key` and `value`, and returns the offset of
    // each position from them, in rows, or null if the positions are contiguous there.
    const int64_t* find(const HsAttention& l, int32_t sequence, int64_t kv_head,
                        const int32_t* position, int64_t n, const uint8_t*& key,
                        const uint8_t*& value) const {
        const int64_t length = table->block_length;
        auto at = [&](int64_t i) { return place_of(sequence, position[i]) + kv_head * length; };
        const bool is_run =
            position[n - 1] - position[0] == n - 1 && position[0] / length == position[n - 1] / length;
        const int64_t first = is_run ? at(0) : 0;
        key = l.key + first * key_bytes, value = values + first * value_bytes;
        if (is_run) return nullptr;
        static thread_local std::array<int64_t, PART> place;
        for (int64_t i = 0; i < n; ++i) {
            place[i] = at(i);
            if (i >= TILE_KEYS) continue;  // weigh_keys prefetches the others
            for (int64_t b = 0; b < key_bytes; b += LINE)
                __builtin_prefetch(key + place[i] * key_bytes + b);
        }
        return place.data();
    }

    // Combines the parts of one head of row t into `heads`: NaN if every score is -inf, as in a softmax
    // over all keys at once.
    void join(const Chunk& c, int64_t t, int64_t head, int64_t t0, Operand& heads) const {
        const int64_t position = places[t].position;
        const int64_t begin = c.is_selected ? 0 : begin_of(position) / PART - c.first_part;
        const int64_t end = c.is_selected ? c.parts() : parts_of(position + 1) - c.first_part;
        const int64_t within = (t - c.begin) * G + head % G;
        auto at = [&](int64_t part) { return sums_at(c, head / G, part, t0) + within; };
        float largest = top[at(begin)], sum = 0.0f;
        for (int64_t p = begin + 1; p < end; ++p) largest = std::max(largest, top[at(p)]);
        float* out = heads.row(t) + head * V;
        std::fill_n(out, V, 0.0f);
        for (int64_t p = begin; p < end; ++p) {
            const float share = std::exp(top[at(p)] - largest);
            sum += share * total[at(p)];
            for (int64_t i = 0; i < V; ++i) out[i] += share * mixed[at(p) * padded_value + i];
        }
        finish_sums(scores, head, largest, out, V, sum);
        for (int64_t i = 0; i < V; ++i) out[i] /= sum;
        if (is_value_rotated) turn_by_hadamard(out, V, together);
        if (gate) kernels().gate_by(out, gate + (t * H + head) * V, V);
    }

    const HsStep& s;
    int64_t W = 0, V = 0, H = 0, K = 0, G = 0, padded = 0, padded_value = 0, together = 0;
    int64_t key_bytes = 0, value_bytes = 0, chunk_rows = 0, window = 0;
    bool are_in_keys = false, is_value_rotated = false;
    int32_t value_kind = 0;
    const uint8_t* values = nullptr;
    const HsTable* table = nullptr;
    HsScores scores = {};
    const float* gate = nullptr;
    int64_t T = 0, num_copies = 0, rows_at_once, parts = 0;  // most parts of a row in this batch
    float *query, *top, *total, *mixed;
    Selector selector;
    std::array<Place, MAX_ROWS> places;
    std::array<Place, MAX_STEP_ROWS> copies;
};
