// See policy.h.
#include "policy.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "levels.h"

namespace {

constexpr double RECENT = 0.95;  // decay of step_s, free_s and cold_share per step
constexpr double ROOM =
    0.9;  // the share of a step's time for copies, and of its idle time for gathering
constexpr double PRICE_UP = 1.1, PRICE_DOWN = 0.97, LEAST_PRICE = 1e-3;
constexpr int64_t FIRST_STEPS = 16;   // before swapping may start
constexpr double LEAST_LOSS = 0.002;  // the share of a step whose loss stops swapping

inline int64_t padded(int64_t F) { return (F + 31) / 32 * 32; }
inline bool has(const uint32_t* bits, int64_t j) { return bits[j / 32] >> (j % 32) & 1; }
inline void put(uint32_t* bits, int64_t j) { bits[j / 32] |= 1u << (j % 32); }
inline void remove(uint32_t* bits, int64_t j) { bits[j / 32] &= ~(1u << (j % 32)); }

// average += rate * (value - average), in place, for the bits of successive tokens, `stride` words apart;
// `step` is 0 if all have the first rate. F is a multiple of 32.
FOR_EACH_LEVEL void average(float* values, const uint32_t* bits, int64_t stride, int64_t tokens,
                            int64_t F, const float* rates, int64_t step) {
    for (int64_t first = 0; first < F; first += 32) {
        float value[32];
        std::memcpy(value, values + first, sizeof(value));
        for (int64_t t = 0; t < tokens; ++t) {
            const uint32_t word = bits[t * stride + first / 32];
            const float rate = rates[t * step];
            for (int64_t i = 0; i < 32; ++i) {
                const float is_read = word & MASKS.of[i] ? 1.0f : 0.0f;
                value[i] += rate * (is_read - value[i]);
            }
        }
        std::memcpy(values + first, value, sizeof(value));
    }
}

// Counts the neurons that any of the tokens reads: all, those in slots, and those in slots by plan.
FOR_EACH_LEVEL void count(const uint32_t* bits, int64_t stride, int64_t tokens, int64_t W,
                          const uint32_t* resident, const uint32_t* planned, int64_t& read,
                          int64_t& hits, int64_t& planned_hits) {
    for (int64_t w = 0; w < W; ++w) {
        uint32_t word = 0;
        for (int64_t t = 0; t < tokens; ++t) word |= bits[t * stride + w];
        read += __builtin_popcount(word);
        hits += __builtin_popcount(word & resident[w]);
        planned_hits += __builtin_popcount(word & planned[w]);
    }
}

// The expected frequencies of reads, by which neurons are ranked.
FOR_EACH_LEVEL void worths(const float* score, const float* burst, int64_t F, float weight,
                           float* worth) {
    for (int64_t j = 0; j < F; ++j) worth[j] = score[j] + weight * (burst[j] - score[j]);
}

// The seconds of a layer in a step that reads this many neurons, `hits` of them in slots.
double layer_seconds(const CacheLayer& layer, int64_t read, int64_t hits) {
    const double hot = layer.hot_s + hits * layer.hot_row_s;
    const double cold = layer.cold_s + (read - hits) * layer.cold_row_s;
    return std::max(hot, cold);
}

void measure(NeuronCache& c, const uint32_t* bits, int64_t rows) {
    const int64_t W = (c.num_neurons + 31) / 32;
    const double recent = c.num_steps ? RECENT : 0.0;
    double step = c.rest_s, planned = c.rest_s, busy = 0.0, gather = 0.0, copy = 0.0;
    for (int64_t l = 0; l < c.num_layers; ++l) {
        CacheLayer& layer = c.layer[l];
        int64_t read = 0, hits = 0, planned_hits = 0;
        count(bits + l * W, c.num_layers * W, rows, W, layer.resident, layer.planned, read, hits,
              planned_hits);
        if (0 < layer.num_slots && layer.num_slots < c.num_neurons)  // other layers have no swaps
            layer.read += read, layer.hits += hits, layer.planned_hits += planned_hits;
        const double hot = layer.hot_s + hits * layer.hot_row_s;
        const double cold = layer.cold_s + (read - hits) * layer.cold_row_s;
        layer.cold_share = recent * layer.cold_share + (1.0 - recent) * (cold > hot ? 1.0 : 0.0);
        step += layer_seconds(layer, read, hits);
        planned += layer_seconds(layer, read, planned_hits);
        busy += cold;
    }
    for (int64_t i = 0; i < c.num_swaps; ++i) {
        const CacheLayer& layer = c.layer[c.swap[i].layer];
        gather += layer.gather_row_s, copy += layer.copy_row_s;
    }
    const double free = c.are_experts ? 0.0 : std::max(0.0, step - busy), computed = step;
    step += std::max(0.0, gather - free);
    if (c.num_swaps) step = std::max(step, c.copy_s + copy);
    c.cached_s += step, c.planned_s += planned;
    c.step_s = recent * c.step_s + (1.0 - recent) * computed;
    c.free_s = recent * c.free_s + (1.0 - recent) * free;
}

void take_swaps(NeuronCache& c) {
    for (int64_t i = 0; i < c.num_swaps; ++i) {
        const CacheSwap& swap = c.swap[i];
        CacheLayer& layer = c.layer[swap.layer];
        layer.slot[swap.in] = swap.slot, layer.slot[swap.out] = -1;
        layer.id[swap.slot] = swap.in;
        put(layer.resident, swap.in), remove(layer.resident, swap.out);
    }
    c.total_swaps += c.num_swaps;
    c.num_swaps = 0;
}

// Updates a layer's scores with all pending tokens. Only decisions read scores, so each is read and
// written once for several tokens.
void catch_up(NeuronCache& c, int64_t l) {
    CacheLayer& layer = c.layer[l];
    const int64_t W = (c.num_neurons + 31) / 32, stride = c.num_layers * W;
    const int64_t first = layer.num_applied, tokens = c.num_pending - first, F = padded(c.num_neurons);
    layer.num_applied = c.num_pending;
    if (tokens == 0 || layer.num_slots == 0) return;
    const uint32_t* bits = c.pending + first * stride + l * W;
    average(layer.score, bits, stride, tokens, F, c.pending_rate + first, 1);
    const float burst_rate = 1.0f - c.burst_decay;
    if (c.burst_weight > 0.0f) average(layer.burst, bits, stride, tokens, F, &burst_rate, 0);
}

// Updates the scores with the bits [rows, L, W] of tokens.
void learn(NeuronCache& c, const uint32_t* bits, int64_t rows) {
    const int64_t stride = c.num_layers * ((c.num_neurons + 31) / 32);
    for (int64_t r = 0; r < rows; ++r) {
        if (c.num_pending == MOST_PENDING) {
            for (int64_t l = 0; l < c.num_layers; ++l) catch_up(c, l), c.layer[l].num_applied = 0;
            c.num_pending = 0;
        }
        const float first = 1.0f / (c.prior_tokens + static_cast<float>(c.num_rows + 1));
        c.pending_rate[c.num_pending] = std::max(1.0f - c.decay, first);
        std::memcpy(c.pending + c.num_pending * stride, bits + r * stride, stride * sizeof(uint32_t));
        ++c.num_rows, ++c.num_pending;
    }
}

struct Candidate {
    float worth;
    int32_t id;
};

// Pairs the cold neurons of highest worth with the hot ones of lowest worth while the expected gain
// exceeds margin and costs, and adds the gain per step of all these pairs, appended or not, to `gain_s`. With
// `to_plan`, pairs the plan's cold neurons with hot ones outside the plan, whatever the gain, and adds
// none. Appends to c.swap from `count` on, at most most_rows per layer.
class Pairing {
  public:
    int64_t run(NeuronCache& c, int64_t l, bool to_plan, int64_t count, double& gain_s) {
        catch_up(c, l);
        CacheLayer& layer = c.layer[l];
        const double row_s =
            layer.cold_share * layer.cold_row_s - (1.0 - layer.cold_share) * layer.hot_row_s;
        if (layer.num_slots == 0 || !(row_s > 0.0)) return count;
        const double cost = layer.gather_row_s + c.price * layer.copy_row_s;
        const float least = static_cast<float>(c.margin + cost / (row_s * c.stay));
        cold_.clear(), hot_.clear();
        worth_.resize(padded(c.num_neurons));
        worths(layer.score, layer.burst, padded(c.num_neurons), c.burst_weight, worth_.data());
        float lowest = INFINITY;
        for (int64_t s = 0; s < layer.num_slots; ++s) {
            const int32_t j = layer.id[s];
            if (to_plan && has(layer.planned, j)) continue;
            const float value = worth_[j];
            hot_.push_back({value, j}), lowest = std::min(lowest, value);
        }
        for (int64_t j = 0; j < c.num_neurons; ++j) {
            const float value = worth_[j];
            if (to_plan ? !has(layer.planned, j) : !(value - lowest > least)) continue;
            if (layer.slot[j] < 0) cold_.push_back({value, static_cast<int32_t>(j)});
        }
        const auto best = [](const Candidate& a, const Candidate& b) {
            return a.worth > b.worth || (a.worth == b.worth && a.id < b.id);
        };
        const auto worst = [](const Candidate& a, const Candidate& b) {
            return a.worth < b.worth || (a.worth == b.worth && a.id < b.id);
        };
        const int64_t pairs = std::min(cold_.size(), hot_.size());
        std::partial_sort(cold_.begin(), cold_.begin() + pairs, cold_.end(), best);
        std::partial_sort(hot_.begin(), hot_.begin() + pairs, hot_.end(), worst);
        int64_t taken = 0;
        for (int64_t i = 0; i < pairs; ++i) {
            const float more = cold_[i].worth - hot_[i].worth;
            if (!to_plan && !(more > least)) break;
            const double gained = (static_cast<double>(more) - least) * row_s;
            gain_s += to_plan ? 0.0 : gained;
            if (taken++ < c.most_rows)
                c.swap[count++] = {static_cast<int32_t>(l), layer.slot[hot_[i].id], cold_[i].id,
                                   hot_[i].id, gained * c.stay};
        }
        return count;
    }

