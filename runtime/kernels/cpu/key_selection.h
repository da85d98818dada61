// Selects the positions of a long text that a token attends to: sinks at its beginning, a window of the
// latest positions, and between them the keys with the highest estimated attention: whole blocks, chosen
// by summaries of their keys, or keys of these blocks, chosen by codes of two bits per value. key_tables.py is
// the reference in torch: its tables are bit-identical, its scores equal up to rounding.
//
//   x -> whole(x / unit), unit = max |x| / LARGEST      a summary (LARGEST 63, + 64) or a query (127)
//   summary of a block     the mean of its keys; or their largest and smallest values, 2 W of them
//   code of a key          encodes r = H (key - center), with H the Hadamard matrix and the
//                          center the block's mean or the middle of its bounds, as summarised:
//                          c = clamp(floor(r / step), -2, 1), step = CODE_STEP * the root mean square, and
//                          a factor f = |r|^2 / (r . (c + 1/2)), so that f (c + 1/2) . r = |r|^2
//                          (after RaBitQ, Gao and Long 2024, arXiv 2405.12497)
//
// A block's score is its softmax mass among the blocks between sinks and window, summed over the queries
// that share it; a key's score is its mass among the keys of the best blocks. Of equal scores the first
// wins. Widths are padded with zeros to multiples of SELECT_WIDTH.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "cache_rows.h"
#include "operands.h"

constexpr int64_t LINE = 64;       // bytes of a cache line
constexpr int64_t TOUCHED = 8;     // blocks whose codes are loaded together
constexpr int64_t TOGETHER = 256;  // blocks that are scored at a time
constexpr float SUMMARY_LARGEST = 63.0f, QUERY_LARGEST = 127.0f, CODE_STEP = 0.9957f;

inline int64_t select_width(int64_t W) { return (W + SELECT_WIDTH - 1) / SELECT_WIDTH * SELECT_WIDTH; }
inline int64_t summary_width(const HsSelect& select, int64_t W) {
    return select_width(W) * (select.summary == SUMMARY_BOUNDS ? 2 : 1);
}

inline float largest_of(const float* x, int64_t n) {
    float largest = 0.0f;
    for (int64_t i = 0; i < n; ++i) largest = std::max(largest, std::fabs(x[i]));
    return largest;
}

class Selector {
  public:
    explicit Selector(const HsStep& step) : s(step), rule(step.select) {}

    // Sets the layer of the following calls.
    void use(const HsAttention& l) {
        W = l.head_dim, Wp = select_width(W), Ws = summary_width(rule, W);
        K = l.num_kv_heads, G = l.num_heads / K, scale = l.scores.scale;
    }

    // Allocates the position lists of `rows` rows, for up to `most_heads` key-value heads.
    void take(Arena& arena, int64_t rows, int64_t most_heads) {
        if (is_on()) list = arena.take<int32_t>(rows * most_heads * longest());
    }

    bool is_on() const { return rule.block > 0; }

    // Maximum positions that a token attends to if they are selected.
    int64_t longest() const {
        const int64_t most = rule.sinks + rule.top + rule.window + rule.block;
        return std::min(most, s.context_length);
    }

    // Maximum positions that any token attends to.
    int64_t longest_of_all() const {
        return is_on() ? std::max(longest(), std::min(rule.full, s.context_length)) : s.context_length;
    }

    // The first position in the window of a token at `position`.
    int64_t window_begin(int64_t position) const {
        return std::max<int64_t>(0, position + 1 - rule.window) / rule.block * rule.block;
    }

    // True if a token attends to all positions.
    bool takes_all(int64_t position) const {
        return position < rule.full || window_begin(position) <= rule.sinks + rule.top;
    }

    int64_t num_taken(int64_t position) const {
        if (takes_all(position)) return position + 1;
        return rule.sinks + rule.top + position + 1 - window_begin(position);
    }

    // Index into the tables of the key block that contains a position.
    int64_t block_at(int32_t sequence, int64_t position, int64_t kv_head) const {
        const int64_t length = s.table->block_length, own = (length + rule.block - 1) / rule.block;
        const int64_t block =
            s.table->block[sequence * s.table->blocks_per_sequence + position / length];
        return (block * K + kv_head) * own + position % length / rule.block;
    }

