// Planar rows: all scales of a row, then all its quants. Included by rows_template.h.
//
// The sum of rows is one of integers. Of up to 4 rows, coefficient times scale becomes a factor of
// 16 bits, and one instruction multiplies the quants of two rows by their factors and adds both;
// what is rounded is at most 2^-15 of the largest factor of the 4. Beside what rows_template.h
// wants the including file defines
//   Ints                         int32_t, LANES of them, as a vector of gcc and clang
//   load_ints(p) to_floats(v) to_ints(floats)          to_ints rounds to the nearest, ties to even
//   interleave_low(a, b)         of each 16 bytes: 16 bits of a, 16 of b, ... of the first 8 bytes
//   interleave_high(a, b)        of the last 8 bytes
//   shift_words(v, n)            each 16 bits to the right, zeros follow
//   low_bytes(v) high_bytes(v)   int8 of each 16 bits as 16 bits: the low one + 128, the high one
//   add_pairs(sum, a, b)         sum + the products of int16, two of them in 32 bits
//   spread<TIMES>(p, i)          p[i], p[i + 1], ..., each TIMES times
//   block_products(quants, x)    32 int8 times 32 int16, in LANES sums

constexpr int64_t CHUNK = 16;  // blocks whose scales are read together

template <int64_t BYTES>
struct Planar {
    static constexpr int64_t QUANT_BYTES = BYTES, BLOCK_BYTES = BYTES + 2;
    static constexpr bool SCALED = true, IS_PLANAR = true;
    // Values in one vector of quants.
    static constexpr int64_t UNIT = 4 * LANES * BLOCK / BYTES;

    // Of block b of a row of n.
    static inline const uint8_t* scale(const uint8_t* row, int64_t, int64_t b) {
        return row + b * 2;
    }
    static inline const uint8_t* quants(const uint8_t* row, int64_t n, int64_t b) {
        return row + n * 2 + b * BYTES;
    }
};

// A format says how two interleaved units, with 16 bits of one row beside those of the other, are
// split into PARTS vectors of 16-bit values, counted from ZERO: see start() and scales().

struct Q4_0Planar : Planar<16> {
    static constexpr int64_t PARTS = 4, ZERO = 8;

    static inline void unpack(const uint8_t* quants, Floats* w) { unpack_q4(quants, w); }
    template <int ROWS>
    static inline void dot(const uint8_t* const* rows, const uint8_t* const* next, int64_t n,
                           const uint8_t* x, float* y) {
        dot_q4_planar<ROWS>(rows, next, n, x, y);
    }
    // Times 1, 16, 256 and 1.
    static inline void split(Ints words, Ints* part) {
        part[0] = words & 0x000f000f;
        part[1] = words & 0x00f000f0;
        part[2] = words & 0x0f000f00;
        part[3] = shift_words(words, 12);
    }
    static inline void start(Ints offset, Ints* sum) {
        sum[0] = sum[3] = offset;
        sum[1] = offset << 4;
        sum[2] = offset << 8;
    }
    static inline void scales(Floats scale, Floats* part) {
        part[0] = part[3] = scale;
        part[1] = mul(scale, broadcast(0x1p-4f));
        part[2] = mul(scale, broadcast(0x1p-8f));
    }
    // Where in a unit lane i of part p of the first or second half is.
    static inline int64_t column(int64_t half, int64_t p, int64_t i) {
        return i / 4 * 32 + p % 2 * 16 + half * 8 + i % 4 * 2 + p / 2;
    }
};

struct Q8_0Planar : Planar<32> {
    static constexpr int64_t PARTS = 2, ZERO = 128;

    static inline void unpack(const uint8_t* quants, Floats* w) {
        for (int v = 0; v < VECTORS; ++v) w[v] = load_i8(quants + v * LANES);
    }
    template <int ROWS>
    static inline void dot(const uint8_t* const* rows, const uint8_t* const* next, int64_t n,
                           const uint8_t* packed, float* y);
    static inline void split(Ints words, Ints* part) {
        part[0] = low_bytes(words);
        part[1] = high_bytes(words);
    }
    static inline void start(Ints offset, Ints* sum) {
        sum[0] = offset;
        sum[1] = Ints{};
    }
    static inline void scales(Floats scale, Floats* part) { part[0] = part[1] = scale; }
    static inline int64_t column(int64_t half, int64_t p, int64_t i) {
        return i / 4 * 16 + half * 8 + i % 4 * 2 + p;
    }
};