  private:
    std::vector<Candidate> cold_, hot_;
    std::vector<float> worth_;
};

// Keeps the swaps with the most gain per second of copying that fit into a step, at most most_rows;
// returns their number.
int64_t fitting(NeuronCache& c, int64_t count) {
    const auto per_second = [&](const CacheSwap& swap) {
        const double copy_s = c.layer[swap.layer].copy_row_s;
        return copy_s > 0.0 ? swap.gain_s / copy_s : INFINITY;
    };
    std::sort(c.swap, c.swap + count, [&](const CacheSwap& a, const CacheSwap& b) {
        const double x = per_second(a), y = per_second(b);
        if (x != y) return x > y;
        if (a.gain_s != b.gain_s) return a.gain_s > b.gain_s;
        return a.layer < b.layer || (a.layer == b.layer && a.in < b.in);
    });
    double copy = c.copy_s, gather = 0.0;
    int64_t kept = 0;
    while (kept < count && kept < c.most_rows) {
        const CacheLayer& layer = c.layer[c.swap[kept].layer];
        copy += layer.copy_row_s, gather += layer.gather_row_s;
        const double room_s = c.are_experts ? c.step_s : c.free_s;
        if (copy > ROOM * c.step_s || gather > ROOM * room_s) break;
        ++kept;
    }
    return kept;
}

// Decides whether to swap at all: starts when the scores promise enough, stops when the plan's own
// neurons would recently have been faster.
void switch_on_or_off(NeuronCache& c) {
    if (c.is_always_on) {
        c.is_on = 1;
        return;
    }
    if (!c.is_on && c.num_steps >= FIRST_STEPS && c.gain_s > c.start_gain * c.step_s) {
        c.is_on = 1, c.is_returning = 0, ++c.num_starts, c.saved_s = c.start_gain * c.step_s;
    } else if (c.is_on && c.saved_s < -LEAST_LOSS * c.step_s) {
        c.is_on = 0, c.is_returning = 1;
    }
}

void decide(NeuronCache& c) {
    static thread_local Pairing pairing;
    int64_t count = 0;
    double gain = 0.0;
    for (int64_t i = 0; i < c.num_visited; ++i) {
        const int64_t l = (c.next_layer + i) % c.num_layers;
        const int64_t before = count;
        count = pairing.run(c, l, false, count, gain);
        if (c.is_on) continue;
        count = before;
        double nothing = 0.0;
        if (c.is_returning) count = pairing.run(c, l, true, count, nothing);
    }
    c.next_layer = (c.next_layer + c.num_visited) % c.num_layers;
    const double whole = gain * c.num_layers / c.num_visited;
    c.gain_s = 0.8 * c.gain_s + 0.2 * whole;
    c.num_swaps = fitting(c, count);
    const bool is_cut = c.num_swaps < count;
    c.price = is_cut ? std::max(LEAST_PRICE, c.price * PRICE_UP) : c.price * PRICE_DOWN;
    if (c.price < LEAST_PRICE) c.price = 0.0;
}

}  // namespace

