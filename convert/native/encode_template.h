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

// A target packs VALUES values into BYTES bytes at a time; rows are whole blocks of BLOCK_VALUES. Its
// `Weighted` searches scales by importances; it is the target itself if there is no search.

template <int32_t NUMBER, int64_t SIZE>
struct Floats {
    static constexpr int32_t KIND = NUMBER;
    static constexpr int64_t BLOCK_VALUES = 1, VALUES = BLOCK, BYTES = BLOCK * SIZE;
};

struct ToF32 : Floats<KIND_F32, 4> {
    using Weighted = ToF32;
    static inline void pack(const float* x, uint8_t* p) { __builtin_memcpy(p, x, BLOCK * 4); }
};

struct ToF16 : Floats<KIND_F16, 2> {
    using Weighted = ToF16;
    static inline void pack(const float* x, uint8_t* p) { floats_to_f16(x, p); }
};

struct ToBF16 : Floats<KIND_BF16, 2> {
    using Weighted = ToBF16;
    static inline void pack(const float* x, uint8_t* p) {
        uint16_t half[BLOCK];
        for (int i = 0; i < BLOCK; ++i) {
            uint32_t bits = bits_of(x[i]);
            half[i] = static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
        }
        __builtin_memcpy(p, half, sizeof half);
    }
};

inline void write_scale(float scale, uint8_t* p) {
    float x[BLOCK] = {scale};
    uint8_t half[BLOCK * 2];
    floats_to_f16(x, half);
    __builtin_memcpy(p, half, 2);
}

#include "fits.h"
#include "k_quants.h"
#include "small_blocks.h"
// Uses both.
#include "nonlinear.h"

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

// Packs `count` values of x, which has room for a multiple of VALUES.
template <class Target, class Pack>
inline void pack_values(int64_t count, uint8_t* target, const Pack& pack) {
    int64_t i = 0;
    for (; i + Target::VALUES <= count; i += Target::VALUES, target += Target::BYTES) pack(i, target);
    if (i == count) return;
    uint8_t rest[Target::BYTES];
    pack(i, rest);
    __builtin_memcpy(target, rest, (count - i) * Target::BYTES / Target::VALUES);
}

constexpr int64_t CHUNK = 1024;  // values in flight at a time: 4 KiB stay in L1

// The mean square of a row, summed in the order of its values.
template <class Source>
inline float mean_square_of(const uint8_t* source, int64_t num_columns) {
    float sum = 0, x[BLOCK];
    for (int64_t m = 0; m < num_columns; m += BLOCK) {
        Source::unpack(source + m * Source::BYTES, x);
        for (int i = 0; i < BLOCK; ++i) sum += x[i] * x[i];
    }
    return sum / static_cast<float>(num_columns);
}

// IS_WEIGHTED: by importances.
template <class Source, class Target, bool IS_WEIGHTED>
uint32_t encode_rows(const Job& job) {
    const int64_t row_bytes = job.num_columns * Target::BYTES / Target::VALUES;
    float x[CHUNK] = {}, importance[IS_WEIGHTED ? CHUNK : 1] = {}, mean_square = 0;
    uint32_t largest = 0;
    for (int64_t n = 0; n < job.num_rows; ++n) {
        const int64_t row = job.index ? job.index[n] : n;
        const uint8_t* source = job.source + row * job.row_stride * Source::BYTES;
        if constexpr (IS_WEIGHTED)
            if (Target::READS_ROW) mean_square = mean_square_of<Source>(source, job.num_columns);
        for (int64_t m = 0; m < job.num_columns; m += CHUNK) {
            const int64_t count = smaller(CHUNK, job.num_columns - m);
            Largest seen;
            unpack_values<Source>(source + m * Source::BYTES, count, x, seen);
            const uint32_t here = seen.all();
            largest = here > largest ? here : largest;
            if (here >= job.limit) continue;
            uint8_t* target = job.target + n * row_bytes + m * Target::BYTES / Target::VALUES;
            if constexpr (IS_WEIGHTED) {
                __builtin_memcpy(importance, job.importance + m, count * sizeof(float));
                pack_values<Target>(count, target, [&](int64_t i, uint8_t* p) {
                    Target::pack(x + i, importance + i, mean_square, p);
                });
            } else {
                pack_values<Target>(count, target,
                                    [&](int64_t i, uint8_t* p) { Target::pack(x + i, p); });
            }
        }
    }
    return largest;
}

// Rows and columns transposed at a time, in two buffers of 16 KiB each (64 KiB where 256 values are
// packed at once).
constexpr int64_t TILE = 64;
// Values of a row packed at once: the width of a tile or of four.
template <class Target>
constexpr int64_t WIDTH = Target::VALUES > TILE ? Target::VALUES : TILE;

// Encodes columns of the source as rows; reads it along its rows, TILE values from each of WIDTH
// rows.
template <class Source, class Target>
uint32_t encode_columns(const Job& job) {
    const int64_t row_bytes = job.num_columns * Target::BYTES / Target::VALUES;
    constexpr int64_t TILES = WIDTH<Target> / TILE;
    float line[WIDTH<Target>][TILE] = {}, turned[TILES][TILE][TILE], row[WIDTH<Target>];
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
            uint8_t* target = job.target + n * row_bytes + m * Target::BYTES / Target::VALUES;
            for (int64_t r = 0; r < rows; ++r) {
                for (int64_t t = 0; TILES > 1 && t < TILES; ++t)
                    __builtin_memcpy(row + t * TILE, turned[t][r], TILE * sizeof(float));
                const float* x = TILES > 1 ? row : turned[0][r];
                pack_values<Target>(columns, target + r * row_bytes,
                                    [&](int64_t i, uint8_t* p) { Target::pack(x + i, p); });
            }
        }
    }
    return largest;
}

template <class A, class B>
constexpr bool IS_SAME = false;
template <class A>
constexpr bool IS_SAME<A, A> = true;

template <class Source, class Target>
uint32_t encode(const Job& job) {
    using Weighted = typename Target::Weighted;
    if constexpr (!IS_SAME<Target, Weighted>)
        if (job.importance) return encode_rows<Source, Weighted, true>(job);
    return job.column_stride == 1 ? encode_rows<Source, Target, false>(job)
                                  : encode_columns<Source, Target>(job);
}

template <class Source, class... Targets>
constexpr void put_encoders(Encoder* of_kind) {
    ((of_kind[Targets::KIND] = {encode<Source, Targets>, Targets::BLOCK_VALUES}), ...);
}

template <class... Targets>
constexpr Encoders encoders_to() {
    Encoders all = {};
    put_encoders<F32, Targets...>(all.of[0]);
    put_encoders<F16, Targets...>(all.of[1]);
    put_encoders<BF16, Targets...>(all.of[2]);
    return all;
}

constexpr Encoders ENCODERS =
    encoders_to<ToF32, ToF16, ToBF16, ToQ8_0, ToQ4_0, ToQ4_1, ToQ5_0, ToQ5_1, ToQ2K, ToQ3K, ToQ4K,
                ToQ5K, ToQ6K, ToIQ4_NL, ToIQ4_XS, ToMXFP4>();
