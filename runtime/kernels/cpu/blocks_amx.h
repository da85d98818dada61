// Products of 16 rows with 16 vectors on int8 tiles (AMX), for blocks_template.h and with its
// arithmetic. Fewer than LEAST_VECTORS vectors use blocks_vnni.h. That file's packed x is followed
// by panels, one for each group of 16 vectors and each block:
//   int8 plane[2][8][16][4]   high and low bytes, four adjacent values of each vector
//   float scale[16]           of each vector
// Groups are counted from vector 0 of the buffer, whichever vectors a call uses.
//
// A tile instruction can multiply 64 values of each row; here it multiplies 32, because a sum over
// two blocks would mix their scales. That is not the bottleneck: every 16 sums of a block (512
// products) take five vector instructions on two ports, which limits Sapphire Rapids to 200
// products per cycle. The sizes below are derived from its caches (48 KiB, 2 MiB) and not measured.

constexpr int64_t GROUP = 16;         // vectors: the columns of a tile of sums
constexpr int64_t TILE_BLOCKS = 16;   // blocks of a row whose scales are read together
constexpr int64_t LEAST_VECTORS = 8;  // a tile takes as long as about six vectors in blocks_vnni.h
constexpr int64_t MOST_GROUPS = 4;    // groups for which weights are unpacked once
constexpr int64_t ROW_TILES = 2;      // tiles of rows that use a panel while it is in L1
constexpr int64_t PLANE_BYTES = BLOCK * GROUP;
constexpr int64_t PANEL_BYTES = 2 * PLANE_BYTES + GROUP * 4;
static_assert(LANES == 16, "a tile has 16 rows");

class Panels {
  public:
    Panels(const Input& x, int64_t n)
        : data_(x.packed + (packed_blocks_bytes(n) * x.capacity + 63) / 64 * 64), n_(n) {}
    uint8_t* at(int64_t group, int64_t b) const { return data_ + (group * n_ + b) * PANEL_BYTES; }

  private:
    uint8_t* data_;
    int64_t n_;
};

// The vectors of a group that the call uses, one bit each.
inline __mmask16 meant_of(const Input& x, int64_t group) {
    int64_t begin = x.first - group * GROUP, end = begin + x.count;
    begin = begin < 0 ? 0 : begin;
    return static_cast<__mmask16>(first_of_16(end) & ~first_of_16(begin));
}

// The offset of 16 values of block b in a unit of blocks_vnni.h.
template <class F>
constexpr int64_t place(int64_t b, int64_t plane, int64_t half) {
    if (F::QUANT_BYTES == 16) return plane * PLANE<F> + half * 64 + b % 4 * 16;
    return plane * PLANE<F> + b % 2 * 32 + half * 16;
}

// Makes panels from the packed x of blocks_vnni.h. Does not write those of unused vectors, which
// another thread may be writing.
template <class F>
void pack_panels(const Input& x, int64_t D) {
    const int64_t n = D / BLOCK;
    const Panels panels(x, n);
    const PackedBlocks<F> from(x, n);
    for (int64_t group = x.first / GROUP; group * GROUP < x.first + x.count; ++group) {
        const __mmask16 meant = meant_of(x, group);
        int64_t vector[GROUP];  // arbitrary for unused vectors
        for (int64_t i = 0; i < GROUP; ++i)
            vector[i] = meant >> i & 1 ? group * GROUP + i - x.first : 0;
        for (int64_t b = 0; b < n; ++b) {
            uint8_t* to = panels.at(group, b);
            const uint8_t* unit_b = from.values + b / unit<F>() * from.stride;
            for (int64_t part = 0; part < 4; ++part, to += 4 * 64) {
                const uint8_t* bytes[GROUP];
                for (int64_t i = 0; i < GROUP; ++i)
                    bytes[i] = unit_b + vector[i] * from.next_vector +
                               place<F>(b, part / 2, part % 2);
                Ints fours[4];
                transpose_16(bytes, fours);
                for (int64_t v = 0; v < 4; ++v)
                    _mm512_mask_storeu_epi32(to + 64 * v, meant, bits(fours[v]));
            }
            alignas(64) float scale[GROUP];
            for (int64_t i = 0; i < GROUP; ++i)
                scale[i] = from.scale[vector[i] * from.next_scale + b];
            _mm512_mask_storeu_ps(to, meant, _mm512_load_ps(scale));
        }
    }
}

