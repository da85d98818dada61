// Computes the chosen experts that are stored here in a call of its own: the CPU's part of a divided
// layer.
#include "experts.h"

namespace {

struct Room {
    Room(const HsChosen& c, uint8_t* memory)
        : arena(memory),
          x(arena.operand(c.width, c.max_tokens, forms_of(c.experts.first))),
          neurons(arena, c.width, c.experts.first.num_neurons, c.max_tokens,
                  by_output_forms(c.experts.first), false),
          experts(arena, ExpertSizes(c.experts, c.num_used), c.width, c.max_tokens, neurons) {}

    Arena arena;
    Operand x;
    Neurons neurons;
    Experts experts;
};

bool fits(const HsChosen& c) {
    if (c.width < 1 || c.width > INT32_MAX || c.max_tokens < 1 || c.max_tokens > MAX_ROWS) return false;
    const Gate gate{c.gate};
    if (!gate.is_valid() || gate.needs_all()) return false;
    return fits(c.experts, c.num_used, c.width, gate.computes_all);
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int64_t hs_chosen_bytes(const HsChosen* chosen) {
    return fits(*chosen) ? Room(*chosen, nullptr).arena.used() : -1;
}

EXPORT void hs_chosen(void* data) {
    HsChosen& c = *static_cast<HsChosen*>(data);
    Room room(c, c.workspace);
    const Gate gate{c.gate};
    NeuronBytes read;
    for (int64_t first = 0; first < c.num_tokens; first += c.max_tokens) {
        const int64_t T = std::min(c.num_tokens - first, c.max_tokens);
        room.x.changed();
        std::memcpy(room.x.f32, c.x + first * c.width, T * c.width * sizeof(float));
        room.experts.run(c.experts, gate, c.routed + first * 2 * c.num_used, c.num_used, room.x, T,
                         c.y + first * c.width, read);
    }
    c.gate_bytes += read.gate, c.up_bytes += read.up, c.down_bytes += read.down;
}
