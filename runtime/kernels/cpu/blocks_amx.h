// Products of 16 vectors with 16 rows on int8 tiles (AMX), for blocks_template.h and with its
// arithmetic. Fewer than LEAST_VECTORS vectors use blocks_vnni.h. That file's packed x is followed
// by panels, one for each group of 16 vectors and each block:
//   int8 plane[2][16][32]   high and low bytes of each vector
//   float scale[16]         of each vector
//   float minimum[16]       scale times the sum of the block's integers
// Groups are counted from vector 0 of the buffer, whichever vectors a call uses.
//
// Vectors are the rows of a tile of sums, so that a block of tiled weights, which interleaves four
// bytes of each of 16 rows, is loaded as it is, and 16 sums of a vector are adjacent in y.
//
// A tile instruction can multiply 64 values of each vector; here it multiplies 32, because a sum
// over two blocks would mix their scales. That is not the bottleneck: every 16 sums of a block (512
// products) take five vector instructions on two ports, which limits Sapphire Rapids to 200
// products per cycle. The sizes below are derived from its caches (48 KiB, 2 MiB) and not measured.

constexpr int64_t GROUP = 16;        // vectors: the rows of a tile of sums
constexpr int64_t TILE_BLOCKS = 16;  // blocks of a row that are multiplied together
constexpr int64_t LEAST_VECTORS =
    8;                              // by estimate, a tile takes as long as six vectors in blocks_vnni.h
constexpr int64_t MOST_GROUPS = 8;  // groups for which weights are unpacked once: 128 vectors
constexpr int64_t ROW_TILES = 2;    // tiles of rows that use a panel while it is in L1
constexpr int64_t PLANE_BYTES = BLOCK * GROUP;
constexpr int64_t PANEL_BYTES = 2 * PLANE_BYTES + 2 * GROUP * 4;
constexpr int64_t WEIGHTS_BYTES = BLOCK * LANES;  // of a block of 16 rows, as a tile
static_assert(LANES == 16, "a tile has 16 columns of 32 bits");

class Panels {
  public:
    Panels(const Input& x, int64_t n)
        : data_(x.packed + (packed_blocks_bytes(n) * x.capacity + 63) / 64 * 64), n_(n) {}
    uint8_t* at(int64_t group, int64_t b) const { return data_ + (group * n_ + b) * PANEL_BYTES; }

  private:
    uint8_t* data_;
    int64_t n_;
};

// The vectors of a group that the call uses: begin .. end-1.
struct Meant {
    Meant(const Input& x, int64_t group)
        : begin(x.first > group * GROUP ? x.first - group * GROUP : 0),
          end(x.first + x.count < (group + 1) * GROUP ? x.first + x.count - group * GROUP : GROUP) {}
    int64_t begin, end;
};

// The offset of 16 values of block b in a unit of blocks_vnni.h.
template <class F>
constexpr int64_t place(int64_t b, int64_t plane, int64_t half) {
    if (F::HAS_NIBBLES) return plane * PLANE<F> + half * 64 + b % 4 * 16;
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
        const Meant meant(x, group);
        for (int64_t b = 0; b < n; ++b) {
            uint8_t* to = panels.at(group, b);
            const uint8_t* unit_b = from.values + b / unit<F>() * from.stride;
            for (int64_t i = meant.begin; i < meant.end; ++i) {
                const int64_t t = group * GROUP + i - x.first;
                for (int64_t plane = 0; plane < 2; ++plane)
                    for (int64_t half = 0; half < 2; ++half)
                        __builtin_memcpy(to + plane * PLANE_BYTES + i * BLOCK + half * 16,
                                         unit_b + t * from.next_vector + place<F>(b, plane, half), 16);
                float* numbers = reinterpret_cast<float*>(to + 2 * PLANE_BYTES);
                const int64_t at = t * from.next_scale + b;
                numbers[i] = from.scale[at];
                numbers[GROUP + i] = static_cast<float>(from.sum[at]) * from.scale[at];
            }
        }
    }
}

// 16 rows, of which TILE_BLOCKS blocks are unpacked at a time.
template <class F>
struct WeightTile {
    // may repeat after the first `valid`; if tiled, the first is the tile
    const uint8_t* row[LANES];
    int64_t valid;
    alignas(64) uint8_t copy[TILE_BLOCKS][WEIGHTS_BYTES];  // four bytes of each row in turn
    alignas(64) float scale[F::NUMBERS][TILE_BLOCKS][LANES];
    const uint8_t* weights[TILE_BLOCKS];  // of each unpacked block

    static constexpr bool HAS_BYTES = !F::HAS_NIBBLES && !F::IS_CODED,
                          IS_IN_PLACE = IS_TILED<F> && HAS_BYTES;

    void set(const Rows& rows, int64_t a, int64_t a1) {
        valid = a1 - a < LANES ? a1 - a : LANES;
        for (int64_t r = 0; r < LANES; ++r) row[r] = row_of(rows, r < valid ? a + r : a);
    }

