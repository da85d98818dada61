// For any processor: gcc and clang compile four-lane vectors to the target's baseline instructions.
#include "kernels.h"

namespace {

constexpr int LANES = 4;
typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));

inline Floats zero() { return Floats{0, 0, 0, 0}; }
inline Floats broadcast(float f) { return Floats{f, f, f, f}; }
inline Floats mul(Floats a, Floats b) { return a * b; }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return a * b + c; }
inline float sum(Floats v) { return (v[0] + v[2]) + (v[1] + v[3]); }

inline Floats load_f32(const uint8_t* p) {
    Floats v;
    __builtin_memcpy(&v, p, 16);
    return v;
}

inline void store_f32(uint8_t* p, Floats v) { __builtin_memcpy(p, &v, 16); }

inline Ints load_u16(const uint8_t* p) {
    typedef uint16_t Halves __attribute__((vector_size(8)));
    Halves h;
    __builtin_memcpy(&h, p, 8);
    return __builtin_convertvector(h, Ints);
}

// The bits, shifted to their place in an f32, are the value times 2^-112, even for subnormals; infinity
// and NaN still need their exponent.
inline Floats f16_bits_to_floats(Ints bits) {
    Ints magnitude = (bits & 0x7fff) << 13;
    Ints is_special = magnitude >= (0x7c00 << 13);
    Floats scaled = reinterpret_cast<Floats>(magnitude) * 0x1p112f;
    return reinterpret_cast<Floats>(reinterpret_cast<Ints>(scaled) | (is_special & 0x7f800000) |
                                    ((bits & 0x8000) << 16));
}

inline Floats load_f16(const uint8_t* p) { return f16_bits_to_floats(load_u16(p)); }
inline Floats load_bf16(const uint8_t* p) { return reinterpret_cast<Floats>(load_u16(p) << 16); }

inline Floats load_i8(const uint8_t* p) {
    int8_t i[4];
    __builtin_memcpy(i, p, 4);
    return __builtin_convertvector((Ints{i[0], i[1], i[2], i[3]}), Floats);
}

inline void unpack_q4(const uint8_t* p, Floats* w) {
    for (int v = 0; v < 4; ++v) {
        const uint8_t* q = p + 4 * v;
        Ints bytes = {q[0], q[1], q[2], q[3]};
        w[v] = __builtin_convertvector((bytes & 15) - 8, Floats);
        w[v + 4] = __builtin_convertvector((bytes >> 4) - 8, Floats);
    }
}

inline float f16_to_float(const uint8_t* p) {
    uint16_t bits;
    __builtin_memcpy(&bits, p, 2);
    return f16_bits_to_floats(Ints{bits, 0, 0, 0})[0];
}

inline Floats scale_f16(const uint8_t* p) { return broadcast(f16_to_float(p)); }

inline void store_sums(Floats a, Floats b, Floats c, Floats d, float* y) {
    y[0] = sum(a), y[1] = sum(b), y[2] = sum(c), y[3] = sum(d);
}

#include "ahead.h"
#include "quantise.h"

inline void scale_many(const uint8_t* p, int64_t m, float c, float* y) {
    for (int64_t i = 0; i < m; ++i) y[i] = c * f16_to_float(p + 2 * i);
}

typedef int16_t Words __attribute__((vector_size(16)));
typedef uint16_t UnsignedWords __attribute__((vector_size(16)));

inline Ints load_ints(const uint8_t* p) {
    Ints v;
    __builtin_memcpy(&v, p, 16);
    return v;
}

// Always 16 bytes: a whole vector, and the smallest number of bytes that callers pass.
inline Ints load_some_ints(const uint8_t* p, int64_t) { return load_ints(p); }

inline Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }

inline Ints to_ints(Floats v) {  // of magnitudes below 2^22
    return reinterpret_cast<Ints>(v + 12582912.0f) - 0x4b400000;
}

inline Ints interleave(Ints a, Ints b, int first) {
    const Words x = reinterpret_cast<Words>(a), y = reinterpret_cast<Words>(b);
    Words both = {};
    for (int i = 0; i < 4; ++i) both[2 * i] = x[first + i], both[2 * i + 1] = y[first + i];
    return reinterpret_cast<Ints>(both);
}

inline Ints interleave_low(Ints a, Ints b) { return interleave(a, b, 0); }
inline Ints interleave_high(Ints a, Ints b) { return interleave(a, b, 4); }
inline Ints shift_words(Ints v, int n) {
    return reinterpret_cast<Ints>(reinterpret_cast<UnsignedWords>(v) >> n);
}
inline Ints low_bytes(Ints v) { return (v ^ 0x00800080) & 0x00ff00ff; }
inline Ints high_bytes(Ints v) { return reinterpret_cast<Ints>(reinterpret_cast<Words>(v) >> 8); }

