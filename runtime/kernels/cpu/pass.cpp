// Several tokens through a block of neurons, each through those that fire for it.
//
// Which they are stands in masks: a word for PASS_TILE tokens and a neuron. Products with the rows
// of gate and up go by blocks of neurons; then each token's hidden values are gathered into a list,
// and the products with the rows of down go by pieces of columns. Each sum is in an order that depends
// on the width alone, or is that of the neurons.
#include "pass.h"

#include <atomic>

#include "neurons.h"

namespace {

// Neurons whose rows of gate or up are in a panel at a time, and columns of them. A panel goes with all
// tokens, which are read from the third cache where they are many: 512 tokens of width 2048 took 6 to
// 14 % longer by 64 rows, and no less by 256.
constexpr int64_t DOT_ROWS = 128, DOT_COLUMNS = 256;
// Rows of down in a panel: numbers of them are bytes. A token's list is cut at each, which is a
// branch that no processor foresees: by 128 rows it took 4 to 9 % longer.
constexpr int64_t ADD_ROWS = 256;
// What the tokens have of a piece of columns stays in the second cache.
constexpr int64_t SUM_FLOATS = 64 * 1024, MOST_COLUMNS = 256;

int64_t up_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// One tile's pairs among a block of neurons: where they begin, and their numbers as in PairList.
struct TileList {
    int64_t at, fours, twos, ones;
};

// Memory of one thread.
struct Worker {
    // For items of so many tiles, and of so many columns.
    Worker(Arena& arena, int64_t tiles, int64_t columns) {
        const int64_t pairs = tiles * (DOT_ROWS * PASS_TILE + 8);
        panel = arena.take<float>(std::max(DOT_ROWS * DOT_COLUMNS, ADD_ROWS * columns));
        row = arena.take<uint16_t>(pairs), token = arena.take<uint16_t>(pairs);
        sum = arena.take<float>(pairs);
        list = arena.take<TileList>(tiles);
    }

    float *panel, *sum;
    uint16_t *row, *token;
    TileList* list;
};

class Pass {
  public:
    Pass(const SparkPass& pass, uint8_t* memory)
        : p(pass), arena(memory), T(p.num_tokens), D(p.width), N(p.block.num_neurons),
          tiles((T + PASS_TILE - 1) / PASS_TILE), dot_blocks((N + DOT_ROWS - 1) / DOT_ROWS),
          add_blocks((N + ADD_ROWS - 1) / ADD_ROWS), stride_(up_to(N, ADD_ROWS)),
          act_{p.activation, MODE_PREDICTED, p.threshold} {
        const int64_t granule = up_to(block_values(p.block.down.kind), kernels().add_columns);
        const int64_t fair = up_to(D, 4 * p.num_workers) / (4 * p.num_workers);
        const int64_t fitting = std::min(MOST_COLUMNS, SUM_FLOATS / T) / granule * granule;
        columns_ = std::max(granule, std::min(fitting, up_to(fair, granule)));
        mask_ = arena.take<uint32_t>(tiles * stride_);
        any_ = arena.take<uint32_t>(stride_);
        tile_pairs_ = arena.take<int64_t>(tiles + 1);
        chosen_ = arena.take<uint8_t>(stride_);
        num_chosen_ = arena.take<int64_t>(add_blocks);
        first_ = arena.take<int32_t>(T * (add_blocks + 1));
        const int64_t most = std::min(p.most, T * N);
        index_ = arena.take<uint8_t>(most);
        value_ = arena.take<float>(most);
        hidden_ = p.gate ? p.gate : arena.take<float>(T * N);
        hidden_stride_ = p.gate ? p.gate_stride : N;
        const int64_t before = arena.used();
        Worker first(arena, item_tiles(), columns_);
        worker_ = before, worker_bytes_ = arena.used() - before;
        memory_ = memory;
    }

    int64_t num_bytes() const { return worker_ + p.num_workers * worker_bytes_; }

    void run(SparkPass& out) {
        for_each(tiles, N * T, [&](Worker&, int64_t k) { mark(k); });
        out.num_pairs = count_pairs();
        if (out.num_pairs > p.most) return;
        out.num_named = out.num_open = count_neurons();
        if (!p.gate || p.block.up.data) {
            const int64_t groups = num_groups(dot_blocks);
            const int64_t work = out.num_pairs * D;
            for_each(dot_blocks * groups, work, [&](Worker& worker, int64_t i) {
                const int64_t g = i % groups;
                hide(worker, i / groups, tiles * g / groups, tiles * (g + 1) / groups);
            });
            if (!p.gate) {
                for_each(tiles, N * T, [&](Worker&, int64_t k) { count_marks(k); });
                out.num_open = count_neurons();
            }
        }
        for_each(tiles, out.num_pairs, [&](Worker&, int64_t k) { gather(k); });
        const int64_t pieces = (D + columns_ - 1) / columns_, groups = num_groups(pieces);
        for_each(pieces * groups, out.num_pairs * D, [&](Worker& worker, int64_t i) {
            const int64_t g = i % groups;
            add(worker, i / groups * columns_, tiles * g / groups, tiles * (g + 1) / groups);
        });
    }