    // Computes summary and codes of the block from `position` on, from its stored keys.
    void summarise(const HsAttention& l, int32_t sequence, int64_t position, int64_t kv_head,
                   const uint8_t* key, int64_t key_bytes) const {
        const int64_t B = rule.block, at = block_at(sequence, position, kv_head);
        static thread_local std::vector<float> memory;
        if (memory.size() < static_cast<size_t>((B + 2) * Wp)) memory.resize((B + 2) * Wp);
        float* keys = memory.data();
        kernels().unpack_rows[s.key_kind]({key, key_bytes, W, nullptr, B}, keys, 0, B);
        uint8_t* summary = l.summary + at * Ws;
        const float unit = store_summary(keys, summary, keys + B * Wp);
        l.summary_unit[at] = unit;
        float* center = keys + B * Wp;
        for (int64_t i = 0; i < W; ++i)
            center[i] = num_parts() == 2
                            ? static_cast<float>(summary[i] + summary[Wp + i] - 128) * (0.5f * unit)
                            : static_cast<float>(summary[i] - 64) * unit;
        for (int64_t b = 0; rule.is_coded && b < B; ++b) {
            float* own = keys + b * W;
            for (int64_t i = 0; i < W; ++i) own[i] -= center[i];
            l.code_factor[at * B + b] = store_code(own, l.code + (at * B + b) * (Wp / 4));
        }
    }

    // Finds the positions [num_taken], ascending, that row `t` of a batch, at `position`, reads for the
    // queries [G, stride] of a key-value head. Not for rows that attend to all positions.
    void choose(const HsAttention& l, int64_t t, int32_t sequence, int64_t position, int64_t kv_head,
                const float* query, int64_t stride) const {
        int32_t* to = of(t, kv_head);
        const int64_t window = window_begin(position), sinks = rule.sinks;
        for (int64_t i = 0; i < sinks; ++i) to[i] = static_cast<int32_t>(i);
        search(l, sequence, kv_head, window, query, stride, to + sinks);
        to += sinks + rule.top;
        for (int64_t i = window; i <= position; ++i) *to++ = static_cast<int32_t>(i);
    }

    int32_t* of(int64_t t, int64_t kv_head) const { return list + (t * K + kv_head) * longest(); }

  private:
    int64_t num_parts() const { return rule.summary == SUMMARY_BOUNDS ? 2 : 1; }

    // Stores the summary of keys [block, W]; returns its unit. `part`: scratch for 2 W values.
    float store_summary(const float* keys, uint8_t* to, float* part) const {
        std::copy_n(keys, W, part);
        std::copy_n(keys, W, part + W);
        for (int64_t b = 1; b < rule.block; ++b)
            for (int64_t i = 0; i < W; ++i) {
                const float key = keys[b * W + i];
                if (num_parts() == 1) {
                    part[i] += key;
                } else {
                    part[i] = std::max(part[i], key);
                    part[W + i] = std::min(part[W + i], key);
                }
            }
        const float share = 1.0f / static_cast<float>(rule.block);
        for (int64_t i = 0; num_parts() == 1 && i < W; ++i) part[i] *= share;
        bool is_finite = true;
        for (int64_t i = 0; i < rule.block * W; ++i) is_finite &= std::isfinite(keys[i]);
        const float unit = is_finite ? largest_of(part, num_parts() * W) / SUMMARY_LARGEST : NAN;
        const float inverse = inverse_of(unit);
        for (int64_t p = 0; p < num_parts(); ++p)
            for (int64_t i = 0; i < Wp; ++i) {
                const float value = i < W ? std::nearbyint(part[p * W + i] * inverse) : 0.0f;
                to[p * Wp + i] = static_cast<uint8_t>(64 + to_whole(value));
            }
        return unit;
    }

    // Clamps to -127 .. 127; NaN becomes 0 (the unit of keys that are not finite is NaN).
    static int to_whole(float value) {
        return value == value ? static_cast<int>(std::clamp(value, -127.0f, 127.0f)) : 0;
    }

    // Rotates r [W] in place, unless the cache stores rotated keys, and stores its code; returns
    // the factor.
    float store_code(float* r, uint8_t* to) const {
        if (!s.is_key_rotated) turn_by_hadamard(r, W, W & -W);
        float squares = 0.0f, along = 0.0f;
        for (int64_t i = 0; i < W; ++i) squares += r[i] * r[i];
        const float step = CODE_STEP * std::sqrt(squares / static_cast<float>(W));
        const float inverse = inverse_of(step);
        std::memset(to, 0, Wp / 4);
        for (int64_t i = 0; i < W; ++i) {
            const int level = std::clamp(to_whole(std::floor(r[i] * inverse)), -2, 1);
            along += r[i] * (static_cast<float>(level) + 0.5f);
            to[i / 64 * 16 + i % 16] |= static_cast<uint8_t>((level + 2) << i % 64 / 16 * 2);
        }
        return along > 0.0f ? squares / along : 0.0f;
    }

