// The policy of the neuron cache: after each step it decides which cold neurons take the slots of
// which hot ones. policy_library.py mirrors these structs field by field;
// tests/cache/cache_reference.py is the reference in numpy, with the same sequence of operations, so
// both decide alike.
//
// Letters: L layers, F neurons of a layer, N slots of a layer, W words of F bits: F / 32 rounded up.
#pragma once
#include <stdint.h>

struct CacheLayer {
    float *score, *burst;     // [32 W] slow and fast moving averages of whether a token reads a neuron
    int32_t* slot;            // [F] each neuron's slot; negative: only in main memory
    int32_t* id;              // [N] the neuron in each slot
    const uint32_t* planned;  // [W] the neurons that the plan has in slots
    uint32_t* resident;       // [W] the neurons that are in slots
    int64_t num_slots;
    double hot_s, hot_row_s, cold_s,
        cold_row_s;  // seconds, see CacheCosts in src/hotsplit/options/neuron_cache_options.py
    double copy_row_s, gather_row_s;
    double cold_share;  // moving average: the share of steps in which the cold side takes longer
    // Neurons read by all steps so far: all, those in slots, those in slots by the plan. 0 if all neurons
    // have slots, or none has.
    int64_t read, hits, planned_hits;
    int64_t num_applied;  // pending tokens that the scores include
    int64_t num_learnt;   // tokens of hs_cache_learn
};

struct CacheSwap {
    int32_t layer, slot, in, out;
    double gain_s;  // expected over the stay, less the margin and the costs of the copy
};

// Most tokens whose bits are kept until a layer's scores are updated for all of them: see catch_up.
constexpr int64_t MOST_PENDING = 32;

struct NeuronCache {
    CacheLayer* layer;
    uint32_t* pending;  // [MOST_PENDING, L, W]
    CacheSwap* swap;    // [L * most_rows] candidates; the first num_swaps are the decision
    int64_t num_layers, num_neurons, most_rows, num_visited;
    double rest_s, copy_s;
    // The options in CacheOptions.
    float decay, burst_decay, burst_weight, prior_tokens, margin;
    int32_t is_always_on;
    int32_t are_experts;  // what swaps take besides the link's time is spent between steps
    double stay, start_gain;
    // State.
    int64_t num_swaps, next_layer, num_rows, num_steps, num_pending;
    float pending_rate[MOST_PENDING];
    double price;            // expected gain in seconds that a swap must bring per second of the link
    double step_s, free_s;   // moving averages of a step's seconds, and of the CPU's idle seconds in it
    double gain_s, saved_s;  // moving averages per step: expected gain of further swaps, seconds saved
    int32_t is_on, is_returning;
    // Totals.
    double cached_s, planned_s;  // by the costs: with the cache, and if the plan's neurons had stayed
    int64_t total_swaps, steps_on, num_starts;
};

extern "C" {
// Called after a step with the bits [rows, L, W] of its tokens (rows >= 1): counts its hits and seconds,
// records the last decision's swaps as done, updates the scores, and makes the next decision.
void hs_cache_step(NeuronCache* cache, const uint32_t* bits, int64_t rows);
// Updates the scores of one layer with the bits [rows, W] of its tokens, and writes what its neurons are worth, the
// expected frequencies of reads, to `worth` [32 W]. For slots that are filled during a step, without decisions of
// hs_cache_step.
void hs_cache_learn(NeuronCache* cache, int64_t layer, const uint32_t* bits, int64_t rows,
                    float* worth);
}
