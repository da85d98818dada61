// The encoders, written once as plain loops that the compiler turns into vector code. Included at
// the end of each encode_<level>.cpp, inside its anonymous namespace, so that every level has
// copies of its own: were they shared, the linker could keep the AVX2 copy for all of them. For the
// same reason nothing here comes from C++ library headers.
//
// The including file defines, for BLOCK values at unaligned addresses:
//   f16_to_floats(p, x)  floats_to_f16(x, p)
// and, for a square of size * size values, size a multiple of 8,
//   turn(from, to, size)             to[r][c] = from[c][r]

inline uint32_t bits_of(float f) {
    uint32_t bits;
    __builtin_memcpy(&bits, &f, 4);
    return bits;
}

inline float float_of(uint32_t bits) {
    float f;
    __builtin_memcpy(&f, &bits, 4);
    return f;
}

inline uint32_t magnitude(float f) { return bits_of(f) & 0x7FFFFFFF; }

// ---- source formats: BLOCK values to f32 ------------------------------------------------------

struct F32 {
    static constexpr int64_t BYTES = 4;
    static inline void unpack(const uint8_t* p, float* x) { __builtin_memcpy(x, p, BLOCK * 4); }
};

struct F16 {
    static constexpr int64_t BYTES = 2;
    static inline void unpack(const uint8_t* p, float* x) { f16_to_floats(p, x); }
};

struct BF16 {
    static constexpr int64_t BYTES = 2;
    static inline void unpack(const uint8_t* p, float* x) {
        uint16_t half[BLOCK];
        __builtin_memcpy(half, p, sizeof half);
        for (int i = 0; i < BLOCK; ++i) x[i] = float_of(static_cast<uint32_t>(half[i]) << 16);
    }
};

// ---- target formats: VALUES finite f32 below the limit to bytes -------------------------------

struct ToF32 {
    static constexpr int64_t VALUES = BLOCK, BLOCK_BYTES = 128;
    static inline void pack(const float* x, uint8_t* p) { __builtin_memcpy(p, x, BLOCK * 4); }
};

struct ToF16 {
    static constexpr int64_t VALUES = BLOCK, BLOCK_BYTES = 64;
    static inline void pack(const float* x, uint8_t* p) { floats_to_f16(x, p); }
};

struct ToBF16 {
    static constexpr int64_t VALUES = BLOCK, BLOCK_BYTES = 64;
    static inline void pack(const float* x, uint8_t* p) {
        uint16_t half[BLOCK];
        for (int i = 0; i < BLOCK; ++i) {
            uint32_t bits = bits_of(x[i]);
            half[i] = static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
        }
        __builtin_memcpy(p, half, sizeof half);
    }
};

inline int32_t block_largest(const float* x) {  // as a signed number, which SSE2 compares faster
    int32_t largest = 0;
    for (int i = 0; i < BLOCK; ++i) {
        int32_t m = static_cast<int32_t>(magnitude(x[i]));
        largest = m > largest ? m : largest;
    }
    return largest;
}

// 1 / scale, or 0 if that is infinite: gguf then writes zeros too, by casting infinity and NaN.
inline float inverse_of(float scale) { return magnitude(scale) < 0x00200001 ? 0.0f : 1.0f / scale; }

inline void write_scale(float scale, uint8_t* p) {
    float x[BLOCK] = {scale};
    uint8_t half[BLOCK * 2];
    floats_to_f16(x, half);
    __builtin_memcpy(p, half, 2);
}

struct ToQ8_0 {
    static constexpr int64_t VALUES = BLOCK, BLOCK_BYTES = 34;
    static inline void pack(const float* x, uint8_t* p) {
        const float scale = float_of(block_largest(x)) / 127.0f, inverse = inverse_of(scale);
        int8_t q[BLOCK];
        for (int i = 0; i < BLOCK; ++i) {
            float scaled = x[i] * inverse;
            // Just below one half, with the sign of x: with 0.5, 0.49999997 would become 1.
            float half = float_of(0x3EFFFFFF | (bits_of(scaled) & 0x80000000));
            q[i] = static_cast<int8_t>(static_cast<int32_t>(scaled + half));
        }
        write_scale(scale, p);
        __builtin_memcpy(p + 2, q, sizeof q);
    }
};

struct ToQ4_0 {
    static constexpr int64_t VALUES = BLOCK, BLOCK_BYTES = 18;
    static inline void pack(const float* x, uint8_t* p) {
        const int32_t largest = block_largest(x);
        int32_t first = BLOCK;  // the first of those with the largest magnitude gives the sign
        for (int i = 0; i < BLOCK; ++i) {
            int32_t here = static_cast<int32_t>(magnitude(x[i])) == largest ? i : BLOCK;
            first = here < first ? here : first;
        }
        const float scale = x[first] / -8.0f, inverse = inverse_of(scale);
        const float offset = is_flushed(scale) ? 0.0f : 8.5f;
        int32_t q[BLOCK];
        for (int i = 0; i < BLOCK; ++i) {
            int32_t cut = static_cast<int32_t>(x[i] * inverse + offset);
            q[i] = cut < 15 ? cut : 15;
        }
        uint8_t nibbles[BLOCK / 2];
        for (int i = 0; i < BLOCK / 2; ++i)
            nibbles[i] = static_cast<uint8_t>(q[i] | (q[i + BLOCK / 2] << 4));
        write_scale(scale, p);
        __builtin_memcpy(p + 2, nibbles, sizeof nibbles);
    }
    // A scale whose inverse is infinite: gguf writes nibbles of 0 there, and 8 for a scale of 0.
    static inline bool is_flushed(float scale) {
        return magnitude(scale) != 0 && magnitude(scale) < 0x00200001;
    }
};

