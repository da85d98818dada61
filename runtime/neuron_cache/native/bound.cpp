// A lower bound on the time of any choice of neurons for the slots, the future being known.
//
// With a price for each slot and step and a price for each copy, what is best for a neuron does not
// depend on the others: being in a slot at a step earns `value` if the step reads the neuron and costs
// the slot's price, entering costs `fetch`. The sum of the neurons' best gains bounds the gain of every
// policy, one that bypasses the slots included, for all prices (Lagrangian duality; bench/cache_replay
// puts the parts together). The best is found by dynamic programming over steps: in or out.
//
// Letters: T steps, F neurons, W words of F bits: F / 32 rounded up.
#include <stdint.h>

#include <algorithm>
#include <vector>

namespace {

constexpr int64_t LANES = 32;
constexpr int64_t FLUSHED = 64;  // steps between sums in double precision

struct Job {
    const uint32_t* bits;     // [T, W]
    int64_t num_steps, num_neurons, step_words;  // words from step to step
    const uint32_t* initial;  // [W] the neurons that are in slots before the first step
    const float* price;       // [T] of a slot
    float value, fetch;
};

// The best gain of a word's 32 neurons; adds them to `used` [T] (slots taken) where they are in, and
// counts their copies and hits. With G_in and G_out the best gain up to a step that ends in or out, only
// `ahead` = G_in - G_out is kept, which stays within fetch, value and price, and the sum of what G_out
// grows by.
double run_word(const Job& job, int64_t w, uint32_t valid, std::vector<uint32_t>& stay,
                std::vector<uint32_t>& leave, int32_t* used, int64_t& copies, int64_t& hits) {
    float ahead[LANES], grown[LANES] = {};
    double gain = 0.0;
    for (int64_t i = 0; i < LANES; ++i) ahead[i] = job.initial[w] >> i & 1 ? 0.0f : -job.fetch;
    const auto flush = [&] {
        for (int64_t i = 0; i < LANES; ++i) {
            gain += valid >> i & 1 ? static_cast<double>(grown[i]) : 0.0;
            grown[i] = 0.0f;
        }
    };
    for (int64_t t = 0; t < job.num_steps; ++t) {
        const uint32_t word = job.bits[t * job.step_words + w];
        const float price = job.price[t];
        uint32_t stays = 0, leaves = 0;
        for (int64_t i = 0; i < LANES; ++i) {
            const float was = ahead[i], growth = std::max(was, 0.0f);
            stays |= static_cast<uint32_t>(was >= -job.fetch) << i;
            leaves |= static_cast<uint32_t>(was > 0.0f) << i;
            const float earned = (word >> i & 1 ? job.value : 0.0f) - price;
            ahead[i] = std::max(was, -job.fetch) + earned - growth;
            grown[i] += growth;
        }
        stay[t] = stays, leave[t] = leaves;
        if (t % FLUSHED == FLUSHED - 1) flush();
    }
    uint32_t state = 0;
    for (int64_t i = 0; i < LANES; ++i) {
        grown[i] += std::max(ahead[i], 0.0f);
        state |= static_cast<uint32_t>(ahead[i] > 0.0f) << i;
    }
    flush();
    state &= valid;
    for (int64_t t = job.num_steps - 1; t >= 0; --t) {
        used[t] += __builtin_popcount(state);
        hits += __builtin_popcount(state & job.bits[t * job.step_words + w]);
        const uint32_t before = ((state & stay[t]) | (~state & leave[t])) & valid;
        const uint32_t was_in = t > 0 ? before : job.initial[w];
        copies += __builtin_popcount(state & ~was_in);
        state = before;
    }
    return gain;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// The sum of the best gains of a layer's neurons. bits: [T, step_words], of which the layer's W words come
// first; initial: [W]; price: [T]. `used` [T] is the number of neurons in slots, `copies` and `hits` are
// their numbers.
EXPORT double spark_cache_gain(const uint32_t* bits, int64_t num_steps, int64_t num_neurons,
                               int64_t step_words, const uint32_t* initial, const float* price,
                               float value, float fetch, int32_t* used, int64_t* copies,
                               int64_t* hits) {
    const Job job = {bits, num_steps, num_neurons, step_words, initial, price, value, fetch};
    std::vector<uint32_t> stay(num_steps), leave(num_steps);
    std::fill_n(used, num_steps, 0);
    *copies = *hits = 0;
    double gain = 0.0;
    for (int64_t w = 0; w < (num_neurons + 31) / 32; ++w) {
        const int64_t left = num_neurons - 32 * w;
        const uint32_t valid = left < 32 ? (1u << left) - 1 : ~0u;
        gain += run_word(job, w, valid, stay, leave, used, *copies, *hits);
    }
    return gain;
}
