// The layout of a tile of TILE_ROWS rows of K-quants. Included inside the anonymous namespace of
// each source that needs it.
//
// A tile has, for each block of 256 values: the numbers of 16 bits (d, an f16, of every row; where there are minima m of
// every row; in iq4_xs those with the bits of scales); then the bytes of scales, byte 0 of every row, byte 1 of every
// row, and so on; then the bits above the quants and the quants, both with four bytes of every row at a time. Blocks with
// only d are in pairs that begin with both blocks' d, so that all else is in whole cache lines; a last single block ends
// with its d.

// Parts of a block: where they begin, and their number of bytes (of 16-bit numbers, `halves`).
struct SuperShape {
    int64_t block_bytes, halves, halves_at, scale_bytes, scales_at, bit_bytes, bits_at, quant_bytes,
        quants_at;
};

constexpr SuperShape super_shape(int32_t kind) {
    switch (kind_in_file(kind)) {
        case KIND_Q4_K:
            return {144, 2, 0, 12, 4, 0, 16, 128, 16};
        case KIND_Q5_K:
            return {176, 2, 0, 12, 4, 32, 16, 128, 48};
        case KIND_Q6_K:
            return {210, 1, 208, 16, 192, 64, 128, 128, 0};
        case KIND_Q3_K:
        case KIND_IQ1_TABLE:
        case KIND_IQ2_TABLE:
            return {110, 1, 108, 12, 96, 32, 0, 64, 32};
        case KIND_Q2_K:
            return {84, 2, 80, 16, 0, 0, 16, 64, 16};
        case KIND_TQ2_0:
            return {66, 1, 64, 0, 0, 0, 0, 64, 0};
        case KIND_IQ2_XXS:
            return {66, 1, 0, 0, 0, 0, 0, 64, 2};
        case KIND_IQ2_XS:
            return {74, 1, 0, 8, 66, 0, 0, 64, 2};
        case KIND_IQ3_XXS:
            return {98, 1, 0, 0, 0, 32, 66, 64, 2};
        case KIND_IQ3_S:
            return {110, 1, 0, 4, 106, 32, 74, 72, 2};
        default:
            return {136, 4, 0, 0, 0, 0, 0, 128, 8};
    }
}

// Offsets in a tile.
struct SuperPlace {
    int64_t halves, scales, bits, quants;
};

// The offsets of block s in a tile whose rows have n blocks.
constexpr SuperPlace super_place(const SuperShape& shape, int64_t n, int64_t s) {
    const int64_t halves_bytes = TILE_ROWS * 2 * shape.halves;
    const int64_t rest_bytes = TILE_ROWS * shape.block_bytes - halves_bytes;
    const int64_t first = shape.halves == 1 ? s / 2 * 2 : s,
                  start = TILE_ROWS * shape.block_bytes * first;
    const bool is_alone = shape.halves == 1 && first + 1 == n;
    const int64_t before = shape.halves == 1 ? 2 * halves_bytes : halves_bytes;
    const int64_t scales = start + (is_alone ? 0 : before) + (s - first) * rest_bytes;
    const int64_t bits = scales + TILE_ROWS * shape.scale_bytes;
    return {start + (is_alone ? rest_bytes : (s - first) * halves_bytes), scales, bits,
            bits + TILE_ROWS * shape.bit_bytes};
}

// Calls copy(at, place, count) for the contiguous pieces of block s of row r: `count` bytes at `at` in a row's
// block are at `place` in the tile.
template <class Copy>
inline void for_pieces(const SuperShape& shape, int64_t n, int64_t s, int64_t r, const Copy& copy) {
    const SuperPlace place = super_place(shape, n, s);
    for (int64_t i = 0; i < shape.halves; ++i)
        copy(shape.halves_at + 2 * i, place.halves + 2 * (TILE_ROWS * i + r), 2);
    for (int64_t i = 0; i < shape.scale_bytes; ++i)
        copy(shape.scales_at + i, place.scales + TILE_ROWS * i + r, 1);
    for (int64_t i = 0; i < shape.bit_bytes; i += 4)
        copy(shape.bits_at + i, place.bits + TILE_ROWS * i + 4 * r, 4);
    for (int64_t i = 0; i < shape.quant_bytes; i += 4)
        copy(shape.quants_at + i, place.quants + TILE_ROWS * i + 4 * r, 4);
}
