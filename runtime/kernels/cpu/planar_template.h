// Rows of q8_0 and q4_0, planar (all scales of a row, then all its quants) or as in a file, and their
// sums. Included by rows_template.h.
//
// Rows are summed in integers. In a group of up to SUM_ROWS rows, coefficient times scale is rounded to a
// 16-bit factor (by up to about 2^-16 of the group's largest factor), and one instruction multiplies the
// quants of two rows by their factors and adds both. So apart from the factors, the sum over a group is
// exact in any order, and rows with coefficient 0 change nothing. Besides what rows_template.h needs, the
// including file defines
//   Ints                         int32_t, LANES of them, as a vector of gcc and clang
//   load_ints(p) to_floats(v) to_ints(floats)          to_ints rounds to the nearest, ties to even
//   load_some_ints(p, n)         n bytes from p, a multiple of 16, then zeros
//   interleave_low(a, b)         in each 16 bytes, 16 bits of a and of b in turn, from the first 8
//   interleave_high(a, b)        the same from the last 8
//   shift_words(v, n)            shifts each 16 bits right by n, filling with zeros
//   low_bytes(v) high_bytes(v)   in each 16 bits, the lower int8 plus 128; the higher int8
//   add_pairs(sum, a, b)         sum + a * b, for int16: the two products in each 32 bits are added
//   spread<TIMES>(p, i)          p[i], p[i + 1], ..., each TIMES times
//   larger(a, b)                 the larger value of each lane
//   over_lanes(v, op)            op over all lanes; the result is in each lane

constexpr int64_t CHUNK = 16;  // blocks whose scales are read together

template <int64_t BYTES>
struct Planar {
    static constexpr int64_t HEAD_BYTES = 2, NUMBER_BYTES = 2, NUMBERS = 1, RANGES = 1, SPAN = 1;
    static constexpr int64_t QUANT_BYTES = BYTES, BLOCK_BYTES = BYTES + 2, VALUE_BYTES = 0;
    static constexpr bool SCALED = true, IS_PLANAR = true, HAS_ORDER = false;

    // The scale of block b in a row of n.
    static inline const uint8_t* scale(const uint8_t* row, int64_t, int64_t b) { return row + b * 2; }
    static inline const uint8_t* quants(const uint8_t* row, int64_t n, int64_t b) {
        return row + n * 2 + b * BYTES;
    }
};

// Offsets in a row as stored in a file. A block begins with its scale, after which it may have a minimum. In larger
// types, SHARING blocks of 32 values have one head and then their quants: such a block of the file is SPAN blocks here,
// of which each has QUANT_BYTES of its own.
template <int64_t BYTES, int64_t HEAD = 2, int64_t SHARING = 1>
struct Interleaved {
    static constexpr int64_t HEAD_BYTES = HEAD, NUMBER_BYTES = number_bytes(HEAD),
                             NUMBERS = HEAD / NUMBER_BYTES, RANGES = 1, SPAN = SHARING;
    static constexpr int64_t QUANT_BYTES = BYTES, BLOCK_BYTES = SPAN * BYTES + HEAD, VALUE_BYTES = 0;
    static constexpr bool SCALED = true, IS_PLANAR = false, HAS_ORDER = false;

    static inline const uint8_t* scale(const uint8_t* row, int64_t, int64_t b) {
        return row + b / SPAN * BLOCK_BYTES;
    }
    static inline const uint8_t* quants(const uint8_t* row, int64_t, int64_t b) {
        return row + b / SPAN * BLOCK_BYTES + HEAD + b % SPAN * BYTES;
    }
};

// Nibbles and Bytes: split() turns two interleaved units (16 bits of one row next to those of the
// other) into PARTS vectors of 16-bit values, offset by ZERO where start() corrects it. A unit is a
// vector of quants.

struct Nibbles {
    static constexpr int64_t PARTS = 4, ZERO = 8, UNIT = 8 * LANES;
    static constexpr bool HAS_NIBBLES = true, IS_CODED = false;