    // Unpacks blocks b0 .. b0 + m - 1: scales, and values unless tiles can load them from the rows.
    void unpack(int64_t n, int64_t b0, int64_t m) {
        if constexpr (!IS_TILED<F>) {
            tile_scales<F>(row, n, b0, scale[0]);
            if constexpr (F::NUMBERS == 2) tile_scales<F, 1>(row, n, b0, scale[1]);
        }
        for (int64_t b = 0; b < m; ++b) {
            for (int64_t i = 0; i < F::NUMBERS && IS_TILED<F>; ++i)
                if constexpr (IS_TILED<F>)
                    store_floats(scale[i][b], numbers_at<F>(F::scale_of(row[0], b0 + b, 0, i)));
            if constexpr (IS_IN_PLACE) {
                weights[b] = F::quants_of(row[0], n, b0 + b, 0);
            } else {
                unpack_block(n, b0 + b, copy[b]);
                weights[b] = copy[b];
            }
        }
    }

    RowNumbers<F::NUMBERS> numbers(int64_t b) const {
        if constexpr (F::NUMBERS == 2)
            return {load_floats(scale[0][b]), load_floats(scale[1][b])};
        else
            return {load_floats(scale[0][b])};
    }

  private:
    void unpack_block(int64_t n, int64_t b, uint8_t* to) const {
        Ints quarter[F::QUANT_BYTES / 4], bytes[8];
        if constexpr (IS_TILED<F>)
            for (int64_t v = 0; v < F::QUANT_BYTES / 4; ++v)
                quarter[v] = load_ints(F::quants_of(row[0], n, b, 0) + 64 * v);
        else
            gather_quants<F>(row, n, b, quarter);
        if constexpr (F::IS_CODED) {
            F::bytes_of_lanes(quarter, bytes);
            for (Ints& four : bytes) four = add_to_bytes(four, -F::BIAS);
        } else {
            for (int v = 0; v < 8; ++v)  // the high nibbles are the last 16 values of a block
                bytes[v] = F::HAS_NIBBLES ? from_nibbles(quarter[v % 4], v / 4 * 4) : quarter[v];
        }
        for (int v = 0; v < 8; ++v) _mm512_store_si512(to + 64 * v, bits(bytes[v]));
    }

    static Ints from_nibbles(Ints fours, int shift) {
        return add_to_bytes(fours >> shift & 0x0f0f0f0f, -8);
    }
};

// Configures tiles for one call: two sets, each of two tiles of sums, one of weights and one for a
// plane of x. Releases them afterwards, because other code on the same thread may configure tiles
// differently.
class TilesInUse {
  public:
    TilesInUse() {
        struct alignas(64) Config {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, BLOCK, 64, 64, 64, BLOCK};
            uint8_t rows[16] = {16, 16, BLOCK / 4, 16, 16, 16, BLOCK / 4, 16};
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
    alignas(64) int32_t plane[2][GROUP][LANES];
};

// The instructions name tiles by literals.
#define MULTIPLY(HIGH, LOW, WEIGHTS, X)         \
    _tile_loadd(WEIGHTS, weights, 64);          \
    _tile_loadd(X, panel, BLOCK);               \
    _tile_zero(HIGH);                           \
    _tile_zero(LOW);                            \
    _tile_dpbssd(HIGH, X, WEIGHTS);             \
    _tile_loadd(X, panel + PLANE_BYTES, BLOCK); \
    _tile_dpbssd(LOW, X, WEIGHTS);              \
    _tile_stored(HIGH, sums.plane[0], 64);      \
    _tile_stored(LOW, sums.plane[1], 64)

// Multiplies a block in one of two sets of tiles, so that the instructions of one do not wait for
// those of the other.
inline void multiply_block(const uint8_t* weights, const uint8_t* panel, int64_t set, TileSums& sums) {
    if (set == 0) {
        MULTIPLY(0, 1, 2, 3);
    } else {
        MULTIPLY(4, 5, 6, 7);
    }
}
#undef MULTIPLY

// total[i] += the sums of vector i times its scale and the rows' scales; `x_minimum`: what minima are multiplied by.
template <int64_t NUMBERS>
inline void add_scaled(const TileSums& sums, const RowNumbers<NUMBERS>& rows, const float* x_scale,
                       const float* x_minimum, Floats* total) {
#pragma GCC unroll 16
    for (int i = 0; i < GROUP; ++i) {
        if constexpr (NUMBERS == 2) total[i] = fused(rows.second, broadcast(x_minimum[i]), total[i]);
        const Ints products =
            ints(_mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(sums.plane[0][i]), 8),
                                  _mm512_load_si512(sums.plane[1][i])));
        total[i] = fused(to_floats(products), mul(rows.scale, broadcast(x_scale[i])), total[i]);
    }
}

