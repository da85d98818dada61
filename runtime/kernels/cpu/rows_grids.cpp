// rows_avx512.cpp with -mavx512vnni -mavx512vbmi -mgfni: only products of tiles of types with grids, for the levels with
// AVX-512 VNNI on processors that have the other two as well.
#define LEVEL_GRIDS
#include "rows_avx512.cpp"

#define FOR_ALL_GRIDS(GRID) GRID(IQ2_XXS) GRID(IQ2_XS) GRID(IQ3_XXS) GRID(IQ3_S)

void add_grids(Kernels& to) {
#define ADD(NAME) set_grid_tiles<NAME>(to, KIND_##NAME##_TILED);
    FOR_ALL_GRIDS(ADD)
}

int32_t set_grid_of(int32_t kind, const uint8_t* codes, int64_t num_entries) {
#define SET(NAME)            \
    if (kind == KIND_##NAME) \
        return set_grid<NAME>(codes, num_entries) ? STATUS_OK : STATUS_BAD_ARGUMENT;
    FOR_ALL_GRIDS(SET)
    return STATUS_BAD_ARGUMENT;
}