// 16 rows, of which TILE_BLOCKS blocks are unpacked at a time.
template <class F>
struct RowTile {
    const uint8_t* row[LANES];  // may repeat after the first `valid`; if tiled, the first is the tile
    int64_t valid, step;        // step: row stride in bytes, 0 if irregular
    alignas(64) uint8_t copy[TILE_BLOCKS][LANES][BLOCK];
    alignas(64) float scale[TILE_BLOCKS][LANES];

    void set(const Rows& rows, int64_t a, int64_t a1) {
        valid = a1 - a < LANES ? a1 - a : LANES;
        for (int64_t r = 0; r < LANES; ++r) row[r] = row_of(rows, r < valid ? a + r : a);
        step = row[1] - row[0];
        for (int64_t r = 2; r < LANES; ++r)
            if (row[r] - row[r - 1] != step) step = 0;
    }

    bool is_in_place() const { return F::QUANT_BYTES == BLOCK && step != 0 && !IS_TILED<F>; }

    // Unpacks blocks b0 .. b0 + m - 1: scales, and values unless tiles can load them from the rows.
    void unpack(int64_t n, int64_t b0, int64_t m) {
        if constexpr (IS_TILED<F>) return unpack_tile(n, b0, m);
        tile_scales<F>(row, n, b0, scale);
        if (is_in_place()) return;
        for (int64_t r = 0; r < LANES; ++r)
            for (int64_t b = 0; b < m; ++b) {
                const uint8_t* quants = F::quants(row[r], n, b0 + b);
                __m256i values;
                if constexpr (F::QUANT_BYTES == 16) {
                    values = from_nibbles(load_16_bytes(quants));
                } else {
                    values = load_32_bytes(quants);
                }
                _mm256_store_si256(reinterpret_cast<__m256i*>(copy[b][r]), values);
            }
    }

  private:
    static __m256i from_nibbles(__m128i nibbles) {
        const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(nibbles),
                                                     _mm_srli_epi16(nibbles, 4), 1);
        return _mm256_sub_epi8(_mm256_and_si256(both, _mm256_set1_epi8(15)), _mm256_set1_epi8(8));
    }

    // Transposes each 16 bytes of the rows back.
    void unpack_tile(int64_t n, int64_t b0, int64_t m) {
        for (int64_t b = 0; b < m; ++b) {
            store_floats(scale[b], load_f16(F::scale_of(row[0], b0 + b, 0)));
            for (int64_t half = 0; half < F::QUANT_BYTES / 16; ++half) {
                const uint8_t* from = F::quants_of(row[0], n, b0 + b, 0) + half * 256;
                const __m512i low = _mm512_unpacklo_epi32(load_64_bytes(from), load_64_bytes(from + 64));
                const __m512i high = _mm512_unpackhi_epi32(load_64_bytes(from), load_64_bytes(from + 64));
                const __m512i low_2 =
                    _mm512_unpacklo_epi32(load_64_bytes(from + 128), load_64_bytes(from + 192));
                const __m512i high_2 =
                    _mm512_unpackhi_epi32(load_64_bytes(from + 128), load_64_bytes(from + 192));
                // Each has 16 bytes of rows r, r + 4, r + 8 and r + 12.
                alignas(64) uint8_t bytes[4][4][16];
                _mm512_store_si512(bytes[0], _mm512_unpacklo_epi64(low, low_2));
                _mm512_store_si512(bytes[1], _mm512_unpackhi_epi64(low, low_2));
                _mm512_store_si512(bytes[2], _mm512_unpacklo_epi64(high, high_2));
                _mm512_store_si512(bytes[3], _mm512_unpackhi_epi64(high, high_2));
                for (int r = 0; r < LANES; ++r) {
                    const __m128i own = load_16_bytes(bytes[r % 4][r / 4]);
                    if constexpr (F::QUANT_BYTES == 16)
                        _mm256_store_si256(reinterpret_cast<__m256i*>(copy[b][r]), from_nibbles(own));
                    else
                        _mm_store_si128(reinterpret_cast<__m128i*>(copy[b][r] + 16 * half), own);
                }
            }
        }
    }
};

