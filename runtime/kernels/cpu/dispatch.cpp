// The C functions of kernels.h. Selects the best kernels that this processor can run and divides the
// work among threads.
//
// The kernel files are compiled with flags such as -mavx512f, so they include no C++ library
// headers but <cstdint>: an inline function from one would be compiled with those flags too, and
// the linker may keep that copy for the whole library, which would then crash on an older
// processor.
#include "dispatch.h"

#include <cstdlib>
#include <cstring>

#include "probe.h"

#ifdef __x86_64__
#include <cpuid.h>
#include <emmintrin.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace {

struct Level {
    const char* name;
    Kernels kernels;
    bool advertised;
    bool has_vnni = false;  // AVX-512 VNNI
    int8_t answer = -1;     // the probe's result; -1: not probed yet

    bool usable() {
        if (!advertised) return false;
        if (answer < 0) answer = runs_here(kernels, kernels_generic);
        return answer;
    }
};

#ifdef __x86_64__
bool has_avx2() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
}

// Whether the processor reports a bit of EAX of leaf 7, subleaf 1.
bool reports(uint32_t bit) {
    uint32_t a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || a < 1) return false;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & bit);
}

bool has_avxvnni() { return has_avx2() && reports(1u << 4); }

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

bool has_avx512vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

bool has_grids() {
    uint32_t a, b, c, d;
    constexpr uint32_t VBMI = 1u << 1, GFNI = 1u << 8;
    return has_avx512vnni() && __get_cpuid_count(7, 0, &a, &b, &c, &d) &&
           (c & (VBMI | GFNI)) == (VBMI | GFNI);
}

bool has_avx512bf16() { return has_avx512vnni() && reports(1u << 5); }

// Linux lets a process, its threads and its forked children use AMX tiles after a request
// (Documentation/arch/x86/xstate.rst). It refuses if a signal stack is too small for the state.
bool has_amx() {
#ifdef __linux__
    constexpr uint32_t TILE_AND_INT8 = 3u << 24, TILE_STATE = 3u << 17;
    constexpr long ASK_FOR_STATE = 0x1023, TILE_DATA = 18;
    uint32_t a, b, c, d, state, upper;
    if (!has_avx512bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    if ((d & TILE_AND_INT8) != TILE_AND_INT8) return false;
    asm volatile("xgetbv" : "=a"(state), "=d"(upper) : "c"(0));
    return (state & TILE_STATE) == TILE_STATE && syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA) == 0;
#else
    return false;
#endif
}
#endif

#ifdef __x86_64__
// The processor's family, or 0 if it is not AMD's.
uint32_t amd_family() {
    uint32_t a, b, c, d;
    constexpr uint32_t AUTH = 0x68747541;  // "Auth" of AuthenticAMD
    if (!__get_cpuid(0, &a, &b, &c, &d) || b != AUTH || !__get_cpuid(1, &a, &b, &c, &d)) return 0;
    return (a >> 8 & 15) + (a >> 20 & 255);
}
#endif

// The value of stream_ahead for this processor. GB/s of one Zen 5 core (family 26) from memory,
// rows of 576 and of 2048 values in tiles, one vector, without and with prefetching: q8_0 28 and
// 36, 29 and 37; q4_0 27 and 31, 30 and 37. Half the distance gains half as much. Zen 4 cores
// (family 25) are slower with it. UNKNOWN for others, which prefetch_distance.py measures.
constexpr int64_t UNKNOWN = -1;
int64_t ahead_here() {
#ifdef __x86_64__
    if (amd_family() >= 26) return 9216;
    return amd_family() == 25 ? 0 : UNKNOWN;
#else
    return 0;
#endif
}

// Best first.
Level levels[] = {
#ifdef __x86_64__
    {"amx", kernels_amx, has_amx(), true},
    {"avx512bf16", kernels_avx512bf16, has_avx512bf16(), true},
    {"avx512vnni", kernels_avx512vnni, has_avx512vnni(), true},
    {"avx512", kernels_avx512, has_avx512()},
    {"avxvnni", kernels_avxvnni, has_avxvnni()},
    {"avx2", kernels_avx2, has_avx2()},
#endif
    {"generic", kernels_generic, true, false, 1},
};

Level* best() {
    Level* level = levels;
    while (!level->usable()) ++level;
    return level;
}

Level* current = best();

const int64_t known_ahead = ahead_here();
[[maybe_unused]] const int64_t ahead_once = stream_ahead = known_ahead == UNKNOWN ? 0 : known_ahead;