typedef float GroupSums[GROUP][LANES];

// Adds the four parts of each product and writes y; vector t of the call begins at y + t * y_stride.
inline void store_products(const GroupSums* part, int64_t valid, const Input& x, int64_t group,
                           float* y, int64_t y_stride) {
    const Meant meant(x, group);
    for (int64_t i = meant.begin; i < meant.end; ++i) {
        const Floats sums = add_floats(add_floats(load_floats(part[0][i]), load_floats(part[1][i])),
                                       add_floats(load_floats(part[2][i]), load_floats(part[3][i])));
        _mm512_mask_storeu_ps(y + (group * GROUP + i - x.first) * y_stride, first_of_16(valid), sums);
    }
}

// The blocks of some tiles of rows and groups of vectors in the order of multiplication: for each
// group and tile, blocks p, p + 4, ... for p = 0 .. 3.
struct BlockOrder {
    int64_t num_blocks, num_tiles, group = 0, tile = 0, p = 0, b = 0;

    void advance() {
        b += 4;
        if (b < num_blocks) return;
        if (++p == 4 || p == num_blocks) {
            p = 0;
            if (++tile == num_tiles) tile = 0, ++group;
        }
        b = p;
    }
};

// Multiplies up to ROW_TILES tiles of rows by up to MOST_GROUPS groups of vectors; `next` is
// prefetched. Tiles multiply SUMS_AHEAD blocks ahead of those whose sums are scaled and added: the
// sums of a block take some hundred cycles to be in memory, from where they are loaded.
template <class F>
inline void dot_panels(WeightTile<F>* tiles, int64_t num_tiles, const uint8_t* next, int64_t n,
                       const Input& x, int64_t group, int64_t num_groups, float* y, int64_t y_stride) {
    constexpr int64_t SUMS_AHEAD = 3;
    const Panels panels(x, n);
    const int64_t next_bytes = num_tiles * LANES * F::BLOCK_BYTES / F::SPAN,
                  next_group = n * PANEL_BYTES;
    alignas(64) GroupSums part[MOST_GROUPS][ROW_TILES][4];
    __builtin_memset(part, 0, num_groups * sizeof part[0]);
    TileSums sums[SUMS_AHEAD + 1];
    for (int64_t b0 = 0; b0 < n; b0 += TILE_BLOCKS) {
        const int64_t m = n - b0 < TILE_BLOCKS ? n - b0 : TILE_BLOCKS;
        for (int64_t i = 0; i < num_tiles; ++i) tiles[i].unpack(n, b0, m);
        asm volatile("" : : : "memory");  // gcc 12 does not know that tile loads read this memory
        const uint8_t* first_panel = panels.at(group, b0);
        BlockOrder order{m, num_tiles};
        uint64_t multiplied = 0, added = 0;
        auto multiply = [&] {
            if (order.group == num_groups) return;
            multiply_block(tiles[order.tile].weights[order.b],
                           first_panel + order.group * next_group + order.b * PANEL_BYTES,
                           multiplied % 2, sums[multiplied % (SUMS_AHEAD + 1)]);
            ++multiplied, order.advance();
        };
        for (int64_t i = 0; i < SUMS_AHEAD; ++i) multiply();
        for (int64_t g = 0; g < num_groups; ++g)
            for (int64_t i = 0; i < num_tiles; ++i)
                for (int64_t p = 0; p < 4 && p < m; ++p) {
                    Floats total[GROUP];
                    for (int t = 0; t < GROUP; ++t) total[t] = load_floats(part[g][i][p][t]);
                    for (int64_t b = p; b < m; b += 4, ++added) {
                        multiply();
                        for (int64_t at = 0; g + i == 0 && at < next_bytes; at += 64)
                            __builtin_prefetch(next + (b0 + b) * next_bytes + at, 0, 2);
                        // Sums of unused vectors are arbitrary.
                        const uint8_t* panel = first_panel + g * next_group + b * PANEL_BYTES;
                        const float* scale = reinterpret_cast<const float*>(panel + 2 * PLANE_BYTES);
                        add_scaled(sums[added % (SUMS_AHEAD + 1)], tiles[i].numbers(b), scale,
                                   scale + GROUP, total);
                    }
                    for (int t = 0; t < GROUP; ++t) store_floats(part[g][i][p][t], total[t]);
                }
    }
    for (int64_t g = 0; g < num_groups; ++g)
        for (int64_t i = 0; i < num_tiles; ++i)
            store_products(part[g][i], tiles[i].valid, x, group + g, y + i * LANES, y_stride);
}

template <class F>
void dot_tiles(const Rows& rows, const Input& x, float* y, int64_t y_stride, int64_t a0, int64_t a1) {
    const TilesInUse in_use;
    const int64_t end = (x.first + x.count + GROUP - 1) / GROUP;
    WeightTile<F> tiles[ROW_TILES];
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
