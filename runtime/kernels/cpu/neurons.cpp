// Computes neurons or chosen experts in a call of its own: the CPU's part of a divided layer.
#include "experts.h"

namespace {

struct Room {
    Room(const HsNeurons& n, const HsBlock& block, uint8_t* memory)
        : arena(memory),
          x(arena.operand(n.width, n.max_tokens, forms_of(block))),
          neurons(arena, n.width, block.num_neurons, n.max_tokens, by_output_forms(block),
                  Gate{n.gate}.needs_all()),
          experts(arena, ExpertSizes(n.experts, n.num_used), n.width, n.max_tokens, neurons) {}
    Room(const HsNeurons& n, uint8_t* memory)
        : Room(n, n.experts ? n.experts->first : n.block, memory) {}

    Arena arena;
    Operand x;
    Neurons neurons;
    Experts experts;
};

bool fits(const HsNeurons& n) {
    if (n.width < 1 || n.width > INT32_MAX || n.max_tokens < 1 || n.max_tokens > MAX_ROWS) return false;
    const Gate gate{n.gate};
    if (!gate.is_valid()) return false;
    if (n.experts) return !gate.needs_all() && fits(*n.experts, n.num_used, n.width, gate.computes_all);
    if (n.num_neurons < 1 || n.num_neurons > INT32_MAX) return false;
    if (gate.needs_all() && (n.named || !has_all(n.block, n.num_neurons))) return false;
    return fits(n.block, n.width, n.num_neurons, n.block.up.data != nullptr, gate.computes_all);
}

}  // namespace

EXPORT int64_t hs_neurons_bytes(const HsNeurons* neurons) {
    return fits(*neurons) ? Room(*neurons, nullptr).arena.used() : -1;
}

EXPORT void hs_neurons(void* data) {
    HsNeurons& n = *static_cast<HsNeurons*>(data);
    Room room(n, n.workspace);
    const int64_t words = (n.num_neurons + 31) / 32;
    const Gate gate{n.gate};
    Named named[MAX_ROWS];
    NeuronBytes read;
    if (n.fired) std::fill_n(n.fired, n.num_tokens * words, 0u);
    for (int64_t first = 0; first < n.num_tokens; first += n.max_tokens) {
        const int64_t T = std::min(n.num_tokens - first, n.max_tokens);
        float* y = n.y + first * n.width;
        room.x.changed();
        std::memcpy(room.x.f32, n.x + first * n.width, T * n.width * sizeof(float));
        if (n.experts) {
            room.experts.run(*n.experts, gate, n.routed + first * 2 * n.num_used, n.num_used, room.x, T,
                             y, read);
            continue;
        }
        for (int64_t t = 0; n.named && t < T; ++t)
            named[t] = {n.named + (first + t) * words, nullptr, 0.0f};
        const Fired fired = {n.fired ? n.fired + first * words : nullptr, words};
        room.neurons.run(n.block, gate, n.named ? named : nullptr, room.x, T, y, read, fired);
    }
    n.gate_bytes += read.gate, n.up_bytes += read.up, n.down_bytes += read.down;
}