#ifdef __x86_64__
// A Zen 4 core waits for fewer lines in L1 than in L2: a tenth of the neurons of 1.1 B parameters takes
// 0.86 (two threads) and 0.75 (one) of the time in q8_0, between 0.80 and 0.96 in other types. On a Zen 5,
// L1 is as fast or faster.
[[maybe_unused]] const bool queue_once = queue_to_l2 = amd_family() == 25;
#endif

// Adds the kernels of types with grids to the levels that may have them, unless they fail here. Once.
bool add_grids_once() {
#ifdef __x86_64__
    static const bool are_usable = [] {
        if (!has_grids()) return false;
        Kernels own = kernels_avx512vnni;
        add_grids(own);
        if (!grids_run_here(own)) return false;
        for (Level& level : levels)
            if (level.has_vnni) add_grids(level.kernels);
        return true;
    }();
    return are_usable;
#else
    return false;
#endif
}

Level* find(const char* name) {
    for (Level& level : levels)
        if (std::strcmp(level.name, name) == 0) return &level;
    return nullptr;
}

#include "k_tiles.h"

constexpr int32_t MAX_THREADS = 1024;

Status check(int32_t kind, int64_t row_bytes, int64_t stride, int64_t num_rows, const int32_t* index,
             int64_t A) {
    if (row_bytes < 0 || stride < row_bytes || num_rows < 0 || A < 0) return STATUS_BAD_ARGUMENT;
    const int64_t together = rows_together(kind);
    if (together > 1 && (stride != row_bytes || num_rows % together)) return STATUS_BAD_ARGUMENT;
    if (!index) return A == 0 || A == num_rows ? STATUS_OK : STATUS_BAD_ARGUMENT;
    bool all_inside = true;  // a negative index is a large unsigned one
    const uint64_t end = static_cast<uint64_t>(num_rows);
    for (int64_t a = 0; a < A; ++a)
        all_inside &= static_cast<uint64_t>(static_cast<int64_t>(index[a])) < end;
    return all_inside ? STATUS_OK : STATUS_INDEX_OUT_OF_RANGE;
}

// Vectors [T, D] in the form that a kind's kernels need, in a thread-local buffer that only grows.
class Prepared {
  public:
    Prepared(int32_t kind, const float* x, int64_t D, int64_t T) : input{x, nullptr, D, T, 0, T} {
        Quantise* quantise = current->kernels.quantise[kind];
        if (!quantise) return;
        input.packed = room(T * packed_room(D));
        is_ready = input.packed != nullptr;
        if (is_ready)
            split(T > 1 ? 16 * T * D : 0, T, 16, 4,
                  [&](int64_t t0, int64_t t1) { quantise(input.part(t0, t1), D); });
    }

    Input input;
    bool is_ready = true;

  private:
    static uint8_t* room(int64_t bytes) {
        struct Buffer {
            uint8_t* data = nullptr;
            int64_t bytes = 0;
            ~Buffer() { std::free(data); }
        };
        static thread_local Buffer buffer;
        if (buffer.bytes < bytes) {
            std::free(buffer.data);
            buffer.bytes = (bytes + 63) / 64 * 64;
            buffer.data = static_cast<uint8_t*>(std::aligned_alloc(64, buffer.bytes));
            if (!buffer.data) buffer.bytes = 0;
        }
        return buffer.data;
    }
};

// Each of these packs one row of n blocks, stored as in a file; r is its place in a tile or group.
void pack_planar(const uint8_t* row, int64_t n, int64_t quant_bytes, uint8_t* out) {
    for (int64_t b = 0; b < n; ++b, row += 2 + quant_bytes) {
        std::memcpy(out + 2 * b, row, 2);
        std::memcpy(out + 2 * n + quant_bytes * b, row + 2, quant_bytes);
    }
}

// A row of D values.
void pack_tiled(int32_t kind, const uint8_t* row, int64_t D, int64_t r, uint8_t* out) {
    const int64_t head = KINDS[kind].head_bytes, quant_bytes = KINDS[kind].block_bytes - head;
    const int64_t size = row_head(kind) ? 1 : number_bytes(head), most = blocks_together(head);
    const int64_t n = D / block_values(kind);
    if (row_head(kind)) {
        std::memcpy(out + FACTOR_BYTES * r, row, FACTOR_BYTES);
        row += FACTOR_BYTES, out += FACTOR_BYTES * TILE_ROWS;
    }
    for (int64_t b = 0; b < n; ++b, row += head + quant_bytes) {
        const int64_t first = b / most * most, together = std::min(most, n - first);
        uint8_t* at = out + TILE_ROWS * first * (head + quant_bytes);
        for (int64_t i = 0; i < head; i += size)
            std::memcpy(at + TILE_ROWS * ((b - first) * head + i) + size * r, row + i, size);
        at += TILE_ROWS * (head * together + (b - first) * quant_bytes) + 4 * r;
        for (int64_t i = 0; i < quant_bytes; i += 4) std::memcpy(at + TILE_ROWS * i, row + head + i, 4);
    }
}