    static inline void unpack(const uint8_t* quants, Floats* w) { unpack_q4(quants, w); }
    // The parts are quants times 1, 16, 1 and 1. Sums of 64 rows, each at most 16 * 15 times a
    // factor, are below 2^31.
    static inline void split(Ints words, Ints* part) {
        part[0] = words & 0x000f000f;
        part[1] = words & 0x00f000f0;
        part[2] = shift_words(words, 8) & 0x000f000f;
        part[3] = shift_words(words, 12);
    }
    static inline void start(Ints offset, Ints* sum) {
        sum[0] = sum[2] = sum[3] = offset;
        sum[1] = offset << 4;
    }
    static inline void scales(Floats scale, Floats* part) {
        part[0] = part[2] = part[3] = scale;
        part[1] = mul(scale, broadcast(0x1p-4f));
    }
    // The column in a unit of lane i of part p, in the first or second half.
    static inline int64_t column(int64_t half, int64_t p, int64_t i) {
        return i / 4 * 32 + p % 2 * 16 + half * 8 + i % 4 * 2 + p / 2;
    }
};

struct Bytes {
    static constexpr int64_t PARTS = 2, ZERO = 128, UNIT = 4 * LANES;
    static constexpr bool HAS_NIBBLES = false, IS_CODED = false;