// Configures tiles for one call: 0 and 1 are sums, 2 weights, 3 and 4 the planes of x. Releases
// them afterwards, because other code on the same thread may configure tiles differently.
class TilesInUse {
  public:
    TilesInUse() {
        struct alignas(64) Config {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, BLOCK, 64, 64};
            uint8_t rows[16] = {16, 16, 16, BLOCK / 4, BLOCK / 4};
        };
        const Config config;
        static_assert(sizeof config == 64);
        // gcc 12 assumes that the next line reads 8 bytes only, and may drop stores to the others.
        asm volatile("" : : "m"(config));
        _tile_loadconfig(&config);
    }
    ~TilesInUse() { _tile_release(); }
};

struct TileSums {
    alignas(64) int32_t plane[2][LANES][GROUP];
};

inline void multiply_tile(const uint8_t* weights, int64_t step, const uint8_t* panel,
                          TileSums& sums) {
    _tile_loadd(2, weights, step);
    _tile_loadd(3, panel, 64);
    _tile_loadd(4, panel + PLANE_BYTES, 64);
    _tile_zero(0);
    _tile_zero(1);
    _tile_dpbssd(0, 2, 3);
    _tile_dpbssd(1, 2, 4);
    _tile_stored(0, sums.plane[0], 64);
    _tile_stored(1, sums.plane[1], 64);
}

// total[r] += the sums of row r times its scale and the vectors' scales.
inline void add_scaled(const TileSums& sums, const float* scale, Floats x_scale, Floats* total) {
#pragma GCC unroll 16
    for (int r = 0; r < LANES; ++r) {
        const Ints products = ints(_mm512_add_epi32(
            _mm512_slli_epi32(_mm512_load_si512(sums.plane[0][r]), 8),
            _mm512_load_si512(sums.plane[1][r])));
        total[r] = fused(to_floats(products), mul(broadcast(scale[r]), x_scale), total[r]);
    }
}

typedef float RowSums[LANES][GROUP];

// Adds the four parts of each product and writes y; vector t of the call begins at y + t *
// y_stride.
inline void store_products(const RowSums* part, int64_t valid, const Input& x, int64_t group,
                           float* y, int64_t y_stride) {
    alignas(64) RowSums total;
    for (int r = 0; r < LANES; ++r)
        store_floats(total[r],
                     add_floats(add_floats(load_floats(part[0][r]), load_floats(part[1][r])),
                                add_floats(load_floats(part[2][r]), load_floats(part[3][r]))));
    const __mmask16 meant = meant_of(x, group);
    for (int64_t i = 0; i < GROUP; i += 4) {
        const uint8_t* four[LANES];
        for (int r = 0; r < LANES; ++r) four[r] = reinterpret_cast<const uint8_t*>(total[r] + i);
        Ints vectors[4];
        transpose_16(four, vectors);
        for (int64_t v = i; v < i + 4; ++v)
            if (meant >> v & 1)
                _mm512_mask_storeu_ps(y + (group * GROUP + v - x.first) * y_stride,
                                      first_of_16(valid),
                                      reinterpret_cast<Floats>(vectors[v - i]));
    }
}