  private:
    // body(worker, item) for every item, by as many threads as the work is worth.
    template <class Body>
    void for_each(int64_t num_items, int64_t work, const Body& body) {
        const int64_t workers = std::min<int64_t>(p.num_workers, num_items);
        std::atomic<int64_t> next{0};
        split(work, workers, 1, 1, [&](int64_t w0, int64_t) {
            Arena arena(memory_ + worker_ + w0 * worker_bytes_);
            Worker worker(arena, item_tiles(), columns_);
            for (int64_t i; (i = next++) < num_items;) body(worker, i);
        });
    }

    // Tokens are divided too where there would be less than four items a thread.
    int64_t num_groups(int64_t num_items) const {
        if (p.num_workers == 1) return 1;
        return std::min(tiles, (4 * p.num_workers + num_items - 1) / num_items);
    }

    int64_t item_tiles() const {
        const int64_t groups = num_groups(dot_blocks);
        return (tiles + groups - 1) / groups;
    }

    int64_t tile_size(int64_t k) const { return std::min(PASS_TILE, T - k * PASS_TILE); }

    void mark(int64_t k) {
        uint32_t* mask = mask_ + k * stride_;
        std::fill_n(mask, stride_, 0u);
        const bool is_magnitude = p.activation >= ACTIVATION_SILU;
        const bool has_limit = is_magnitude || p.activation == ACTIVATION_FATRELU;
        for (int64_t i = 0; i < tile_size(k); ++i) {
            const int64_t t = k * PASS_TILE + i;
            if (p.gate)
                kernels().mark_gates(p.gate + t * p.gate_stride, N, has_limit ? p.threshold : 0.0f,
                                     is_magnitude, 1u << i, mask);
            else
                kernels().mark_named(p.named + t * p.named_stride, N, 1u << i, mask);
        }
        count_marks(k);
    }

    void count_marks(int64_t k) {
        int64_t count = 0;
        for (int64_t n = 0; n < stride_; ++n) {
            uint32_t v = mask_[k * stride_ + n];
            v -= v >> 1 & 0x55555555u;
            v = (v & 0x33333333u) + (v >> 2 & 0x33333333u);
            count += ((v + (v >> 4)) & 0x0f0f0f0fu) * 0x01010101u >> 24;
        }
        tile_pairs_[k] = count;
    }

    int64_t count_pairs() const {
        int64_t count = 0;
        for (int64_t k = 0; k < tiles; ++k) count += tile_pairs_[k];
        return count;
    }

    // Neurons of which any token needs the row; their numbers in each block.
    int64_t count_neurons() {
        std::fill_n(any_, stride_, 0u);
        for (int64_t k = 0; k < tiles; ++k)
            for (int64_t n = 0; n < stride_; ++n) any_[n] |= mask_[k * stride_ + n];
        int64_t count = 0;
        for (int64_t b = 0; b < add_blocks; ++b) {
            num_chosen_[b] = choose(any_ + b * ADD_ROWS, ADD_ROWS, chosen_ + b * ADD_ROWS);
            count += num_chosen_[b];
        }
        return count;
    }

    static int64_t choose(const uint32_t* any, int64_t n, uint8_t* chosen) {
        int64_t count = 0;
        for (int64_t i = 0; i < n; ++i) {
            chosen[count] = static_cast<uint8_t>(i);
            count += any[i] != 0;
            if (count == n) break;
        }
        return count;
    }

    Rows rows_from(const SparkMatrix& m, int64_t n) const {
        if (p.block.row) return {m.data, m.stride, D, p.block.row + n, N - n};
        return {m.data + n * m.stride, m.stride, D, nullptr, N - n};
    }

    int64_t row_of(int64_t n) const { return p.block.row ? p.block.row[n] : n; }
    float& hidden(int64_t t, int64_t n) const { return hidden_[t * hidden_stride_ + n]; }

