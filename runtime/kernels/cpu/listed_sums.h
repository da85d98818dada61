// Sums of a window's rows for several vectors, each of which takes few of them. A few columns of the rows are
// copied to L1 at a time, and each vector adds the rows that it lists, with its sums in registers. Rows are
// added in order, so sums are bit-identical to those of accumulate_rows. Included by rows_template.h.
//
// accumulate_rows reads a row from L2 for each vector: 54 ns for 2,048 bf16 values on a Zen 5, of which the
// additions take 16.

// The rows that a vector takes: their places in the window, ascending, and their coefficients, as the
// tile's prepare() leaves them.
struct Listed {
    const uint16_t* place;
    float* c;
    int64_t count;
};

// Adds listed rows of a tile of COLUMNS columns to y, in f32.
template <class Format>
struct FloatTile {
    // Whole blocks: the columns of a row after its last block are added without a fused multiply-add.
    static constexpr int VALUES = Format::VALUE_BYTES == 4 || VECTORS > 4 ? VECTORS : 4;
    static constexpr int64_t COLUMNS = VALUES * LANES, VALUE_BYTES = Format::VALUE_BYTES;
    static_assert(COLUMNS % BLOCK == 0);
    static constexpr AccumulateRows* ADD_ROWS = accumulate_rows<Format>;

    static inline void prepare(const Listed&) {}

    static inline void add(const uint8_t* tile, const Listed& list, float* y) {
        Floats sum[VALUES];
        for (int v = 0; v < VALUES; ++v) sum[v] = load_floats(y + v * LANES);
        for (int64_t i = 0; i < list.count; ++i) {
            const uint8_t* row = tile + list.place[i] * COLUMNS * VALUE_BYTES;
            const Floats by = broadcast(list.c[i]);
            for (int v = 0; v < VALUES; ++v)
                sum[v] = multiply_add(load_as(Format{}, row + v * LANES * VALUE_BYTES), by, sum[v]);
        }
        for (int v = 0; v < VALUES; ++v) store_floats(y + v * LANES, sum[v]);
    }
};

constexpr int64_t LISTED_VECTORS = 72;  // whose lists are made together; RowSums passes no more

// The lists of at most LISTED_VECTORS vectors.
struct WindowLists {
    WindowLists(const ManySums& s, int64_t k) {
        const int64_t groups = (k + SUM_ROWS - 1) / SUM_ROWS;
        for (int64_t t = 0; t < s.count; ++t) {
            for (int64_t g = 0; g < groups; ++g) {
                const uint64_t mask = s.mask[t * s.mask_stride + g * s.mask_group];
                const float* from = s.c + t * s.c_stride + g * s.c_group;
                used[g] |= mask;
                for (uint64_t left = mask; left; left &= left - 1) {
                    const int64_t j = __builtin_ctzll(left);
                    place[begin[t + 1]] = static_cast<uint16_t>(g * SUM_ROWS + j);
                    c[begin[t + 1]++] = from[j];
                }
            }
            begin[t + 2] = begin[t + 1];
        }
    }

    Listed of(int64_t t) { return {place + begin[t], c + begin[t], begin[t + 1] - begin[t]}; }

    int64_t begin[LISTED_VECTORS + 2] = {};
    uint64_t used[WINDOW_ROWS / SUM_ROWS] = {};  // by any vector
    uint16_t place[LISTED_VECTORS * WINDOW_ROWS];
    float c[LISTED_VECTORS * WINDOW_ROWS];
};

// Adds rows a0 .. a0 + k - 1 to the vectors that list them.
template <class Tile>
void add_listed(const Rows& rows, int64_t a0, int64_t k, const ManySums& all) {
    constexpr int64_t ROW_BYTES = Tile::COLUMNS * Tile::VALUE_BYTES;
    alignas(64) uint8_t tile[WINDOW_ROWS * ROW_BYTES];
    const int64_t whole = all.d0 + (all.d1 - all.d0) / Tile::COLUMNS * Tile::COLUMNS;
    for (int64_t t0 = 0; t0 < all.count; t0 += LISTED_VECTORS) {
        ManySums s = all;
        s.c += t0 * s.c_stride, s.mask += t0 * s.mask_stride, s.y += t0 * s.y_stride;
        s.count = s.count - t0 < LISTED_VECTORS ? s.count - t0 : LISTED_VECTORS;
        WindowLists lists(s, k);
        for (int64_t t = 0; t < s.count; ++t) Tile::prepare(lists.of(t));
        for (int64_t d = s.d0; d < whole; d += Tile::COLUMNS) {
            for (int64_t g = 0; g * SUM_ROWS < k; ++g)
                for (uint64_t left = lists.used[g]; left; left &= left - 1) {
                    const int64_t j = g * SUM_ROWS + __builtin_ctzll(left);
                    const uint8_t* from = row_of(rows, a0 + j) + d * Tile::VALUE_BYTES;
                    __builtin_memcpy(tile + j * ROW_BYTES, from, ROW_BYTES);
                    for (int64_t at = ROW_BYTES; at < 2 * ROW_BYTES; at += 64) __builtin_prefetch(from + at, 0, 2);
                }
            for (int64_t t = 0; t < s.count; ++t)
                if (const Listed list = lists.of(t); list.count)
                    Tile::add(tile, list, s.y + t * s.y_stride + d);
        }
        s.d0 = whole;
        for (int64_t g = 0; s.d0 < s.d1 && g * SUM_ROWS < k; ++g) {
            accumulate_lists(Tile::ADD_ROWS, rows, a0 + g * SUM_ROWS, s);
            s.c += s.c_group, s.mask += s.mask_group;
        }
    }
}