// Multiplies up to ROW_TILES tiles of rows by up to MOST_GROUPS groups of vectors; `next` is
// prefetched. While one block's sums are scaled and added, the tiles multiply the next block, which
// hides the latency of tile stores.
template <class F>
inline void dot_panels(RowTile<F>* tiles, int64_t num_tiles, const uint8_t* next, int64_t n,
                       const Input& x, int64_t group, int64_t num_groups, float* y,
                       int64_t y_stride) {
    const Panels panels(x, n);
    const int64_t num_jobs = num_groups * num_tiles, ahead = num_tiles * LANES * F::BLOCK_BYTES;
    alignas(64) RowSums part[MOST_GROUPS * ROW_TILES][4];
    __builtin_memset(part, 0, num_jobs * sizeof part[0]);
    TileSums sums[2];
    for (int64_t b0 = 0; b0 < n; b0 += TILE_BLOCKS) {
        const int64_t m = n - b0 < TILE_BLOCKS ? n - b0 : TILE_BLOCKS;
        for (int64_t i = 0; i < num_tiles; ++i) tiles[i].unpack(n, b0, m);
        asm volatile("" : : : "memory");  // gcc 12 does not know that tile loads read this memory
        auto multiply = [&](int64_t job, int64_t b, int64_t which) {
            RowTile<F>& tile = tiles[job % num_tiles];
            const bool is_in_place = tile.is_in_place();
            multiply_tile(is_in_place ? F::quants(tile.row[0], n, b0 + b) : tile.copy[b][0],
                          is_in_place ? tile.step : BLOCK,
                          panels.at(group + job / num_tiles, b0 + b), sums[which]);
        };
        int64_t which = 0;
        multiply(0, 0, which);
        for (int64_t job = 0; job < num_jobs; ++job) {
            const RowTile<F>& tile = tiles[job % num_tiles];
            const int64_t of_job = group + job / num_tiles;
            const __mmask16 meant = meant_of(x, of_job);
            for (int64_t p = 0; p < 4 && p < m; ++p) {
                Floats total[LANES];
                for (int r = 0; r < LANES; ++r) total[r] = load_floats(part[job][p][r]);
                for (int64_t b = p; b < m; b += 4, which ^= 1) {
                    const bool is_last = b + 4 >= m, is_end = is_last && (p == 3 || p + 1 == m);
                    if (!is_end || job + 1 < num_jobs)
                        multiply(is_end ? job + 1 : job, is_end ? 0 : is_last ? p + 1 : b + 4,
                                 which ^ 1);
                    for (int64_t at = 0; job == 0 && at < ahead; at += 64)
                        __builtin_prefetch(next + (b0 + b) * ahead + at, 0, 2);
                    // Zeros for unused vectors, because their scales are undefined.
                    const Floats x_scale = _mm512_maskz_loadu_ps(
                        meant, panels.at(of_job, b0 + b) + 2 * PLANE_BYTES);
                    add_scaled(sums[which], tile.scale[b], x_scale, total);
                }
                for (int r = 0; r < LANES; ++r) store_floats(part[job][p][r], total[r]);
            }
        }
    }
    for (int64_t job = 0; job < num_jobs; ++job)
        store_products(part[job], tiles[job % num_tiles].valid, x, group + job / num_tiles,
                       y + job % num_tiles * LANES, y_stride);
}

template <class F>
void dot_tiles(const Rows& rows, const Input& x, float* y, int64_t y_stride, int64_t a0,
               int64_t a1) {
    const TilesInUse in_use;
    const int64_t end = (x.first + x.count + GROUP - 1) / GROUP;
    RowTile<F> tiles[ROW_TILES];
    for (int64_t group = x.first / GROUP; group < end; group += MOST_GROUPS)
        for (int64_t a = a0; a < a1; a += ROW_TILES * LANES) {
            int64_t num_tiles = 0;
            for (; num_tiles < ROW_TILES && a + num_tiles * LANES < a1; ++num_tiles)
                tiles[num_tiles].set(rows, a + num_tiles * LANES, a1);
            const int64_t then = a + num_tiles * LANES;
            const uint8_t* next = then < rows.A ? row_of(rows, then) : tiles[0].row[0];
            dot_panels<F>(tiles, num_tiles, next, rows.D / BLOCK, x, group,
                          end - group < MOST_GROUPS ? end - group : MOST_GROUPS, y + a, y_stride);
        }
}
