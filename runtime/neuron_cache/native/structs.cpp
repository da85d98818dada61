#include "../../kernels/cpu/struct_layout.h"
#include "policy.h"

namespace {

// clang-format off
const StructField FIELDS[] = {
    STRUCT(CacheLayer),
    FIELD(CacheLayer, score), FIELD(CacheLayer, burst), FIELD(CacheLayer, slot),
    FIELD(CacheLayer, id), FIELD(CacheLayer, planned), FIELD(CacheLayer, resident),
    FIELD(CacheLayer, num_slots), FIELD(CacheLayer, hot_s), FIELD(CacheLayer, hot_row_s),
    FIELD(CacheLayer, cold_s), FIELD(CacheLayer, cold_row_s), FIELD(CacheLayer, copy_row_s),
    FIELD(CacheLayer, gather_row_s), FIELD(CacheLayer, cold_share), FIELD(CacheLayer, read),
    FIELD(CacheLayer, hits), FIELD(CacheLayer, planned_hits), FIELD(CacheLayer, num_applied),
    STRUCT(CacheSwap),
    FIELD(CacheSwap, layer), FIELD(CacheSwap, slot), FIELD(CacheSwap, in), FIELD(CacheSwap, out),
    FIELD(CacheSwap, gain_s),
    STRUCT(NeuronCache),
    FIELD(NeuronCache, layer), FIELD(NeuronCache, pending), FIELD(NeuronCache, swap),
    FIELD(NeuronCache, num_layers), FIELD(NeuronCache, num_neurons), FIELD(NeuronCache, most_rows),
    FIELD(NeuronCache, num_visited), FIELD(NeuronCache, rest_s), FIELD(NeuronCache, copy_s),
    FIELD(NeuronCache, decay), FIELD(NeuronCache, burst_decay), FIELD(NeuronCache, burst_weight),
    FIELD(NeuronCache, prior_tokens), FIELD(NeuronCache, margin), FIELD(NeuronCache, is_always_on),
    FIELD(NeuronCache, are_experts), FIELD(NeuronCache, stay), FIELD(NeuronCache, start_gain), FIELD(NeuronCache, num_swaps),
    FIELD(NeuronCache, next_layer), FIELD(NeuronCache, num_rows), FIELD(NeuronCache, num_steps),
    FIELD(NeuronCache, num_pending), FIELD(NeuronCache, pending_rate), FIELD(NeuronCache, price),
    FIELD(NeuronCache, step_s), FIELD(NeuronCache, free_s), FIELD(NeuronCache, gain_s),
    FIELD(NeuronCache, saved_s), FIELD(NeuronCache, is_on), FIELD(NeuronCache, is_returning),
    FIELD(NeuronCache, cached_s), FIELD(NeuronCache, planned_s), FIELD(NeuronCache, total_swaps),
    FIELD(NeuronCache, steps_on), FIELD(NeuronCache, num_starts),
    {nullptr, nullptr, 0, 0},
};
// clang-format on

}  // namespace

extern "C" __attribute__((visibility("default"))) const StructField* hs_struct_fields() {
    return FIELDS;
}