    // Stores a query as bytes, `parts` times; returns its unit. If split, the first copy has the positive
    // values and the second the negative ones.
    float store_query(const float* x, int64_t parts, bool is_split, int8_t* to) const {
        const float unit = largest_of(x, W) / QUERY_LARGEST, inverse = inverse_of(unit);
        for (int64_t p = 0; p < parts; ++p)
            for (int64_t i = 0; i < Wp; ++i) {
                int value = i < W ? to_whole(std::nearbyint(x[i] * inverse)) : 0;
                if (is_split) value = p == 0 ? std::max(value, 0) : std::min(value, 0);
                to[p * Wp + i] = static_cast<int8_t>(value);
            }
        return unit;
    }

    static int32_t sum_of_bytes(const int8_t* x, int64_t n) {
        int32_t sum = 0;
        for (int64_t i = 0; i < n; ++i) sum += x[i];
        return sum;
    }

    struct Scratch {
        std::vector<const uint8_t*> row;
        std::vector<int8_t> query;
        std::vector<int32_t> dot, chosen, offset, bits;
        std::vector<float> score, share, center, turned, unit, by;
        std::vector<int64_t> at;  // of blocks in the tables
    };

    // Writes `top` positions between the sinks and the window, ascending, to `to`.
    void search(const HsAttention& l, int32_t sequence, int64_t kv_head, int64_t window,
                const float* query, int64_t stride, int32_t* to) const {
        static thread_local Scratch room;
        const int64_t B = rule.block, first = rule.sinks / B, n = window / B - first;
        const uint32_t size = static_cast<uint32_t>(B);
        const int64_t wanted = rule.is_coded ? rule.candidates * rule.top : rule.top;
        const int64_t num_best = std::min(n, (wanted + B - 1) / B);
        find_blocks(l, sequence, kv_head, first, n, room);
        if (num_best < n) {
            score_blocks(n, num_parts() == 2, query, stride, room, room.score);
            room.chosen.resize(num_best);
            take_largest(n, num_best, room, room.chosen.data());
            keep_chosen(num_best, room);
        } else {
            room.chosen.resize(n);
            std::iota(room.chosen.begin(), room.chosen.end(), 0);
        }
        if (!rule.is_coded) {
            for (int64_t c = 0, i = 0; c < num_best; ++c)
                for (int64_t b = 0; b < B && i < rule.top; ++b, ++i)
                    to[i] = static_cast<int32_t>((first + room.chosen[c]) * B + b);
            return;
        }
        score_blocks(num_best, false, query, stride, room, room.center);
        score_codes(l, num_best, query, stride, room);
        take_largest(num_best * B, rule.top, room, to);
        for (int64_t i = 0; i < rule.top; ++i)
            to[i] = static_cast<int32_t>((first + room.chosen[to[i] / size]) * B + to[i] % size);
    }

    // Finds the `k` of n columns of the scores [G, n] that get the largest share of the softmax
    // mass; `chosen` is ascending.
    void take_largest(int64_t n, int64_t k, Scratch& room, int32_t* chosen) const {
        room.share.resize(n), room.bits.resize(n);
        kernels().share_mass(room.score.data(), G, n, room.share.data());
        kernels().choose_largest(room.share.data(), n, k, room.bits.data(), chosen);
    }

    // Looks up n blocks from `first` on in the tables.
    void find_blocks(const HsAttention& l, int32_t sequence, int64_t kv_head, int64_t first, int64_t n,
                     Scratch& room) const {
        room.row.resize(n), room.at.resize(n), room.unit.resize(n);
        const int64_t own = s.table->block_length / rule.block;  // whole key blocks of a cache block
        for (int64_t i = 0; i < n;) {
            const int64_t at = block_at(sequence, (first + i) * rule.block, kv_head) - i;
            const int64_t end = own ? std::min(n, i + own - (first + i) % own) : n;
            for (; i < end; ++i) {
                room.at[i] = at + i;
                room.row[i] = l.summary + (at + i) * Ws;
                room.unit[i] = l.summary_unit[at + i];
            }
        }
    }