EXPORT void hs_cache_step(NeuronCache* cache, const uint32_t* bits, int64_t rows) {
    NeuronCache& c = *cache;
    const double cached = c.cached_s, planned = c.planned_s;
    measure(c, bits, rows);
    const double saved = (c.planned_s - planned) - (c.cached_s - cached);
    c.saved_s = 0.99 * c.saved_s + 0.01 * saved;
    ++c.num_steps;
    take_swaps(c);
    learn(c, bits, rows);
    switch_on_or_off(c);
    c.steps_on += c.is_on;
    decide(c);
}

EXPORT void hs_cache_learn(NeuronCache* cache, int64_t layer, const uint32_t* bits, int64_t rows,
                           float* worth) {
    NeuronCache& c = *cache;
    CacheLayer& own = c.layer[layer];
    const int64_t F = padded(c.num_neurons);
    const float burst_rate = 1.0f - c.burst_decay;
    for (int64_t r = 0; r < rows; ++r) {
        const float first = 1.0f / (c.prior_tokens + static_cast<float>(++own.num_learnt));
        const float rate = std::max(1.0f - c.decay, first);
        average(own.score, bits + r * F / 32, F / 32, 1, F, &rate, 0);
        if (c.burst_weight > 0.0f) average(own.burst, bits + r * F / 32, F / 32, 1, F, &burst_rate, 0);
    }
    worths(own.score, own.burst, F, c.burst_weight, worth);
}