    // Block b of the neurons and tiles k0 .. k1-1: what the down projection takes.
    void hide(Worker& worker, int64_t b, int64_t k0, int64_t k1) {
        if (!p.gate) {
            dot(worker, p.block.gate, b, k0, k1);
            for (int64_t k = k0; k < k1; ++k) open(worker, b, k, worker.list[k - k0]);
        }
        if (!p.block.up.data) return;
        const SparkMatrix& up = p.block.up;
        dot(worker, up, b, k0, k1);
        for (int64_t k = k0; k < k1; ++k)
            each_pair(worker, b, k, worker.list[k - k0], [&](int64_t t, int64_t n, float value) {
                if (up.bias) value += up.bias[row_of(n)];
                if (p.activation == ACTIVATION_DRELU && value < 0.0f) value = 0.0f;
                hidden(t, n) *= value;
            });
    }

    // From gates to what they let through; the mask keeps what fires.
    void open(Worker& worker, int64_t b, int64_t k, const TileList& list) {
        uint32_t* mask = mask_ + k * stride_;
        std::fill_n(mask + b * DOT_ROWS, DOT_ROWS, 0u);
        const float* bias = p.block.gate.bias;
        each_pair(worker, b, k, list, [&](int64_t t, int64_t n, float value) {
            if (bias) value += bias[row_of(n)];
            const uint32_t fires = act_.act(value);
            hidden(t, n) = value;
            mask[n] |= fires << t % PASS_TILE;
        });
    }

    template <class Body>
    void each_pair(const Worker& worker, int64_t b, int64_t k, const TileList& list,
                   const Body& body) {
        auto part = [&](int64_t at, int64_t count) {
            for (int64_t i = at; i < at + count; ++i)
                body(k * PASS_TILE + worker.token[i] / PASS_CHUNK,
                     b * DOT_ROWS + worker.row[i] / PASS_CHUNK, worker.sum[i]);
        };
        part(list.at, list.fours);
        part(list.at + list.fours, list.twos);
        part(list.at + list.fours + up_to(list.twos, 4), list.ones);
    }

    // worker.sum: the products of the pairs that are left, in the order of worker.list.
    void dot(Worker& worker, const SparkMatrix& m, int64_t b, int64_t k0, int64_t k1) {
        uint32_t any[DOT_ROWS] = {};
        int64_t pairs = 0;
        for (int64_t k = k0; k < k1; ++k) {
            const uint32_t* mask = mask_ + k * stride_ + b * DOT_ROWS;
            for (int64_t n = 0; n < DOT_ROWS; ++n) any[n] |= mask[n];
            worker.list[k - k0] = list_pairs(mask, pairs, worker.row, worker.token);
            const TileList& list = worker.list[k - k0];
            pairs = list.at + list.fours + up_to(list.twos, 4) + up_to(list.ones, 4);
        }
        std::fill_n(worker.sum, pairs, 0.0f);
        uint8_t chosen[DOT_ROWS];
        const int64_t num_chosen = choose(any, DOT_ROWS, chosen);
        const Rows rows = rows_from(m, b * DOT_ROWS);
        for (int64_t d0 = 0; d0 < D; d0 += DOT_COLUMNS) {
            const int64_t d1 = std::min(d0 + DOT_COLUMNS, D);
            kernels().unpack_panel[m.kind](rows, chosen, num_chosen, d0, d1,
                                           {worker.panel, DOT_ROWS, PASS_CHUNK});
            for (int64_t d = d0; d < d1; d += PASS_CHUNK) {
                const float* panel = worker.panel + (d - d0) * DOT_ROWS;
                const int64_t columns = up_to(std::min(PASS_CHUNK, D - d), BLOCK);
                for (int64_t k = k0; k < k1; ++k) {
                    const TileList& list = worker.list[k - k0];
                    const float* x = p.x + (d / PASS_CHUNK * T + k * PASS_TILE) * PASS_CHUNK;
                    kernels().dot_pairs({worker.row + list.at, worker.token + list.at, list.fours,
                                         list.twos, list.ones},
                                        panel, x, columns, worker.sum + list.at);
                }
            }
        }
    }

    static TileList list_pairs(const uint32_t* mask, int64_t at, uint16_t* row, uint16_t* token) {
        uint16_t two_row[2 * DOT_ROWS], two[2 * DOT_ROWS], one_row[DOT_ROWS], one[DOT_ROWS];
        TileList list = {at, 0, 0, 0};
        row += at, token += at;
        for (int64_t n = 0; n < DOT_ROWS; ++n) {
            // Written as fours; what does not fill one is overwritten.
            int64_t end = list.fours;
            for (uint32_t m = mask[n]; m; m &= m - 1) {
                row[end] = static_cast<uint16_t>(n * PASS_CHUNK);
                token[end++] = static_cast<uint16_t>(__builtin_ctz(m) * PASS_CHUNK);
            }
            if ((end - list.fours) & 1) {
                one_row[list.ones] = row[--end];
                one[list.ones++] = token[end];
            }
            if ((end - list.fours) & 2) {
                for (int i = 0; i < 2; ++i) {
                    two_row[list.twos] = row[--end];
                    two[list.twos++] = token[end];
                }
            }
            list.fours = end;
        }
        auto append = [&](const uint16_t* rows, const uint16_t* tokens, int64_t count, int64_t to) {
            for (int64_t i = 0; i < up_to(count, 4); ++i) {
                // The last pair again fills its four.
                const int64_t from = i < count ? i : count - 1;
                row[to + i] = rows[from], token[to + i] = tokens[from];
            }
        };
        append(two_row, two, list.twos, list.fours);
        append(one_row, one, list.ones, list.fours + up_to(list.twos, 4));
        return list;
    }

