// The layout of a tile of TILE_ROWS rows of K-quants. Included inside the anonymous namespace of
// each source that needs it.
//
// A tile has, for each block of 256 values: d, an f16, of every row, and for q4_K and q5_K m of
// every row; then the bytes of scales, byte 0 of every row, byte 1 of every row, and so on; then
// the bits above the nibbles and the nibbles, both with four bytes of every row at a time. Blocks
// of q6_K are in pairs that begin with both blocks' d, so that all else is in whole cache lines; a
// last single block ends with its d.

struct SuperShape {
    int64_t block_bytes, floats, floats_at, scale_bytes, scales_at, bit_bytes, bits_at, quants_at;
};

constexpr SuperShape super_shape(int32_t kind) {
    switch (kind) {
        case KIND_Q4_K:
        case KIND_Q4_K_TILED:
            return {144, 2, 0, 12, 4, 0, 16, 16};
        case KIND_Q5_K:
        case KIND_Q5_K_TILED:
            return {176, 2, 0, 12, 4, 32, 16, 48};
        default:
            return {210, 1, 208, 16, 192, 64, 128, 0};
    }
}

constexpr int64_t QUANT_BYTES_OF_SUPER = 128;

// Offsets in a tile.
struct SuperPlace {
    int64_t floats, scales, bits, quants;
};

// The offsets of block s in a tile whose rows have n blocks.
constexpr SuperPlace super_place(const SuperShape& shape, int64_t n, int64_t s) {
    const int64_t floats_bytes = TILE_ROWS * 2 * shape.floats;
    const int64_t rest_bytes = TILE_ROWS * shape.block_bytes - floats_bytes;
    const int64_t first = shape.floats == 1 ? s / 2 * 2 : s,
                  start = TILE_ROWS * shape.block_bytes * first;
    const bool is_alone = shape.floats == 1 && first + 1 == n;
    const int64_t scales = start + (is_alone ? 0 : 64) + (s - first) * rest_bytes;
    const int64_t bits = scales + TILE_ROWS * shape.scale_bytes;
    return {start + (is_alone ? rest_bytes : (s - first) * floats_bytes), scales, bits,
            bits + TILE_ROWS * shape.bit_bytes};
}

// Calls copy(at, place, count) for the contiguous pieces of block s of row r: `count` bytes at `at` in a row's
// block are at `place` in the tile.
template <class Copy>
inline void for_pieces(const SuperShape& shape, int64_t n, int64_t s, int64_t r, const Copy& copy) {
    const SuperPlace place = super_place(shape, n, s);
    for (int64_t i = 0; i < shape.floats; ++i)
        copy(shape.floats_at + 2 * i, place.floats + 2 * (TILE_ROWS * i + r), 2);
    for (int64_t i = 0; i < shape.scale_bytes; ++i)
        copy(shape.scales_at + i, place.scales + TILE_ROWS * i + r, 1);
    for (int64_t i = 0; i < shape.bit_bytes; i += 4)
        copy(shape.bits_at + i, place.bits + TILE_ROWS * i + 4 * r, 4);
    for (int64_t i = 0; i < QUANT_BYTES_OF_SUPER; i += 4)
        copy(shape.quants_at + i, place.quants + TILE_ROWS * i + 4 * r, 4);
}