#include "k_quants.h"

// ---- rows -------------------------------------------------------------------------------------

// The largest magnitudes seen, one per place in a block: no reduction across lanes until the end.
struct Largest {
    int32_t lane[BLOCK] = {};
    inline void see(const float* x) {
        for (int i = 0; i < BLOCK; ++i) {
            int32_t m = static_cast<int32_t>(magnitude(x[i]));
            lane[i] = m > lane[i] ? m : lane[i];
        }
    }
    inline uint32_t all() const {
        int32_t largest = 0;
        for (int i = 0; i < BLOCK; ++i) largest = lane[i] > largest ? lane[i] : largest;
        return static_cast<uint32_t>(largest);
    }
};

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Loads `count` values into x, which has room for whole blocks; pads the last one with zeros.
template <class Source>
inline void unpack_values(const uint8_t* source, int64_t count, float* x, Largest& largest) {
    int64_t i = 0;
    for (; i + BLOCK <= count; i += BLOCK) {
        Source::unpack(source + i * Source::BYTES, x + i);
        largest.see(x + i);
    }
    if (i == count) return;
    uint8_t rest[BLOCK * Source::BYTES] = {};
    __builtin_memcpy(rest, source + i * Source::BYTES, (count - i) * Source::BYTES);
    Source::unpack(rest, x + i);
    largest.see(x + i);
}

template <class Target>
inline void pack_values(const float* x, int64_t count, uint8_t* target) {
    int64_t i = 0;
    for (; i + Target::VALUES <= count; i += Target::VALUES, target += Target::BLOCK_BYTES)
        Target::pack(x + i, target);
    if (i == count) return;  // always so for block kinds
    uint8_t rest[Target::BLOCK_BYTES];
    Target::pack(x + i, rest);
    __builtin_memcpy(target, rest, (count - i) * Target::BLOCK_BYTES / Target::VALUES);
}

constexpr int64_t CHUNK = 1024;  // values in flight at a time: 4 KiB stay in L1

template <class Source, class Target>
uint32_t encode_rows(const Job& job) {
    const int64_t row_bytes = job.num_columns * Target::BLOCK_BYTES / Target::VALUES;
    float x[CHUNK];
    uint32_t largest = 0;
    for (int64_t n = 0; n < job.num_rows; ++n) {
        const int64_t row = job.index ? job.index[n] : n;
        const uint8_t* source = job.source + row * job.row_stride * Source::BYTES;
        for (int64_t m = 0; m < job.num_columns; m += CHUNK) {
            const int64_t count = smaller(CHUNK, job.num_columns - m);
            Largest seen;
            unpack_values<Source>(source + m * Source::BYTES, count, x, seen);
            const uint32_t here = seen.all();
            largest = here > largest ? here : largest;
            if (here < job.limit)
                pack_values<Target>(
                    x, count, job.target + n * row_bytes + m * Target::BLOCK_BYTES / Target::VALUES);
        }
    }
    return largest;
}

// Rows and columns transposed at a time, in two buffers of 16 KiB each (64 KiB for K-quants).
constexpr int64_t TILE = 64;
// Values of a row packed at once: the width of a tile or, for K-quants, of the four in a block.
template <class Target>
constexpr int64_t WIDTH = Target::VALUES > TILE ? Target::VALUES : TILE;

// Encodes columns of the source as rows; reads it along its rows, TILE values from each of WIDTH
// rows.
template <class Source, class Target>
uint32_t encode_columns(const Job& job) {
    const int64_t row_bytes = job.num_columns * Target::BLOCK_BYTES / Target::VALUES;
    constexpr int64_t TILES = WIDTH<Target> / TILE;
    float line[WIDTH<Target>][TILE], turned[TILES][TILE][TILE], row[WIDTH<Target>];
    uint32_t largest = 0;
    for (int64_t n = 0; n < job.num_rows; n += TILE) {
        const int64_t rows = smaller(TILE, job.num_rows - n);
        for (int64_t m = 0; m < job.num_columns; m += WIDTH<Target>) {
            const int64_t columns = smaller(WIDTH<Target>, job.num_columns - m);
            Largest seen;
            for (int64_t c = 0; c < columns; ++c) {
                const int64_t start = (m + c) * job.column_stride + n;
                unpack_values<Source>(job.source + start * Source::BYTES, rows, line[c], seen);
            }
            const uint32_t here = seen.all();
            largest = here > largest ? here : largest;
            if (here >= job.limit) continue;
            for (int64_t t = 0; t < TILES; ++t) turn(line[t * TILE], turned[t][0], TILE);
            uint8_t* target = job.target + n * row_bytes + m * Target::BLOCK_BYTES / Target::VALUES;
            for (int64_t r = 0; r < rows; ++r) {
                for (int64_t t = 0; TILES > 1 && t < TILES; ++t)
                    __builtin_memcpy(row + t * TILE, turned[t][r], TILE * sizeof(float));
                pack_values<Target>(TILES > 1 ? row : turned[0][r], columns, target + r * row_bytes);
            }
        }
    }
    return largest;
}

template <class Source, class Target>
uint32_t encode(const Job& job) {
    return job.column_stride == 1 ? encode_rows<Source, Target>(job)
                                  : encode_columns<Source, Target>(job);
}

#define ENCODERS_OF(Source)                                                                         \
    {encode<Source, ToF32>,  encode<Source, ToF16>, encode<Source, ToBF16>, encode<Source, ToQ8_0>, \
     encode<Source, ToQ4_0>, encode<Source, ToQ4K>, encode<Source, ToQ5K>,  encode<Source, ToQ6K>}
#define ENCODERS {ENCODERS_OF(F32), ENCODERS_OF(F16), ENCODERS_OF(BF16)}