inline Ints add_pairs(Ints sum, Ints a, Ints b) {
    return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
}

inline Ints larger(Ints a, Ints b) { return a > b ? a : b; }

template <class Op>
inline Ints over_lanes(Ints v, const Op& op) {
    v = op(v, Ints{v[2], v[3], v[0], v[1]});
    return op(v, Ints{v[1], v[0], v[3], v[2]});
}

template <int TIMES>
inline Ints spread(const int32_t* p, int64_t i) {
    static_assert(TIMES >= LANES, "one number per vector");
    return Ints{p[i], p[i], p[i], p[i]};
}

constexpr int FEW = LANES / 4;

inline Floats add_floats(Floats a, Floats b) { return a + b; }

// Rounded once, as at wider levels.
inline Floats fused(Floats a, Floats b, Floats c) {
    for (int lane = 0; lane < LANES; ++lane) c[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
    return c;
}

inline void transpose_16(const uint8_t* const* p, Ints* out) {
    int32_t words[4][4];
    for (int r = 0; r < 4; ++r) __builtin_memcpy(words[r], p[r], 16);
    for (int v = 0; v < 4; ++v) out[v] = Ints{words[0][v], words[1][v], words[2][v], words[3][v]};
}

inline Ints products_q8(const uint8_t* quants, const int16_t* x) {
    Ints sum = {};
    for (int i = 0; i < BLOCK; ++i) sum[i % 4] += static_cast<int8_t>(quants[i]) * x[i];
    return sum;
}

inline Ints products_q4(const uint8_t* nibbles, const int16_t* x) {
    Ints sum = {};
    for (int i = 0; i < 16; ++i) sum[i % 4] += (nibbles[i] & 15) * x[i] + (nibbles[i] >> 4) * x[i + 16];
    return sum;
}

inline Ints reduce(const Ints (*s)[4]) {
    Ints out = {};
    for (int i = 0; i < 4; ++i) out[i] = s[0][i][0] + s[0][i][1] + s[0][i][2] + s[0][i][3];
    return out;
}

inline Ints few_corrections(const int32_t* four) { return Ints{four[0], four[1], four[2], four[3]}; }

inline Floats few_numbers(const float (*number)[4]) {
    return load_f32(reinterpret_cast<const uint8_t*>(number));
}

inline Floats few_factors(const uint8_t* const* scale, int64_t m, const float* x_scale) {
    Floats of_row = load_f16(scale[0]);
    for (int64_t i = m; i < 4; ++i) of_row[i] = 0.0f;
    return of_row * load_f32(reinterpret_cast<const uint8_t*>(x_scale));
}

inline Ints dwords_of(const uint8_t* p) { return Ints{p[0], p[1], p[2], p[3]}; }
inline Ints ints_of(Ints v) { return v; }

// For coded_blocks.h.
inline Ints look_up(const uint8_t* table, Ints bytes) {
    typedef uint8_t Codes __attribute__((vector_size(16)));
    Codes code = reinterpret_cast<Codes>(bytes);
    for (int i = 0; i < 16; ++i) code[i] = table[code[i]];
    return reinterpret_cast<Ints>(code);
}

inline Ints add_to_bytes(Ints v, int n) {
    typedef uint8_t Bytes __attribute__((vector_size(16)));
    return reinterpret_cast<Ints>(reinterpret_cast<Bytes>(v) + static_cast<uint8_t>(n));
}

inline Ints nibbles_of_block(const uint8_t* p, int i) { return load_ints(p) >> 4 * i & 0x0f0f0f0f; }

// Four bits times 2^0, 2^7, 2^14 and 2^21 are one in each byte.
inline Ints fifth_bits(Ints numbers, int v) {
    return ((numbers >> 4 * v & 15) * 0x00204081 & 0x01010101) << 4;
}

inline Ints fifths_of_block(const uint8_t* p, int i) {
    const int32_t low = p[2 * i], high = p[2 * i + 1];
    const Ints fours = {low & 15, low >> 4, high & 15, high >> 4};
    return fifth_bits(fours, 0);
}

#include "blocks_madd.h"
#include "k_quants.h"
#include "k_quants_generic.h"
#include "rows_template.h"

}  // namespace

const Kernels kernels_generic = ALL_KERNELS;
