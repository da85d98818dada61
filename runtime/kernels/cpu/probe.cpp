#include "probe.h"

#include <cerrno>
#include <csignal>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

namespace {

constexpr int64_t D = 512, ROWS = 5;
alignas(64) uint8_t weight[ROWS * D * 4];
alignas(64) float x[D], c[ROWS], y[2][D];
alignas(64) uint8_t packed[2][packed_bytes(D)];
alignas(64) uint8_t unpacked[2][ROWS * D * 4];

bool are_close(const float* got, const float* want, int64_t n) {
    for (int64_t i = 0; i < n; ++i)
        if (!(std::fabs(got[i] - want[i]) <= 1e-3f * std::fabs(want[i]) + 1e-2f)) return false;
    return true;
}

// Exact in every kind but the K-quants, so to the bit; weight holds no NaN.
bool unpack_alike(const Kernels& tried, const Kernels& reference, int32_t kind,
                  int64_t row_bytes) {
    for (bool is_bf16 : {false, true}) {
        for (int which = 0; which < 2; ++which) {
            const Kernels& kernels = which ? reference : tried;
            UnpackRows* unpack_rows =
                (is_bf16 ? kernels.unpack_rows_bf16 : kernels.unpack_rows)[kind];
            unpack_rows({weight, row_bytes, D, nullptr, ROWS}, unpacked[which], 0, ROWS);
        }
        if (block_values(kind) == SUPER_BLOCK) {
            static float values[2][ROWS * D];
            for (int which = 0; which < 2; ++which)
                for (int64_t i = 0; i < ROWS * D; ++i) {
                    uint32_t bits = 0;  // a bf16 is the upper half of a float
                    uint8_t* upper = reinterpret_cast<uint8_t*>(&bits) + (is_bf16 ? 2 : 0);
                    const int size = is_bf16 ? 2 : 4;
                    std::memcpy(upper, unpacked[which] + i * size, size);
                    std::memcpy(&values[which][i], &bits, 4);
                }
            for (int64_t i = 0; i < ROWS * D; ++i) {
                const float bound = (is_bf16 ? 1e-2f : 1e-5f) * std::fabs(values[1][i]) + 1e-2f;
                if (!(std::fabs(values[0][i] - values[1][i]) <= bound)) return false;
            }
            continue;
        }
        for (int64_t i = 0; i < ROWS * D * (is_bf16 ? 2 : 4); ++i)
            if (unpacked[0][i] != unpacked[1][i]) return false;
    }
    return true;
}

// Two queries over the rows as keys and as values; what comes of it into y.
bool attend_alike(const Kernels& tried, const Kernels& reference) {
    const Kernels* both[] = {&tried, &reference};
    constexpr int64_t W = 80, G = 2, PADDED = 96;
    alignas(64) float query[G * PADDED] = {};
    for (int64_t g = 0; g < G; ++g)
        for (int64_t i = 0; i < W; ++i) query[g * PADDED + i] = x[i] * 0.1f;
    for (int32_t kind : {KIND_F32, KIND_F16}) {
        for (int which = 0; which < 2; ++which) {
            alignas(64) float score[G * 16];
            float top[G], total[G];
            both[which]->attend[kind]({weight, weight, 2 * D, ROWS, W, G, query, 0.1f, score, top,
                                       total, y[which]});
            for (int64_t g = 0; g < G; ++g) y[which][G * PADDED + g] = top[g] + total[g];
        }
        if (!are_close(y[0], y[1], G * PADDED + G)) return false;
    }
    return true;
}

// Every second row unpacked to a panel, which is all floats of a kind and so compared as such.
bool panels_alike(const Kernels& tried, const Kernels& reference, int32_t kind, int64_t row_bytes) {
    constexpr int64_t COLUMNS = 128, CHOSEN = (ROWS + 1) / 2;
    const uint8_t chosen[CHOSEN] = {0, 2, 4};
    const Kernels* both[] = {&tried, &reference};
    float* panel[] = {reinterpret_cast<float*>(unpacked[0]), reinterpret_cast<float*>(unpacked[1])};
    for (int which = 0; which < 2; ++which) {
        std::memset(unpacked[which], 0, sizeof unpacked[which]);
        both[which]->unpack_panel[kind]({weight, row_bytes, D, nullptr, ROWS}, chosen, CHOSEN, 0, D,
                                        {panel[which], ROWS, COLUMNS});
    }
    return are_close(panel[0], panel[1], ROWS * D);
}

// Pairs that share their row and pairs that do not; sums by tokens; masks.
bool pairs_alike(const Kernels& tried, const Kernels& reference) {
    const Kernels* both[] = {&tried, &reference};
    constexpr int64_t C = PASS_CHUNK;
    const uint16_t row[] = {0, 0, 0, 0, C, C, C, C, 0, C, 0, C};
    const uint16_t token[] = {0, C, 0, C, 0, C, C, 0, C, 0, 0, C};
    const uint8_t index[] = {1, 0, 1}, named[] = {1, 0, 1};
    const int32_t first[] = {0, 2, 3};
    const float gate[] = {0.5f, -1.0f, __builtin_nanf("")};
    alignas(64) float panel[4 * C], sum[2][12] = {};
    uint32_t mask[2][3] = {};
    int32_t chosen[2][D];
    int64_t num_chosen[2];
    for (int64_t i = 0; i < 4 * C; ++i) panel[i] = x[i % D] + (i % 3);
    for (int which = 0; which < 2; ++which) {
        const Kernels& k = *both[which];
        k.dot_pairs({row, token, 4, 2, 4}, panel, x, C, sum[which]);
        std::memset(y[which], 0, sizeof y[which]);
        for (int64_t d = 0; d < C; d += k.add_columns) {
            float part[4 * C];  // rows of a panel have add_columns columns
            for (int64_t r = 0; r < 2; ++r)
                for (int64_t i = 0; i < k.add_columns; ++i)
                    part[r * k.add_columns + i] = panel[r * C + d + i];
            k.add_pairs(part, index, c, first, 1, 2, y[which] + d);
        }
        k.mark_gates(gate, 3, 0.0f, false, 1, mask[which]);
        k.mark_gates(gate, 3, 0.75f, true, 2, mask[which]);
        k.mark_named(named, 3, 4, mask[which]);
        num_chosen[which] = k.choose(x, D, 1.0f, chosen[which]);
    }
    if (num_chosen[0] != num_chosen[1] ||
        std::memcmp(chosen[0], chosen[1], num_chosen[0] * sizeof(int32_t)) != 0)
        return false;
    return are_close(sum[0], sum[1], 12) && are_close(y[0], y[1], 2 * C) &&
           std::memcmp(mask[0], mask[1], sizeof mask[0]) == 0;
}

bool agree(const Kernels& tried, const Kernels& reference) {
    constexpr int64_t row_bytes[NUM_KINDS] = {
        4 * D,         2 * D,         2 * D,         D / 32 * 34, D / 32 * 18,
        D / 256 * 144, D / 256 * 176, D / 256 * 210, D / 32 * 18,   D / 32 * 34};
    for (int64_t i = 0; i < D; ++i) x[i] = static_cast<float>(i % 7 - 3);
    for (int64_t a = 0; a < ROWS; ++a) c[a] = static_cast<float>(a - 2);
    for (int64_t i = 0; i < static_cast<int64_t>(sizeof weight); ++i)
        weight[i] = i % 2 ? 0x3c : static_cast<uint8_t>(i * 37);  // about one, in any float type
    const Kernels* both[] = {&tried, &reference};
    for (int32_t kind = 0; kind < NUM_KINDS; ++kind) {
        for (int which = 0; which < 2; ++which) {
            const Input input{x, packed[which]};
            if (both[which]->quantise[kind]) both[which]->quantise[kind](input, D);
            both[which]->dot_rows[kind]({weight, row_bytes[kind], D, nullptr, ROWS}, input,
                                        y[which], 0, ROWS);
        }
        if (!are_close(y[0], y[1], ROWS)) return false;
        for (int which = 0; which < 2; ++which) {
            for (int64_t i = 0; i < D; ++i) y[which][i] = 0.0f;
            both[which]->accumulate_rows[kind]({weight, row_bytes[kind], D, nullptr, ROWS}, c,
                                               y[which], 0, ROWS, 0, D);
            OrderSums* order_sums = both[which]->order_sums[kind];
            if (order_sums) order_sums(y[which], 0, D);
        }
        if (!are_close(y[0], y[1], D)) return false;
        if (!unpack_alike(tried, reference, kind, row_bytes[kind])) return false;
        if (!panels_alike(tried, reference, kind, row_bytes[kind])) return false;
    }
    return attend_alike(tried, reference) && pairs_alike(tried, reference);
}

}  // namespace

bool runs_here(const Kernels& tried, const Kernels& reference) {
    const pid_t child = fork();
    if (child < 0) return true;
    if (child == 0) {
        const rlimit no_core = {0, 0};
        setrlimit(RLIMIT_CORE, &no_core);
        for (int number : {SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGTRAP}) std::signal(number, SIG_DFL);
        _exit(agree(tried, reference) ? 0 : 1);
    }
    int status = 0;
    pid_t done;
    do done = waitpid(child, &status, 0);
    while (done < 0 && errno == EINTR);
    // Where someone else waits for all children the answer is lost.
    return done < 0 || (WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
#else
bool runs_here(const Kernels&, const Kernels&) { return true; }
#endif