template <int ROWS>
inline void Q8_0Planar::dot(const uint8_t* const* rows, const uint8_t* const* next, int64_t n,
                            const uint8_t* packed, float* y) {
    const int16_t* x = values_of(packed);
    Floats sums[ROWS];
    for (Floats& sum : sums) sum = zero();
    Ahead<ROWS> ahead(next, n * BLOCK_BYTES, (n + 1) / 2);
    alignas(64) float factor[ROWS][CHUNK];
    for (int64_t b0 = 0; b0 < n; b0 += CHUNK) {
        const int64_t m = n - b0 < CHUNK ? n - b0 : CHUNK;
        for (int r = 0; r < ROWS; ++r) {
            scale_many(scale(rows[r], n, b0), m, 1.0f, factor[r]);
            const float* x_scale = scales_of(packed, n) + b0;  // more of x lies behind the last
            for (int64_t i = 0; i < CHUNK; i += LANES)
                store_floats(factor[r] + i, mul(load_floats(factor[r] + i),
                                                load_floats(x_scale + i)));
        }
        // Else gcc broadcasts them out of registers, through the port that the unpacking needs.
        asm("" : "+m"(factor));
        for (int64_t b = b0; b < b0 + m; ++b) {
            if (b % 2 == 0) ahead.ask();
            for (int r = 0; r < ROWS; ++r) {
                const Ints products = block_products(quants(rows[r], n, b), x + b * BLOCK);
                const Floats by = broadcast(factor[r][b - b0]);
                sums[r] = multiply_add(to_floats(products), by, sums[r]);
            }
        }
    }
    for (int r = 0; r < ROWS; ++r) y[r] = sum(sums[r]);
}

// c[r] times the scales of a chunk: value = 16-bit factor * scale.
template <int ROWS>
struct SumFactors {
    alignas(64) int32_t pair[(ROWS + 1) / 2][CHUNK];  // of two rows, 16 bits each
    alignas(64) int32_t offset[CHUNK];                // what their ZEROs come to
    alignas(64) float scale[CHUNK];
};

// Of blocks b0 .. b0 + m - 1. ask() is called now and then.
template <class Format, int ROWS, class Ask>
inline void fill(SumFactors<ROWS>& factors, const uint8_t* const* rows, int64_t n, int64_t b0,
                 int64_t m, const float* c, const Ask& ask) {
    constexpr int32_t MINUS_ZEROS = -0x10000 * Format::ZERO + (0x10000 - Format::ZERO);
    ask();
    alignas(64) float exact[ROWS][CHUNK];
    if (m < CHUNK) __builtin_memset(exact, 0, sizeof exact);
    for (int r = 0; r < ROWS; ++r) scale_many(Format::scale(rows[r], n, b0), m, c[r], exact[r]);
    ask();
    for (int64_t i = 0; i < CHUNK; i += LANES) {
        // Bits of floats without their sign are in the order of the floats, and what is no number
        // comes last.
        Ints largest = {};
        for (int r = 0; r < ROWS; ++r) {
            const Ints bits = reinterpret_cast<Ints>(load_floats(exact[r] + i)) & 0x7fffffff;
            largest = largest > bits ? largest : bits;
        }
        // The power of two at or below it, or the next where 16 bits would round to that.
        const Floats above = mul(reinterpret_cast<Floats>(largest), broadcast(1.0f + 0x1p-12f));
        Ints power = reinterpret_cast<Ints>(above) & 0x7f800000;
        const Ints least = Ints{} + (28 << 23);  // 2^-99: below it factors become 0
        power = power > least ? power : least;
        const Floats up = reinterpret_cast<Floats>((268 - (power >> 23)) << 23);  // 2^14 over it
        Ints offset = {};
        for (int r = 0; r < ROWS; r += 2) {
            Ints pair = to_ints(mul(load_floats(exact[r] + i), up)) & 0xffff;
            if (r + 1 < ROWS) pair |= to_ints(mul(load_floats(exact[r + 1] + i), up)) << 16;
            __builtin_memcpy(factors.pair[r / 2] + i, &pair, sizeof pair);
            offset = add_pairs(offset, pair, Ints{} + MINUS_ZEROS);
        }
        __builtin_memcpy(factors.offset + i, &offset, sizeof offset);
        const Ints is_no_number = largest >= 0x7f800000;  // and then nor is the scale
        const Ints scale = (power - (14 << 23)) | (is_no_number & 0x7fc00000);
        store_floats(factors.scale + i, reinterpret_cast<Floats>(scale));
    }
}

