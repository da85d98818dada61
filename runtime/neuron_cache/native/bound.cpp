// The inner part of a lower bound on the time of policies, even of one that knows the future. If a
// slot has a price at each step, the best choice for a neuron does not depend on the others: a step
// in a slot costs the step's price and gains `value` if it reads the neuron; entering a slot costs
// `fetch`. For all prices, the sum of the neurons' best gains plus the prices of all slots is at
// least the gain of every policy (Lagrangian duality; measure/cache_replay/bound.py computes the
// whole bound). The best choice is found by dynamic programming over steps with two states, in and
// out.
//
// Letters: T steps, F neurons, W words of F bits: F / 32 rounded up.
#include <stdint.h>

#include <algorithm>
#include <vector>

#include "levels.h"

namespace {

constexpr int64_t LANES = 32;
constexpr int64_t FLUSHED = 64;  // steps between sums in double precision

struct Job {
    const uint32_t* bits;                        // [T, W]
    int64_t num_steps, num_neurons, step_words;  // words per step
    const uint32_t* initial;  // [W] the neurons that are in slots before the first step
    const float* price;       // [T] of a slot at each step
    float value, fetch;
};

// One step of a word's neurons. Let G_in and G_out be a neuron's best gains up to this step if
// it ends in a slot or outside. Kept are `ahead` = G_in - G_out, whose magnitude fetch, value
// and price bound, and `grown`, the growth of G_out. `stays`: given that the neuron ends this
// step in a slot, whether it is best to come from a slot; `leaves`: the same, given that it ends
// outside.
FOR_EACH_LEVEL void advance(uint32_t word, float value, float price, float fetch, float* ahead,
                            float* grown, uint8_t* stays, uint8_t* leaves) {
    for (int64_t i = 0; i < LANES; ++i) {
        const float was = ahead[i], growth = was > 0.0f ? was : 0.0f;
        const float kept = was >= -fetch ? was : -fetch;
        const float earned = (word & MASKS.of[i] ? value : 0.0f) - price;
        stays[i] = was >= -fetch;
        leaves[i] = was > 0.0f;
        ahead[i] = kept + earned - growth;
        grown[i] += growth;
    }
}

// One step of the backward pass: replaces each neuron's state by the one before it, and counts slots used,
// hits and copies.
FOR_EACH_LEVEL void go_back(uint32_t word, const uint8_t* stays, const uint8_t* leaves, uint8_t* state,
                            int32_t& used, int32_t& hits, int32_t& copies) {
    int32_t num_in = 0, num_hits = 0, num_copies = 0;
    for (int64_t i = 0; i < LANES; ++i) {
        const uint8_t is_in = state[i], before = is_in ? stays[i] : leaves[i];
        num_in += is_in;
        num_hits += word & MASKS.of[i] ? is_in : 0;
        num_copies += is_in & (before ^ 1);
        state[i] = before;
    }
    used += num_in, hits += num_hits, copies += num_copies;
}

// The best gain of a word's 32 neurons; adds the slots that they use to `used` [T], and counts copies and
// hits. `stays` and `leaves`: scratch, [T, LANES].
double run_word(const Job& job, int64_t w, uint32_t valid, uint8_t* stays, uint8_t* leaves,
                int32_t* used, int64_t& copies, int64_t& hits) {
    float ahead[LANES], grown[LANES] = {};
    uint8_t state[LANES];
    double gain = 0.0;
    for (int64_t i = 0; i < LANES; ++i) ahead[i] = job.initial[w] >> i & 1 ? 0.0f : -job.fetch;
    const auto flush = [&] {
        for (int64_t i = 0; i < LANES; ++i) {
            gain += valid >> i & 1 ? static_cast<double>(grown[i]) : 0.0;
            grown[i] = 0.0f;
        }
    };
    for (int64_t t = 0; t < job.num_steps; ++t) {
        advance(job.bits[t * job.step_words + w], job.value, job.price[t], job.fetch, ahead, grown,
                stays + t * LANES, leaves + t * LANES);
        if (t % FLUSHED == FLUSHED - 1) flush();
    }
    for (int64_t i = 0; i < LANES; ++i) {
        grown[i] += std::max(ahead[i], 0.0f);
        state[i] = ahead[i] > 0.0f && valid >> i & 1;
        // Before the first step a neuron is in its initial state.
        stays[i] = job.initial[w] >> i & 1;
        leaves[i] = 0;
    }
    flush();
    for (int64_t i = 0; i < LANES; ++i)  // lanes without a neuron are never in a slot
        if (!(valid >> i & 1))
            for (int64_t t = 0; t < job.num_steps; ++t) leaves[t * LANES + i] = 0;
    int32_t num_hits = 0, num_copies = 0;
    for (int64_t t = job.num_steps - 1; t >= 0; --t)
        go_back(job.bits[t * job.step_words + w], stays + t * LANES, leaves + t * LANES, state, used[t],
                num_hits, num_copies);
    copies += num_copies, hits += num_hits;
    return gain;
}

}  // namespace

// The sum of the best gains of a layer's neurons. bits: [T, step_words], of which the first W words
// of each step are read; initial: [W]; price: [T]. Writes the number of slots in use at each step
// to `used` [T], and the numbers of copies and hits.
EXPORT double hs_cache_gain(const uint32_t* bits, int64_t num_steps, int64_t num_neurons,
                            int64_t step_words, const uint32_t* initial, const float* price,
                            float value, float fetch, int32_t* used, int64_t* copies, int64_t* hits) {
    const Job job = {bits, num_steps, num_neurons, step_words, initial, price, value, fetch};
    std::vector<uint8_t> stays(num_steps * LANES), leaves(num_steps * LANES);
    std::fill_n(used, num_steps, 0);
    *copies = *hits = 0;
    if (num_steps == 0) return 0.0;
    double gain = 0.0;
    for (int64_t w = 0; w < (num_neurons + 31) / 32; ++w) {
        const int64_t left = num_neurons - 32 * w;
        const uint32_t valid = left < 32 ? (1u << left) - 1 : ~0u;
        gain += run_word(job, w, valid, stays.data(), leaves.data(), used, *copies, *hits);
    }
    return gain;
}
