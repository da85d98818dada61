// The products that emulated_amx.cpp compares, at the AMX level. What else the level has is code of the other levels,
// and takes most of the time to compile.
#include "../../runtime/kernels/cpu/kernels.h"

#define kernels_amx whole_level  // of this file, which nothing names
#include "../../runtime/kernels/cpu/rows_amx.cpp"
#undef kernels_amx

namespace {

// Products whose vectors are quantised by block, one matrix row after another.
constexpr bool is_compared(int32_t kind) {
    const int64_t values = block_values(kind);
    return form_of(kind) && values >= BLOCK && values <= 128 && !row_head(kind) && !is_grouped(kind);
}

constexpr Kernels products() {
    Kernels some = {};
    for (int32_t kind = 0; kind < NUM_KINDS; ++kind)
        if (is_compared(kind)) {
            some.dot_rows[kind] = ALL_KERNELS.dot_rows[kind];
            some.quantise[kind] = ALL_KERNELS.quantise[kind];
        }
    return some;
}

}  // namespace

const Kernels kernels_amx = products();