void pack_super(int32_t kind, const uint8_t* row, int64_t n, int64_t r, uint8_t* out) {
    const SuperShape shape = super_shape(kind);
    for (int64_t s = 0; s < n; ++s, row += shape.block_bytes)
        for_pieces(shape, n, s, r, [&](int64_t at, int64_t place, int64_t count) {
            std::memcpy(out + place, row + at, count);
        });
}

void pack_grouped(const uint8_t* row, int64_t n, int64_t quant_bytes, int64_t r, uint8_t* out) {
    constexpr int64_t PLACES = GROUP_ROWS / 4;
    for (int64_t b = 0; b < n; ++b, row += 2 + quant_bytes, out += GROUP_ROWS * (2 + quant_bytes)) {
        std::memcpy(out + 2 * r, row, 2);
        uint8_t* quants = out + 2 * GROUP_ROWS + r % PLACES * 4 * quant_bytes + r / PLACES;
        for (int64_t i = 0; i < quant_bytes; ++i) quants[4 * i] = row[2 + i];
    }
}

}  // namespace

const Kernels& kernels() { return current->kernels; }

int64_t packed_room(int64_t D) {
    static const Level* const amx = find("amx");
    return packed_bytes(D, amx && amx->advertised);
}

EXPORT int32_t hs_dot_rows(int32_t kind, const uint8_t* weight, int64_t stride, int64_t num_rows,
                           int64_t D, const float* x, int64_t T, const int32_t* index, int64_t A,
                           float* y) {
    const int64_t row_bytes = row_bytes_of(kind, D);
    if (Status status = check(kind, row_bytes, stride, num_rows, index, A)) return status;
    if (T < 1) return STATUS_BAD_ARGUMENT;
    DotRows* dot_rows = current->kernels.dot_rows[kind];
    if (!dot_rows) return STATUS_BAD_ARGUMENT;
    const Prepared prepared(kind, x, D, T);
    if (!prepared.is_ready) return STATUS_NO_MEMORY;
    const Input& input = prepared.input;
    const Rows rows = {weight, stride, D, index, A};
    split(A * row_bytes * T, A, T == 1 ? TILE_ROWS : 64, 16,
          [=, &rows, &input](int64_t a0, int64_t a1) { dot_rows(rows, input, y, A, a0, a1); });
    return STATUS_OK;
}

EXPORT int32_t hs_accumulate_rows(int32_t kind, const uint8_t* weight, int64_t stride, int64_t num_rows,
                                  int64_t D, const float* c, const int32_t* index, int64_t A,
                                  float* y) {
    const int64_t row_bytes = row_bytes_of(kind, D);
    if (Status status = check(kind, row_bytes, stride, num_rows, index, A)) return status;
    AccumulateRows* accumulate_rows = current->kernels.accumulate_rows[kind];
    if (!accumulate_rows || (index && is_grouped(kind))) return STATUS_BAD_ARGUMENT;
    OrderSums* order_sums = current->kernels.order_sums[kind];
    const Rows rows = {weight, stride, D, index, A};
    // One piece per thread and no narrow ones: memory is read faster in longer parts of a row.
    const int64_t grain = block_values(kind) > 4 * BLOCK ? block_values(kind) : 4 * BLOCK;
    split(A * row_bytes, D, grain, 1, [=, &rows](int64_t d0, int64_t d1) {
        std::memset(y + d0, 0, (d1 - d0) * sizeof(float));
        accumulate_rows(rows, c, y, 0, A, d0, d1);
        if (order_sums) order_sums(y, d0, d1);
    });
    return STATUS_OK;
}

