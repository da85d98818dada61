// Packs blocks of llama.cpp's IQ1, IQ2 and IQ3 types, whose values are entries of grids, as blocks of table types
// (weight_types.py): of 256 values each, with the same values. The layouts in files are those of
// dequantize_row_iq* in ggml-quants.c, the others those of block_q3_K and block_iq4_xs in ggml-common.h; called by
// table_blocks.py, which has the same in numpy.
#include <cstdint>
#include <cstring>

namespace {

enum GgmlType : int32_t {
    IQ2_XXS = 16,
    IQ2_XS = 17,
    IQ3_XXS = 18,
    IQ1_S = 19,
    IQ3_S = 21,
    IQ2_S = 22,
    IQ1_M = 29
};
enum Status : int32_t { STATUS_OK, STATUS_BAD_ARGUMENT };

struct Spread {
    uint64_t of[256];  // bit i of a number as byte i

    constexpr Spread() : of() {
        for (int bits = 0; bits < 256; ++bits)
            for (int i = 0; i < 8; ++i) of[bits] |= static_cast<uint64_t>(bits >> i & 1) << 8 * i;
    }
};
constexpr Spread SPREAD;

template <class T>
T load(const uint8_t* at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

// Eight signs of which seven are stored; the number of minus signs is even.
uint32_t with_parity(uint32_t signs) {
    signs &= 127;
    return signs | (__builtin_popcount(signs) & 1) << 7;
}

// A type with a grid of eight values an entry: entry(block, g) is the place of values 8g .. 8g+7, signs(block, g) a bit
// for each, s(block, j) the scale of values 16j .. 16j+15, which is multiplied as 2s+1.
struct FromIQ2_XXS {
    static constexpr int64_t BYTES = 66;
    static uint16_t d(const uint8_t* block) { return load<uint16_t>(block); }
    static uint32_t last(const uint8_t* block, int part) {
        return load<uint32_t>(block + 6 + 8 * part);
    }
    static int entry(const uint8_t* block, int g) { return block[2 + g / 4 * 8 + g % 4]; }
    static uint32_t signs(const uint8_t* block, int g) {
        return with_parity(last(block, g / 4) >> g % 4 * 7);
    }
    static int s(const uint8_t* block, int j) { return last(block, j / 2) >> 28; }
};

struct FromIQ2_XS {
    static constexpr int64_t BYTES = 74;
    static uint16_t d(const uint8_t* block) { return load<uint16_t>(block); }
    static uint32_t number(const uint8_t* block, int g) { return load<uint16_t>(block + 2 + 2 * g); }
    static int entry(const uint8_t* block, int g) { return number(block, g) & 511; }
    static uint32_t signs(const uint8_t* block, int g) { return with_parity(number(block, g) >> 9); }
    static int s(const uint8_t* block, int j) { return block[66 + j / 2] >> j % 2 * 4 & 15; }
};

struct FromIQ2_S {
    static constexpr int64_t BYTES = 82;
    static uint16_t d(const uint8_t* block) { return load<uint16_t>(block); }
    static int entry(const uint8_t* block, int g) {
        return block[2 + g] | (block[66 + g / 4] >> g % 4 * 2 & 3) << 8;
    }
    static uint32_t signs(const uint8_t* block, int g) { return block[34 + g]; }
    static int s(const uint8_t* block, int j) { return block[74 + j / 2] >> j % 2 * 4 & 15; }
};

// In IQ1 types all eight signs are that of what is added to the entry's values.
struct FromIQ1_S {
    static constexpr int64_t BYTES = 50;
    static uint16_t d(const uint8_t* block) { return load<uint16_t>(block); }
    static uint32_t of_part(const uint8_t* block, int part) {
        return load<uint16_t>(block + 34 + 2 * part);
    }
    static int entry(const uint8_t* block, int g) {
        return block[2 + g] | (of_part(block, g / 4) >> g % 4 * 3 & 7) << 8;
    }
    static uint32_t signs(const uint8_t* block, int g) { return of_part(block, g / 4) >> 15 ? 255 : 0; }
    static int s(const uint8_t* block, int j) { return of_part(block, j / 2) >> 12 & 7; }
};

struct FromIQ1_M {
    static constexpr int64_t BYTES = 56;
    static uint32_t number(const uint8_t* block, int i) { return load<uint16_t>(block + 48 + 2 * i); }
    static uint16_t d(const uint8_t* block) {  // four bits are at the top of each number
        uint32_t bits = 0;
        for (int i = 0; i < 4; ++i) bits |= number(block, i) >> 12 << 4 * i;
        return static_cast<uint16_t>(bits);
    }
    static int upper(const uint8_t* block, int g) { return block[32 + g / 2] >> g % 2 * 4; }
    static int entry(const uint8_t* block, int g) { return block[g] | (upper(block, g) & 7) << 8; }
    static uint32_t signs(const uint8_t* block, int g) { return upper(block, g) & 8 ? 255 : 0; }
    static int s(const uint8_t* block, int j) { return number(block, j / 4) >> j % 4 * 3 & 7; }
};

// A type with a grid of four values an entry: entry(block, q) is the place of values 4q .. 4q+3, s(block, part) the
// scale of a part of 32 values.
struct FromIQ3_XXS {
    static constexpr int64_t BYTES = 98;
    static uint16_t d(const uint8_t* block) { return load<uint16_t>(block); }
    static uint32_t last(const uint8_t* block, int part) {
        return load<uint32_t>(block + 66 + 4 * part);
    }
    static int entry(const uint8_t* block, int q) { return block[2 + q]; }
    static uint32_t signs(const uint8_t* block, int g) {
        return with_parity(last(block, g / 4) >> g % 4 * 7);
    }
    static int s(const uint8_t* block, int part) { return last(block, part) >> 28; }
};

struct FromIQ3_S {
    static constexpr int64_t BYTES = 110;
    static uint16_t d(const uint8_t* block) { return load<uint16_t>(block); }
    static int entry(const uint8_t* block, int q) {
        return block[2 + q] | (block[66 + q / 8] >> q % 8 & 1) << 8;
    }
    static uint32_t signs(const uint8_t* block, int g) { return block[74 + g]; }
    static int s(const uint8_t* block, int part) { return block[106 + part / 2] >> part % 2 * 4 & 15; }
};

// Scales count from -32, in six bits.
int number_of(int s) { return 2 * s + 1 + 32; }

// To the shape of q3_K. `grid`: the lower two bits of the codes of each entry, as bytes.
template <class From>
void pack_eights(const uint8_t* from, const uint64_t* grid, int64_t num_blocks, uint8_t* to) {
    for (int64_t b = 0; b < num_blocks; ++b, from += From::BYTES, to += 110) {
        uint64_t third[4] = {}, twos[8] = {};
        for (int part = 0; part < 8; ++part)
            for (int i = 0; i < 4; ++i) {
                twos[part / 4 * 4 + i] |= grid[From::entry(from, 4 * part + i)] << part % 4 * 2;
                third[i] |= SPREAD.of[From::signs(from, 4 * part + i)] << part;
            }
        uint8_t numbers[12] = {};
        for (int j = 0; j < 16; ++j) {
            const int number = number_of(From::s(from, j));
            numbers[j % 8] |= (number & 15) << j / 8 * 4;
            numbers[8 + j % 4] |= number >> 4 << j / 4 * 2;
        }
        const uint16_t d = From::d(from);
        std::memcpy(to, third, sizeof third);
        std::memcpy(to + 32, twos, sizeof twos);
        std::memcpy(to + 96, numbers, sizeof numbers);
        std::memcpy(to + 108, &d, sizeof d);
    }
}

// To the shape of iq4_xs. `grid`: the lower three bits of the codes of each entry, as bytes.
template <class From>
void pack_fours(const uint8_t* from, const uint32_t* grid, int64_t num_blocks, uint8_t* to) {
    for (int64_t b = 0; b < num_blocks; ++b, from += From::BYTES, to += 136) {
        uint64_t quants[16];
        for (int part = 0; part < 8; ++part) {
            uint64_t codes[4];
            for (int i = 0; i < 4; ++i) {
                const int g = 4 * part + i;
                const uint64_t high = grid[From::entry(from, 2 * g + 1)];
                codes[i] =
                    grid[From::entry(from, 2 * g)] | high << 32 | SPREAD.of[From::signs(from, g)] << 3;
            }
            quants[2 * part] = codes[0] | codes[2] << 4,
                       quants[2 * part + 1] = codes[1] | codes[3] << 4;
        }
        uint16_t upper = 0;
        uint32_t nibbles = 0;
        for (int part = 0; part < 8; ++part) {
            const int number = number_of(From::s(from, part));
            upper |= number >> 4 << 2 * part, nibbles |= static_cast<uint32_t>(number & 15) << 4 * part;
        }
        const uint16_t d = From::d(from);
        std::memcpy(to, &d, sizeof d);
        std::memcpy(to + 2, &upper, sizeof upper);
        std::memcpy(to + 4, &nibbles, sizeof nibbles);
        std::memcpy(to + 8, quants, sizeof quants);
    }
}

}  // namespace

// `type`: of enum ggml_type. `grid`: the entries of the type's grid, the lower bits of a code a byte. `to`: 110 bytes a
// block, or 136 of IQ3 types.
extern "C" __attribute__((visibility("default"))) int32_t hs_pack_table_blocks(
    int32_t type, const uint8_t* from, const uint8_t* grid, int64_t num_blocks, uint8_t* to) {
    const auto* eights = reinterpret_cast<const uint64_t*>(grid);
    const auto* fours = reinterpret_cast<const uint32_t*>(grid);
    switch (type) {
        case IQ1_S:
            pack_eights<FromIQ1_S>(from, eights, num_blocks, to);
            break;
        case IQ1_M:
            pack_eights<FromIQ1_M>(from, eights, num_blocks, to);
            break;
        case IQ2_XXS:
            pack_eights<FromIQ2_XXS>(from, eights, num_blocks, to);
            break;
        case IQ2_XS:
            pack_eights<FromIQ2_XS>(from, eights, num_blocks, to);
            break;
        case IQ2_S:
            pack_eights<FromIQ2_S>(from, eights, num_blocks, to);
            break;
        case IQ3_XXS:
            pack_fours<FromIQ3_XXS>(from, fours, num_blocks, to);
            break;
        case IQ3_S:
            pack_fours<FromIQ3_S>(from, fours, num_blocks, to);
            break;
        default:
            return STATUS_BAD_ARGUMENT;
    }
    return STATUS_OK;
}