    static inline void unpack(const uint8_t* quants, Floats* w) {
        for (int v = 0; v < VECTORS; ++v) w[v] = load_i8(quants + v * LANES);
    }
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

// c[r] times the scales of a chunk: value = 16-bit factor * scale.
struct SumFactors {
    alignas(64) int32_t pair[SUM_ROWS / 2][CHUNK];  // of two rows, 16 bits each
    alignas(64) int32_t offset[CHUNK];              // corrects for ZERO
    alignas(64) float scale[CHUNK];
};

struct Q8_0 : Interleaved<32>, Bytes {};
struct Q4_0 : Interleaved<16>, Nibbles {};
struct Q8_0Planar : Planar<32>, Bytes {};
struct Q4_0Planar : Planar<16>, Nibbles {};

// 2^(e - 128) for a byte e, as f32, of LANES bytes and of one. The two smallest are subnormal.
inline Floats powers_of_two(const uint8_t* p) {
    const Ints e = ints_of(dwords_of(p));
    const Ints is_subnormal = e < 2;
    return reinterpret_cast<Floats>((is_subnormal & (e + 1) << 21) | (~is_subnormal & (e - 1) << 23));
}

inline float power_of_two(uint8_t e) {
    const int32_t bits = e < 2 ? (e + 1) << 21 : (e - 1) << 23;
    float power;
    __builtin_memcpy(&power, &bits, 4);
    return power;
}

// Half of the numbers of type ue4m3 (four bits of exponent, three of mantissa) in LANES bytes, and in one; 127 is 0.
// No f32 here is subnormal: NVFP4 took three times as long where the bits, shifted to their place in an f32, were
// multiplied by 2^119 (Zen 5, 16 rows in cache, a subnormal among them).
inline Floats halved_e4m3(const uint8_t* p) {
    const Ints e = ints_of(dwords_of(p)), is_number = e != 127, code = e & 127 & is_number;
    const Floats normal = reinterpret_cast<Floats>((code << 20) + (119 << 23));
    // Exact where it is the smaller one: where the exponent is 0.
    const Floats subnormal = fused(normal, broadcast(2.0f), broadcast(-0x1p-7f));
    return subnormal < normal ? subnormal : normal;
}

inline float halved_e4m3_of(uint8_t e) {
    const int32_t code = e == 127 ? 0 : e & 127, bits = (code << 20) + (119 << 23);
    float normal;
    __builtin_memcpy(&normal, &bits, 4);
    return code > 7 ? normal : static_cast<float>(code) * 0x1p-10f;
}

// A number before the quants of a block that begins at `head`: 0, its scale, or 1, its minimum or the scale of its
// second half.
template <class Format, int NUMBER>
inline float number_at(const uint8_t* head) {
    if constexpr (Format::RANGES == 2)
        return halved_e4m3_of(head[NUMBER]);
    else if constexpr (Format::NUMBER_BYTES == 1)
        return power_of_two(head[NUMBER]);
    else
        return f16_to_float(head + 2 * NUMBER);
}

constexpr float LARGEST_FACTOR = 32704.0f;

// -ZERO twice, 16 bits each.
template <class Quants>
constexpr int32_t MINUS_ZEROS = -0x10000 * Quants::ZERO + (0x10000 - Quants::ZERO);

// `up` turns coefficients times scales into factors, `scale` is the scale of these. Both follow from the
// bits of the largest product without its sign: such bits are ordered like the floats, with NaN last.
struct FactorScale {
    Floats up, scale;
};

inline FactorScale factor_scale(Ints largest) {
    const Ints is_nan = largest >= 0x7f800000;              // or infinite
    const Ints is_some = (largest > (28 << 23)) & ~is_nan;  // products up to 2^-99 count as 0
    const Floats most =
        reinterpret_cast<Floats>(is_some & largest) + reinterpret_cast<Floats>(~is_some & 0x3f800000);
    const Ints up = is_some & reinterpret_cast<Ints>(broadcast(LARGEST_FACTOR) / most);
    const Ints scale = is_some & reinterpret_cast<Ints>(mul(most, broadcast(1 / LARGEST_FACTOR)));
    return {reinterpret_cast<Floats>(up), reinterpret_cast<Floats>(scale | (is_nan & 0x7fc00000))};
}

// Factors of m blocks of k rows from their scales, `scale` [k, CHUNK], zeros past the end of a row.
template <class Format>
inline void fill(SumFactors& factors, const float (*scale)[CHUNK], int64_t k, int64_t m,
                 const float* c) {
    for (int64_t i = 0; i < m; i += LANES) {
        Ints largest = {};
        for (int64_t r = 0; r < k; ++r) {
            const Floats exact = mul(load_floats(scale[r] + i), broadcast(c[r]));
            const Ints bits = reinterpret_cast<Ints>(exact) & 0x7fffffff;
            largest = larger(largest, bits);
        }
        const FactorScale by = factor_scale(largest);
        Ints offset = {};
        for (int64_t r = 0; r < k; r += 2) {
            const Floats first = mul(load_floats(scale[r] + i), broadcast(c[r]));
            Ints pair = to_ints(mul(first, by.up)) & 0xffff;
            if (r + 1 < k) {
                const Floats second = mul(load_floats(scale[r + 1] + i), broadcast(c[r + 1]));
                pair |= to_ints(mul(second, by.up)) << 16;
            }
            __builtin_memcpy(factors.pair[r / 2] + i, &pair, sizeof pair);
            offset = add_pairs(offset, pair, Ints{} + MINUS_ZEROS<Format>);
        }
        __builtin_memcpy(factors.offset + i, &offset, sizeof offset);
        store_floats(factors.scale + i, by.scale);
    }
}

// Reads a number before the quants of m blocks of k rows (0: their scales), and appends zeros.
template <class Format, int NUMBER = 0>
inline void read_scales(const uint8_t* const* rows, int64_t k, int64_t n, int64_t b0, int64_t m,
                        float (*scale)[CHUNK]) {
    if (m < CHUNK) __builtin_memset(scale, 0, k * sizeof scale[0]);
    for (int64_t r = 0; r < k; ++r) {
        if constexpr (Format::IS_PLANAR)
            scale_many(Format::scale(rows[r], n, b0), m, 1.0f, scale[r]);
        else
            for (int64_t i = 0; i < m; ++i)
                scale[r][i] = number_at<Format, NUMBER>(Format::scale(rows[r], n, b0 + i));
    }
}

// Finds the quants of m blocks of k rows, contiguous for each row: in place, or copied to `copy`.
template <class Format>
inline void find_quants(const uint8_t* const* rows, int64_t k, int64_t n, int64_t b0, int64_t m,
                        uint8_t (*copy)[CHUNK * 32], const uint8_t** quants) {
    for (int64_t r = 0; r < k; ++r) {
        quants[r] = Format::IS_PLANAR ? Format::quants(rows[r], n, b0) : copy[r];
        for (int64_t i = 0; !Format::IS_PLANAR && i < m; ++i)
            __builtin_memcpy(copy[r] + i * Format::QUANT_BYTES, Format::quants(rows[r], n, b0 + i),
                             Format::QUANT_BYTES);
    }
}

// y += the unit's sums times their scales.
template <class Format>
inline void finish_unit(const Ints (*sum)[Format::PARTS], const SumFactors& factors, int64_t first,
                        float* y) {
    constexpr int64_t PARTS = Format::PARTS, TIMES = Format::QUANT_BYTES / 4;
    Floats scale[PARTS];
    const int32_t* scale_bits = reinterpret_cast<const int32_t*>(factors.scale);
    Format::scales(reinterpret_cast<Floats>(spread<TIMES>(scale_bits, first)), scale);
    for (int half = 0; half < 2; ++half)
        for (int64_t p = 0; p < PARTS; ++p, y += LANES)
            store_floats(y, multiply_add(to_floats(sum[half][p]), scale[p], load_floats(y)));
}

// Adds one unit of k rows, from a chunk's block `first` on, to y. `at` is the unit's offset in a row's
// quants, of which `bytes` exist; zeros follow.
template <class Format>
inline void add_unit(const uint8_t* const* quants, int64_t at, int64_t k, const SumFactors& factors,
                     int64_t first, float* y, int64_t bytes = 4 * LANES, AheadRows* then = nullptr) {
    constexpr int64_t PARTS = Format::PARTS, TIMES = Format::QUANT_BYTES / 4;
    Ints sum[2][PARTS];
    for (Ints* half : sum) Format::start(spread<TIMES>(factors.offset, first), half);
    for (int64_t r = 0; r < k; r += 2) {
        const Ints factor = spread<TIMES>(factors.pair[r / 2], first);
        const Ints a = load_some_ints(quants[r] + at, bytes);
        const Ints b = r + 1 < k ? load_some_ints(quants[r + 1] + at, bytes) : a;
        if (then) then->ask(), then->ask();
        Ints part[2][PARTS];
        Format::split(interleave_low(a, b), part[0]);
        Format::split(interleave_high(a, b), part[1]);
        for (int half = 0; half < 2; ++half)
            for (int64_t p = 0; p < PARTS; ++p)
                sum[half][p] = add_pairs(sum[half][p], part[half][p], factor);
    }
    finish_unit<Format>(sum, factors, first, y);
}

// Reorders whole units from add_unit()'s order to column order.
template <class Format>
void order_sums(float* y, int64_t d0, int64_t d1) {
    constexpr int64_t UNIT = Format::UNIT, PARTS = Format::PARTS;
    int32_t source[UNIT];  // a local array, whose contents the compiler knows
    for (int64_t v = 0; v < 2 * PARTS; ++v)
        for (int64_t i = 0; i < LANES; ++i)
            source[Format::column(v / PARTS, v % PARTS, i)] = static_cast<int32_t>(v * LANES + i);
    for (; d0 + UNIT <= d1; d0 += UNIT) {
        float sums[UNIT];
        for (int64_t i = 0; i < UNIT; ++i) sums[i] = y[d0 + source[i]];
        __builtin_memcpy(y + d0, sums, sizeof sums);
    }
}

// y += the first n of a unit's sums (whole blocks), reordered from add_unit()'s order to column order.
template <class Format>
inline void add_in_order(const float* sums, int64_t n, float* y) {
    constexpr int64_t PARTS = Format::PARTS;
    for (int64_t half = 0; half < 2; ++half)
        for (int64_t p = 0; p < PARTS / 2; ++p)
            for (int64_t i = 0; i < LANES; i += 4) {  // four even columns, and the four odd ones
                const int64_t d = Format::column(half, p, i);
                if (d >= n) continue;
                const float* even = sums + (half * PARTS + p) * LANES + i;
                const float* odd = even + PARTS / 2 * LANES;
                float whole[8];
                for (int64_t j = 0; j < 4; ++j) whole[2 * j] = even[j], whole[2 * j + 1] = odd[j];
                for (int64_t j = 0; j < 8; ++j) y[d + j] += whole[j];
            }
}

// Adds the last n values of k rows, fewer than a unit, to y in column order.
template <class Format>
inline void add_part_of_unit(const uint8_t* const* quants, int64_t at, int64_t k,
                             const SumFactors& factors, int64_t first, int64_t n, float* y) {
    alignas(64) float sums[Format::UNIT] = {};
    add_unit<Format>(quants, at, k, factors, first, sums, n * Format::QUANT_BYTES / BLOCK);
    add_in_order<Format>(sums, n, y);
}

// If there are more rows than this, and they are planar, each one's next chunk is prefetched; fewer
// rows should have been prefetched by the caller.
constexpr int64_t ASKED_ROWS = 8;

// Rows of a queue that are prefetched while a group of rows is summed.
constexpr int QUEUED_ROWS = 8;

// y[d0..d1) += the sum of c[r] * rows[r][d0..d1) over a group of k rows of n blocks, in the order of
// add_unit(). `ahead`, Ahead or AheadRows, prefetches other rows; with AheadRows, these rows should be in L2 already.
template <class Format, class Prefetch>
inline void add_group(const uint8_t* const* rows, Prefetch ahead, int64_t k, int64_t n, const float* c,
                      float* y, int64_t d0, int64_t d1) {
    constexpr int64_t UNIT = Format::UNIT;
    SumFactors factors;
    alignas(64) float scale[SUM_ROWS][CHUNK];
    const uint8_t* quants[SUM_ROWS];
    alignas(64) uint8_t copy[Format::IS_PLANAR ? 1 : SUM_ROWS][CHUNK * 32];
    for (int64_t b0 = d0 / BLOCK, b1; b0 < d1 / BLOCK; b0 = b1) {
        b1 = b0 + CHUNK < d1 / BLOCK ? b0 + CHUNK : d1 / BLOCK;
        const int64_t m = b1 - b0, wanted = (b1 - d0 / BLOCK) * Format::BLOCK_BYTES;
        if constexpr (!Prefetch::IS_WHILE_ADDING) ahead.ask_below(wanted);
        read_scales<Format>(rows, k, n, b0, m, scale);
        if constexpr (!Prefetch::IS_WHILE_ADDING) ahead.ask_below(wanted);
        fill<Format>(factors, scale, k, m, c);
        find_quants<Format>(rows, k, n, b0, m, copy, quants);
        int64_t d = 0, at = 0;
        for (; d + UNIT <= m * BLOCK; d += UNIT, at += 4 * LANES) {
            float* to = y + b0 * BLOCK + d;
            if constexpr (Prefetch::IS_WHILE_ADDING) {
                add_unit<Format>(quants, at, k, factors, d / BLOCK, to, 4 * LANES, &ahead);
                continue;
            }
            for (int64_t r = 0; Format::IS_PLANAR && k > ASKED_ROWS && r < k; ++r)
                __builtin_prefetch(quants[r] + at + CHUNK * Format::QUANT_BYTES);
            if constexpr (!Prefetch::IS_WHILE_ADDING) ahead.ask_below(wanted);
            add_unit<Format>(quants, at, k, factors, d / BLOCK, to);
        }
        if (d < m * BLOCK)
            add_part_of_unit<Format>(quants, at, k, factors, d / BLOCK, m * BLOCK - d,
                                     y + b0 * BLOCK + d);
    }
}