// One unit of each row, of a chunk's block `first` and those behind it, onto y.
template <class Format, int ROWS>
inline void add_unit(const uint8_t* const* quants, const SumFactors<ROWS>& factors, int64_t first,
                     float* y) {
    constexpr int64_t PARTS = Format::PARTS, TIMES = Format::QUANT_BYTES / 4;
    Ints sum[2][PARTS];
    for (Ints* half : sum) Format::start(spread<TIMES>(factors.offset, first), half);
#pragma GCC unroll 2
    for (int r = 0; r < ROWS; r += 2) {
        const Ints factor = spread<TIMES>(factors.pair[r / 2], first);
        const Ints a = load_ints(quants[r]), b = r + 1 < ROWS ? load_ints(quants[r + 1]) : a;
        Ints part[2][PARTS];
        Format::split(interleave_low(a, b), part[0]);
        Format::split(interleave_high(a, b), part[1]);
        for (int half = 0; half < 2; ++half)
            for (int64_t p = 0; p < PARTS; ++p)
                sum[half][p] = add_pairs(sum[half][p], part[half][p], factor);
    }
    Floats scale[PARTS];
    const int32_t* scale_bits = reinterpret_cast<const int32_t*>(factors.scale);
    Format::scales(reinterpret_cast<Floats>(spread<TIMES>(scale_bits, first)), scale);
    for (int half = 0; half < 2; ++half)
        for (int64_t p = 0; p < PARTS; ++p, y += LANES)
            store_floats(y, multiply_add(to_floats(sum[half][p]), scale[p], load_floats(y)));
}

// From the order in which add_unit() leaves whole units to that of their columns.
template <class Format>
void order_sums(float* y, int64_t d0, int64_t d1) {
    constexpr int64_t UNIT = Format::UNIT, PARTS = Format::PARTS;
    int32_t source[UNIT];  // the compiler knows what is in it
    for (int64_t v = 0; v < 2 * PARTS; ++v)
        for (int64_t i = 0; i < LANES; ++i)
            source[Format::column(v / PARTS, v % PARTS, i)] = static_cast<int32_t>(v * LANES + i);
    for (; d0 + UNIT <= d1; d0 += UNIT) {
        float sums[UNIT];
        for (int64_t i = 0; i < UNIT; ++i) sums[i] = y[d0 + source[i]];
        __builtin_memcpy(y + d0, sums, sizeof sums);
    }
}

// What fills no unit: n values at the end of rows, whose sums are in the order of columns.
template <class Format, int ROWS>
inline void add_part_of_unit(const uint8_t* const* quants, const SumFactors<ROWS>& factors,
                             int64_t first, int64_t n, float* y) {
    uint8_t bytes[ROWS][4 * LANES] = {};
    const uint8_t* at[ROWS];
    for (int r = 0; r < ROWS; ++r) {
        __builtin_memcpy(bytes[r], quants[r], n * Format::QUANT_BYTES / BLOCK);
        at[r] = bytes[r];
    }
    float sums[Format::UNIT] = {};
    add_unit<Format, ROWS>(at, factors, first, sums);
    order_sums<Format>(sums, 0, Format::UNIT);
    for (int64_t i = 0; i < n; ++i) y[i] += sums[i];
}

// y[d0..d1) += the sum of c[r] * rows[r][d0..d1), rows of n blocks, in the order of add_unit(). The
// memory is asked for the next rows all the time, also where nothing is read: it has no rest then.
template <class Format, int ROWS>
inline void add_planar(const uint8_t* const* rows, const uint8_t* const* next, int64_t n,
                       const float* c, float* y, int64_t d0, int64_t d1) {
    constexpr int64_t UNIT = Format::UNIT, BYTES = Format::BLOCK_BYTES;
    SumFactors<ROWS> factors;
    const uint8_t* begin[ROWS];
    for (int r = 0; r < ROWS; ++r) begin[r] = next[r] + d0 / BLOCK * BYTES;
    Ahead<ROWS> ahead(begin, (d1 - d0) / BLOCK * BYTES);
    for (int64_t b0 = d0 / BLOCK, b1; b0 < d1 / BLOCK; b0 = b1) {
        b1 = b0 + CHUNK < d1 / BLOCK ? b0 + CHUNK : d1 / BLOCK;
        const int64_t m = b1 - b0, wanted = (b1 - d0 / BLOCK) * BYTES;
        fill<Format>(factors, rows, n, b0, m, c, [&] { ahead.ask_below(wanted); });
        const uint8_t* quants[ROWS];
        for (int r = 0; r < ROWS; ++r) quants[r] = Format::quants(rows[r], n, b0);
        int64_t d = 0;
        for (; d + UNIT <= m * BLOCK; d += UNIT) {
            ahead.ask_below(wanted);
            add_unit<Format, ROWS>(quants, factors, d / BLOCK, y + b0 * BLOCK + d);
            for (int r = 0; r < ROWS; ++r) quants[r] += 4 * LANES;
        }
        if (d < m * BLOCK)
            add_part_of_unit<Format, ROWS>(quants, factors, d / BLOCK, m * BLOCK - d,
                                           y + b0 * BLOCK + d);
    }
}
