// AMX tiles in plain C++, for a processor without them: compile a source with -include of this file
// and without -mamx-tile. Tiles have the configured shapes. Where the processor faults, as for a
// tile that is not configured or shapes that do not fit, this calls abort(). If emulated_error is
// set, one product of each multiplication has the wrong sign.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

struct EmulatedTiles {
    bool is_configured = false;
    int64_t rows[8], row_bytes[8];
    uint8_t data[8][16][64];

    void want(bool is_so, const char* what) const {
        if (is_so) return;
        std::fprintf(stderr, "emulated AMX: %s\n", what);
        std::abort();
    }
    void want_tile(int tile) const {
        want(is_configured, "no configuration");
        want(tile >= 0 && tile < 8 && rows[tile] > 0, "a tile that is not configured");
    }
};

inline bool emulated_error = false;

inline EmulatedTiles& emulated_tiles() {
    static thread_local EmulatedTiles tiles;
    return tiles;
}

// The 64 bytes of a configuration: palette, start row, 14 zeros; for each of 8 tiles the bytes of a
// row, in 16 bits; 16 zeros; for each tile the number of rows, in 8 bits; 8 zeros.
inline void emulated_loadconfig(const void* from) {
    EmulatedTiles& tiles = emulated_tiles();
    uint8_t config[64];
    std::memcpy(config, from, 64);
    tiles.want(config[0] == 1 && config[1] == 0, "a palette other than 1, or a start row");
    for (int i = 2; i < 64; ++i)
        if (i < 16 || (i >= 32 && i < 48) || i >= 56)
            tiles.want(config[i] == 0, "reserved bytes of the configuration that are not 0");
    for (int tile = 0; tile < 8; ++tile) {
        uint16_t row_bytes;
        std::memcpy(&row_bytes, config + 16 + 2 * tile, 2);
        tiles.rows[tile] = config[48 + tile], tiles.row_bytes[tile] = row_bytes;
        tiles.want(tiles.rows[tile] <= 16 && row_bytes <= 64, "a tile that is too large");
        tiles.want((tiles.rows[tile] == 0) == (row_bytes == 0), "a tile with rows or columns only");
    }
    std::memset(tiles.data, 0, sizeof tiles.data);
    tiles.is_configured = true;
}

inline void emulated_release() { emulated_tiles().is_configured = false; }

inline void emulated_zero(int tile) {
    emulated_tiles().want_tile(tile);
    std::memset(emulated_tiles().data[tile], 0, sizeof emulated_tiles().data[tile]);
}

inline void emulated_loadd(int tile, const void* from, int64_t stride) {
    EmulatedTiles& tiles = emulated_tiles();
    emulated_zero(tile);
    for (int64_t r = 0; r < tiles.rows[tile]; ++r)
        std::memcpy(tiles.data[tile][r], static_cast<const uint8_t*>(from) + r * stride,
                    tiles.row_bytes[tile]);
}

inline void emulated_stored(int tile, void* to, int64_t stride) {
    EmulatedTiles& tiles = emulated_tiles();
    tiles.want_tile(tile);
    for (int64_t r = 0; r < tiles.rows[tile]; ++r)
        std::memcpy(static_cast<uint8_t*>(to) + r * stride, tiles.data[tile][r], tiles.row_bytes[tile]);
}

// sum[m][n] += a[m][4 k + i] * b[k][4 n + i] for all k and i < 4: int8 products, an int32 sum
inline void emulated_dpbssd(int sum, int a, int b) {
    EmulatedTiles& tiles = emulated_tiles();
    for (int tile : {sum, a, b}) tiles.want_tile(tile);
    tiles.want(sum != a && sum != b && a != b, "one tile twice");
    tiles.want(tiles.rows[sum] == tiles.rows[a] && tiles.row_bytes[a] == 4 * tiles.rows[b] &&
                   tiles.row_bytes[sum] == tiles.row_bytes[b] && tiles.row_bytes[b] % 4 == 0,
               "shapes that do not fit");
    for (int64_t m = 0; m < tiles.rows[sum]; ++m)
        for (int64_t n = 0; n < tiles.row_bytes[sum] / 4; ++n) {
            int32_t total;
            std::memcpy(&total, tiles.data[sum][m] + 4 * n, 4);
            for (int64_t k = 0; k < tiles.rows[b]; ++k)
                for (int64_t i = 0; i < 4; ++i)
                    total += static_cast<int8_t>(tiles.data[a][m][4 * k + i]) *
                             static_cast<int8_t>(tiles.data[b][k][4 * n + i]);
            if (emulated_error && m == 0 && n == 0)
                total -= 2 * static_cast<int8_t>(tiles.data[a][0][0]) *
                         static_cast<int8_t>(tiles.data[b][0][0]);
            std::memcpy(tiles.data[sum][m] + 4 * n, &total, 4);
        }
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#define _tile_loadconfig emulated_loadconfig
#define _tile_release emulated_release
#define _tile_loadd emulated_loadd
#define _tile_stored emulated_stored
#define _tile_zero emulated_zero
#define _tile_dpbssd emulated_dpbssd