    // The lists of a tile's tokens, one behind the other, neurons ascending.
    void gather(int64_t k) {
        const uint32_t* mask = mask_ + k * stride_;
        int64_t at = 0;
        for (int64_t before = 0; before < k; ++before) at += tile_pairs_[before];
        int32_t cursor[PASS_TILE] = {};
        for (int64_t n = 0; n < N; ++n)
            for (uint32_t m = mask[n]; m; m &= m - 1) ++cursor[__builtin_ctz(m)];
        for (int64_t i = 0; i < PASS_TILE; ++i) {
            const int32_t count = cursor[i];
            cursor[i] = static_cast<int32_t>(at), at += count;
        }
        for (int64_t b = 0; b <= add_blocks; ++b) {
            for (int64_t i = 0; i < tile_size(k); ++i)
                first_[(k * PASS_TILE + i) * (add_blocks + 1) + b] = cursor[i];
            for (int64_t n = b * ADD_ROWS; n < std::min(N, (b + 1) * ADD_ROWS); ++n)
                for (uint32_t m = mask[n]; m; m &= m - 1) {
                    const int64_t i = __builtin_ctz(m), to = cursor[i]++;
                    index_[to] = static_cast<uint8_t>(n - b * ADD_ROWS);
                    value_[to] = hidden(k * PASS_TILE + i, n);
                }
        }
    }

    // Columns from d0 on of y, for the tokens of tiles k0 .. k1-1.
    void add(Worker& worker, int64_t d0, int64_t k0, int64_t k1) {
        const int64_t t0 = k0 * PASS_TILE, t1 = std::min(T, k1 * PASS_TILE);
        const int64_t d1 = std::min(d0 + columns_, D), width = kernels().add_columns;
        for (int64_t b = 0; b < add_blocks; ++b) {
            const SparkMatrix& down = p.block.down;
            kernels().unpack_panel[down.kind](rows_from(down, b * ADD_ROWS), chosen_ + b * ADD_ROWS,
                                              num_chosen_[b], d0, d1,
                                              {worker.panel, ADD_ROWS, width});
            for (int64_t d = d0; d < d1; d += width)
                kernels().add_pairs(worker.panel + (d - d0) * ADD_ROWS, index_, value_,
                                    first_ + t0 * (add_blocks + 1) + b, add_blocks + 1, t1 - t0,
                                    p.y + (d / PASS_CHUNK * T + t0) * PASS_CHUNK + d % PASS_CHUNK);
        }
    }

    const SparkPass& p;
    Arena arena;
    const int64_t T, D, N, tiles, dot_blocks, add_blocks, stride_;
    const Gate act_;
    int64_t columns_, worker_, worker_bytes_, hidden_stride_;
    uint8_t* memory_;
    uint32_t *mask_, *any_;
    uint8_t *chosen_, *index_;
    int64_t *tile_pairs_, *num_chosen_;
    int32_t* first_;
    float *value_, *hidden_;
};

bool fits(const SparkPass& p) {
    if (p.width < 1 || p.width > INT32_MAX || p.num_tokens < 1 || p.most < 0) return false;
    if (p.activation < 0 || p.activation >= NUM_ACTIVATIONS || !p.x || !p.y) return false;
    const int64_t N = p.block.num_neurons;
    if (p.num_tokens > INT32_MAX / std::max<int64_t>(N, 1) || p.num_tokens > 1 << 20) return false;
    if (p.gate ? p.gate_stride < N : !p.named || p.named_stride < N) return false;
    return fits(p.block, p.width, N, p.block.up.data != nullptr);
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int64_t spark_pass_bytes(SparkPass* pass) {
    pass->num_workers = num_threads();
    return fits(*pass) ? Pass(*pass, nullptr).num_bytes() : -1;
}

EXPORT void spark_pass(SparkPass* pass) { Pass(*pass, pass->workspace).run(*pass); }