    void keep_chosen(int64_t num_best, Scratch& room) const {
        for (int64_t c = 0; c < num_best; ++c) {
            const int32_t chosen = room.chosen[c];
            room.at[c] = room.at[chosen];
            room.row[c] = room.row[chosen];
            room.unit[c] = room.unit[chosen];
        }
    }

    // Computes attention scores [G, n] from the summaries of n blocks: those of their centers or,
    // if queries are split, upper bounds (up to rounding) for all keys within the blocks' bounds.
    void score_blocks(int64_t n, bool is_split, const float* query, int64_t stride, Scratch& room,
                      std::vector<float>& score) const {
        room.query.resize(G * Ws), room.offset.resize(G), room.by.resize(G);
        room.dot.resize(G * TOGETHER), score.resize(G * n);
        const float share = is_split || num_parts() == 1 ? 1.0f : 0.5f;
        for (int64_t g = 0; g < G; ++g) {
            int8_t* own = room.query.data() + g * Ws;
            room.by[g] = store_query(query + g * stride, num_parts(), is_split, own) * (share * scale);
            room.offset[g] = 64 * sum_of_bytes(own, Ws);
        }
        for (int64_t i = 0; i < n; i += TOGETHER) {
            const int64_t m = std::min(TOGETHER, n - i);
            for (int64_t j = i; j < i + m; ++j) touch(room.row[j], Ws);
            kernels().dot_bytes({room.row.data() + i, m, Ws, G, m, room.query.data(), room.dot.data()});
            kernels().scale_dots({room.dot.data(), m, G, n, 0, 1, room.offset.data(),
                                  room.unit.data() + i, room.by.data(), nullptr, score.data() + i});
        }
    }

    // Loads all cache lines of `bytes` from an aligned address on, so that their misses overlap. On a Zen 5,
    // prefetching one scattered block at a time, eight ahead, took three times as long.
    static void touch(const void* from, int64_t bytes) {
        const uint8_t* p = static_cast<const uint8_t*>(from);
        for (int64_t i = 0; i < bytes; i += LINE) {
            const uint8_t byte = p[i];
            asm volatile("" ::"r"(byte));
        }
    }

    // Loads the codes and factors of the blocks `at` [n].
    void touch_codes(const HsAttention& l, const int64_t* at, int64_t n) const {
        const int64_t B = rule.block, length = B * (Wp / 4);
        for (int64_t i = 0; i < n; ++i) {
            touch(l.code + at[i] * length, length);
            touch(l.code_factor + at[i] * B, B * static_cast<int64_t>(sizeof(float)));
        }
    }

    // Computes attention scores, room.score [G, num_best * B], from the codes of the chosen blocks' keys.
    void score_codes(const HsAttention& l, int64_t num_best, const float* query, int64_t stride,
                     Scratch& room) const {
        const int64_t B = rule.block, m = num_best * B;
        room.query.resize(G * Wp), room.offset.resize(G), room.by.resize(G);
        room.dot.resize(G * B), room.score.resize(G * m), room.turned.resize(W);
        for (int64_t g = 0; g < G; ++g) {
            std::copy_n(query + g * stride, W, room.turned.data());
            if (!s.is_key_rotated) turn_by_hadamard(room.turned.data(), W, W & -W);
            int8_t* own = room.query.data() + g * Wp;
            const float unit = store_query(room.turned.data(), 1, false, own);
            // A code c is stored as bits = c + 2, so c + 1/2 = (2 bits - 3) / 2.
            room.offset[g] = 3 * sum_of_bytes(own, Wp);
            room.by[g] = 0.5f * unit * scale;
        }
        for (int64_t c = 0; c < num_best; ++c) {
            if (c % TOUCHED == 0) touch_codes(l, room.at.data() + c, std::min(TOUCHED, num_best - c));
            const uint8_t* code = l.code + room.at[c] * B * (Wp / 4);
            kernels().dot_codes({&code, B, Wp, G, B, room.query.data(), room.dot.data()});
            kernels().scale_dots({room.dot.data(), B, G, m, num_best, 2, room.offset.data(),
                                  l.code_factor + room.at[c] * B, room.by.data(),
                                  room.center.data() + c, room.score.data() + c * B});
        }
    }

    const HsStep& s;
    const HsSelect& rule;
    int64_t W = 0, Wp = 0, Ws = 0, K = 0, G = 0;
    float scale = 0.0f;
    int32_t* list = nullptr;
};