EXPORT int32_t hs_pack_rows(int32_t kind, int32_t to_kind, const uint8_t* from, int64_t num_rows,
                            int64_t D, const int32_t* index, int64_t A, uint8_t* to, int64_t stride) {
    const int64_t row_bytes = row_bytes_of(kind, D), n = D / BLOCK;
    if (Status status = check(kind, row_bytes, stride, num_rows, index, A)) return status;
    const bool is_same = to_kind == kind;
    const int64_t together = rows_together(to_kind);
    if (is_tiled(kind) || is_grouped(kind)) return STATUS_BAD_ARGUMENT;
    const bool is_form = row_bytes_of(to_kind, D) == row_bytes && kind_in_file(to_kind) == kind;
    if (!is_same && !is_form) return STATUS_BAD_ARGUMENT;
    if (together > 1 && (stride != row_bytes || A % together)) return STATUS_BAD_ARGUMENT;
    const int64_t block_bytes = KINDS[to_kind].block_bytes, head = KINDS[to_kind].head_bytes,
                  quant_bytes = block_bytes - head;
    split(2 * A * row_bytes, A, GROUP_ROWS, 8, [=](int64_t a0, int64_t a1) {
        for (int64_t a = a0; a < a1; ++a) {
            const uint8_t* row = from + (index ? static_cast<int64_t>(index[a]) : a) * row_bytes;
            const int64_t r = a % together;
            uint8_t* out = to + (a - r) * stride;
            if (is_same)
                std::memcpy(out, row, row_bytes);
            else if (block_values(to_kind) == SUPER_BLOCK)
                pack_super(to_kind, row, D / SUPER_BLOCK, r, out);
            else if (is_tiled(to_kind))
                pack_tiled(to_kind, row, D, r, out);
            else if (!form_of(to_kind))
                for (int64_t b = 0; b < n; ++b)
                    std::memcpy(out + (b * GROUP_ROWS + r) * block_bytes, row + b * block_bytes,
                                block_bytes);
            else if (is_grouped(to_kind))
                pack_grouped(row, n, quant_bytes, r, out);
            else
                pack_planar(row, n, quant_bytes, out);
        }
    });
    return STATUS_OK;
}

EXPORT int32_t hs_unpack_rows(int32_t kind, const uint8_t* weight, int64_t stride, int64_t num_rows,
                              int64_t D, const int32_t* index, int64_t A, float* out) {
    const int64_t row_bytes = row_bytes_of(kind, D);
    if (Status status = check(kind, row_bytes, stride, num_rows, index, A)) return status;
    UnpackRows* unpack_rows = current->kernels.unpack_rows[kind];
    if (!unpack_rows) return STATUS_BAD_ARGUMENT;
    const Rows rows = {weight, stride, D, index, A};
    split(A * row_bytes, A, 4, 4,
          [=, &rows](int64_t a0, int64_t a1) { unpack_rows(rows, out, a0, a1); });
    return STATUS_OK;
}

EXPORT int32_t hs_reads_grids() { return current->has_vnni && add_grids_once(); }

EXPORT int32_t hs_set_grid(int32_t kind, const uint8_t* codes, int64_t num_entries) {
#ifdef __x86_64__
    if (hs_reads_grids()) return set_grid_of(kind, codes, num_entries);
#endif
    return STATUS_BAD_ARGUMENT;
}

EXPORT const char* hs_level() { return current->name; }

EXPORT const char* hs_faulty_level() {
    for (const Level& level : levels)
        if (level.advertised && level.answer == 0) return level.name;
    return nullptr;
}

EXPORT int32_t hs_level_status(const char* name) {
    Level* level = find(name);
    if (!level) return STATUS_UNKNOWN_LEVEL;
    return level->usable() ? STATUS_OK : STATUS_UNUSABLE_LEVEL;
}

EXPORT int32_t hs_set_level(const char* name) {
    const int32_t status = hs_level_status(name);
    if (status == STATUS_OK) current = find(name);
    return status;
}

EXPORT int32_t hs_knows_prefetch_distance() { return known_ahead != UNKNOWN; }

EXPORT int64_t hs_prefetch_distance() { return stream_ahead; }

EXPORT void hs_set_prefetch_distance(int64_t bytes) { stream_ahead = bytes; }

EXPORT void hs_evict(const uint8_t* begin, int64_t num_bytes) {
#ifdef __x86_64__
    for (int64_t at = 0; at < num_bytes; at += 64) _mm_clflush(begin + at);
    _mm_mfence();
#endif
}

EXPORT int32_t hs_num_threads() { return num_threads(); }

EXPORT void hs_set_spin_time(int32_t microseconds) { set_spin_time(microseconds); }

EXPORT void hs_set_default_threads(int32_t n, int32_t processors) {
    set_default_threads(std::clamp(n, 1, MAX_THREADS), processors);
}

EXPORT int32_t hs_set_threads(int32_t n, int32_t processors) {
    if (n < 1 || n > MAX_THREADS) return STATUS_BAD_ARGUMENT;
    return set_threads(n, processors) ? STATUS_OK : STATUS_NO_THREADS;
}
