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

// More rows than two tiles of 16 and more vectors than 16, neither a multiple of 16.
constexpr int64_t D = 512, ROWS = 36, VECTORS = 19, MOST_ROWS = GROUP_ROWS;
alignas(64) uint8_t weight[MOST_ROWS * D * 4];  // a whole group of rows of any kind
alignas(64) float x[VECTORS * D], c[2 * MOST_ROWS], y[2][VECTORS * D];
alignas(64) uint8_t packed[2][VECTORS * packed_bytes(D)];
alignas(64) float unpacked[2][ROWS * D];
const Kernels* both[2];  // those that are tried, and the reference

bool are_close(const float* got, const float* want, int64_t n) {
    for (int64_t i = 0; i < n; ++i)
        if (!(std::fabs(got[i] - want[i]) <= 1e-3f * std::fabs(want[i]) + 1e-2f)) return false;
    return true;
}

// Compares products with one vector and with several: bit by bit for kinds with the same arithmetic
// at all levels, else up to rounding.
bool products_alike(int32_t kind) {
    const Rows rows = {weight, row_bytes_of(kind, D), D, nullptr, ROWS};
    for (int64_t T : {int64_t{1}, VECTORS}) {
        for (int which = 0; which < 2; ++which) {
            std::memset(packed[which], 0, sizeof packed[which]);  // nothing is left of another kind
            const Input input{x, packed[which], D, VECTORS, 0, T};
            if (both[which]->quantise[kind]) both[which]->quantise[kind](input, D);
            both[which]->dot_rows[kind](rows, input, y[which], ROWS, 0, ROWS);
        }
        if (form_of(kind) && kind != KIND_BF16 ? std::memcmp(y[0], y[1], T * ROWS * sizeof(float)) != 0
                                               : !are_close(y[0], y[1], T * ROWS))
            return false;
    }
    return true;
}

// A range of rows that begins and ends within a tile has the products of these rows.
bool ranges_alike(int32_t kind) {
    const Kernels& tried = *both[0];
    const Rows rows = {weight, row_bytes_of(kind, D), D, nullptr, ROWS};
    for (int64_t T : {int64_t{1}, VECTORS}) {
        const Input input{x, packed[0], D, VECTORS, 0, T};
        tried.quantise[kind](input, D);
        tried.dot_rows[kind](rows, input, y[0], ROWS, 0, ROWS);
        for (int64_t begin : {3, 9})
            for (int64_t end : {7, 13}) {
                if (end < begin) continue;
                std::memset(y[1], 0, sizeof y[1]);
                tried.dot_rows[kind](rows, input, y[1], ROWS, begin, end);
                for (int64_t i = 0; i < T * ROWS; ++i) {
                    const bool is_inside = begin <= i % ROWS && i % ROWS < end;
                    if (y[1][i] != (is_inside ? y[0][i] : 0.0f)) return false;
                }
            }
    }
    return true;
}

// Compares sums of rows for one vector, and for several that take all rows, two, or a quarter of them.
bool sums_alike(int32_t kind) {
    constexpr int64_t T = 16;  // enough for a quarter of the rows to be listed: see by_window()
    const int64_t count = is_grouped(kind) ? GROUP_ROWS : ROWS;
    const Rows rows = {weight, row_bytes_of(kind, D), D, nullptr, count};
    for (uint64_t mask : {uint64_t{0}, ~uint64_t{0}, uint64_t{0x18}, uint64_t{0x1111111111111111}}) {
        float some[T * MOST_ROWS];
        uint64_t masks[T] = {};
        for (int64_t i = 0; i < T * count; ++i) {
            some[i] = mask >> i % count & 1 ? c[i % (2 * MOST_ROWS)] : 0.0f;
            masks[i / count] |= static_cast<uint64_t>(some[i] != 0.0f) << i % count;
        }
        for (int which = 0; which < 2; ++which) {
            std::memset(y[which], 0, sizeof y[which]);
            if (mask == 0)
                both[which]->accumulate_rows[kind](rows, c, y[which], 0, count, 0, D);
            else
                both[which]->accumulate_many[kind](rows, 0, count,
                                                   {some, masks, y[which], count, 1, D, 0, 0, T, 0, D});
            OrderSums* order_sums = both[which]->order_sums[kind];
            for (int64_t t = 0; order_sums && t < T; ++t) order_sums(y[which] + t * D, 0, D);
        }
        if (!are_close(y[0], y[1], T * D)) return false;
        if (mask == 0) continue;
        constexpr int64_t FROM = D / 2;  // some columns: the others stay
        std::memset(y[1], 0, sizeof y[1]);
        both[0]->accumulate_many[kind](rows, 0, count,
                                       {some, masks, y[1], count, 1, D, 0, 0, T, FROM, D});
        OrderSums* order_sums = both[0]->order_sums[kind];
        for (int64_t t = 0; t < T; ++t) {
            if (order_sums) order_sums(y[1] + t * D, FROM, D);
            for (int64_t d = 0; d < D; ++d)
                if (y[1][t * D + d] != (d < FROM ? 0.0f : y[0][t * D + d])) return false;
        }
    }
    return true;
}

// A sum of float rows is that of one row after another, to the bit.
bool adds_in_order(int32_t kind) {
    const Rows rows = {weight, row_bytes_of(kind, D), D, nullptr, ROWS};
    for (int which = 0; which < 2; ++which) {
        std::memset(y[which], 0, sizeof y[which]);
        for (int64_t a = 0, end; a < ROWS; a = end) {
            end = which ? a + 1 : ROWS;
            both[0]->accumulate_rows[kind](rows, x, y[which], a, end, 0, D);
        }
    }
    return std::memcmp(y[0], y[1], D * sizeof(float)) == 0;
}

// Unpacking rounds at most once, so bits are compared; weight holds no NaN.
bool unpack_alike(int32_t kind) {
    const Rows rows = {weight, row_bytes_of(kind, D), D, nullptr, ROWS};
    for (int which = 0; which < 2; ++which)
        both[which]->unpack_rows[kind](rows, unpacked[which], 0, ROWS);
    return std::memcmp(unpacked[0], unpacked[1], sizeof unpacked[0]) == 0;
}

// Compares the attention of two queries over the rows, as keys and as values; writes y.
bool attend_alike() {
    constexpr int64_t W = 80, G = 2, PADDED = 96, ROOM = (ROWS + 15) / 16 * 16;
    constexpr float scale[NUM_CACHE_KINDS] = {10.0f, 5.0f, 10.0f, 0.01f,
                                              0.1f};  // scores a few units apart
    alignas(64) float query[G * PADDED] = {};
    for (int64_t g = 0; g < G; ++g)
        for (int64_t i = 0; i < W; ++i) query[g * PADDED + i] = x[i] * 0.1f;
    for (int32_t kind = 0; kind < NUM_CACHE_KINDS; ++kind) {
        const int64_t width = W / block_values(kind) * block_values(kind);
        for (int which = 0; which < 2; ++which) {
            alignas(64) float score[G * ROOM];
            float top[G] = {NAN, NAN}, total[G] = {NAN, NAN};
            for (float& own : score) own = NAN;
            const uint8_t* run[] = {weight};
            const int32_t count[G] = {ROWS, ROWS - 1};
            const AttendPart part = {run,   run,   ROWS,  2 * D,   2 * D, ROWS,
                                     width, width, G,     count,   query, {scale[kind], 0.0f},
                                     score, top,   total, y[which]};
            both[which]->weigh_keys[kind](part);
            both[which]->mix_values[kind](part);
            for (int64_t g = 0; g < G; ++g) y[which][G * PADDED + g] = top[g] + total[g];
        }
        if (!are_close(y[0], y[1], G * PADDED + G)) return false;
    }
    return true;
}

bool choose_alike() {
    int32_t chosen[2][D];
    const int64_t num_tried = both[0]->choose(x, D, 1.0f, chosen[0]);
    return num_tried == both[1]->choose(x, D, 1.0f, chosen[1]) &&
           std::memcmp(chosen[0], chosen[1], num_tried * sizeof(int32_t)) == 0;
}

// Compares bits, because the arithmetic is in integers.
bool dots_alike() {
    constexpr int64_t N = 7, G = 2, WIDTH = 2 * SELECT_WIDTH;
    uint8_t row[N * WIDTH];
    int8_t query[G * WIDTH];
    for (int64_t i = 0; i < N * WIDTH; ++i) row[i] = static_cast<uint8_t>(i * 37 % 128);
    for (int64_t i = 0; i < G * WIDTH; ++i) query[i] = static_cast<int8_t>(i * 53 % 255 - 127);
    const uint8_t* rows[N];
    for (int64_t i = 0; i < N; ++i) rows[i] = row + i * WIDTH;
    int32_t out[4][G * N];
    for (int which = 0; which < 2; ++which) {
        both[which]->dot_bytes({rows, N, WIDTH, G, N, query, out[which]});
        both[which]->dot_codes({rows, N, WIDTH, G, N, query, out[2 + which]});
    }
    return std::memcmp(out[0], out[1], sizeof out[0]) == 0 &&
           std::memcmp(out[2], out[3], sizeof out[0]) == 0;
}

// Compares scores of keys, bit by bit; their masses, up to rounding; and the choice of the largest.
bool selection_alike() {
    constexpr int64_t N = 67, G = 3, MOST = 40;
    int32_t dot[G * N], offset[G], bits[N];
    float factor[N], by[G], center[G], score[2][G * N], mass[2][N];
    for (int64_t i = 0; i < G * N; ++i) dot[i] = static_cast<int32_t>(i * 389 % 2000 - 1000);
    for (int64_t i = 0; i < N; ++i) factor[i] = 0.5f + static_cast<float>(i % 9) / 8;
    for (int64_t g = 0; g < G; ++g) {
        offset[g] = static_cast<int32_t>(300 * g - 250);
        by[g] = 1.0f + static_cast<float>(g), center[g] = static_cast<float>(4000 * g - 5000);
    }
    for (const float* from : {static_cast<const float*>(center), static_cast<const float*>(nullptr)}) {
        for (int which = 0; which < 2; ++which)
            both[which]->scale_dots({dot, N, G, N, 1, 2, offset, factor, by, from, score[which]});
        if (std::memcmp(score[0], score[1], sizeof score[0]) != 0) return false;
    }
    for (int64_t i = 0; i < G * N; ++i) score[0][i] = score[1][i] = static_cast<float>(dot[i]) / 500;
    for (int which = 0; which < 2; ++which) {
        both[which]->share_mass(score[which], G, N, mass[which]);
        for (float& share : mass[which]) share *= 1000.0f;  // are_close allows 0.01
    }
    if (!are_close(mass[0], mass[1], N)) return false;
    // Equal scores, a NaN, an infinite one, and 0.
    for (int64_t i = 0; i < N; ++i) mass[1][i] = static_cast<float>(i * 5 % 13);
    mass[1][9] = __builtin_nanf(""), mass[1][31] = __builtin_inff();
    for (int64_t k : {int64_t{1}, int64_t{2}, int64_t{3}, int64_t{17}, MOST}) {
        int32_t chosen[2][MOST] = {{-1}, {-1}};
        for (int which = 0; which < 2; ++which)
            both[which]->choose_largest(mass[1], N, k, bits, chosen[which]);
        if (std::memcmp(chosen[0], chosen[1], k * sizeof(int32_t)) != 0) return false;
    }
    return true;
}

bool rows_of_floats_alike() {
    for (int32_t activation : {ACTIVATION_SILU, ACTIVATION_GELU, ACTIVATION_GELU_TANH}) {
        for (int which = 0; which < 2; ++which) {
            for (int64_t i = 0; i < D; ++i) y[which][i] = 50.0f * x[i];
            both[which]->add_to(y[which], x, D - 3);
            for (int64_t i = 0; i < D; ++i) y[which][D + i] = x[i];
            both[which]->smooth(y[which] + D, D - 3, activation);
            for (int64_t i = 0; i < D; ++i) y[which][D + i] *= 100.0f;  // are_close allows 0.01
        }
        if (!are_close(y[0], y[1], 2 * D)) return false;
    }
    constexpr float SPECIAL[] = {NAN,   INFINITY, -INFINITY, 0.0f,    -0.0f, 90.0f, -90.0f,
                                 87.5f, -87.5f,   1e-40f,    -1e-40f, 3.0f,  -3.0f};
    constexpr int64_t N = sizeof SPECIAL / sizeof *SPECIAL;
    for (int32_t activation : {ACTIVATION_SILU, ACTIVATION_GELU_TANH}) {  // the same bits at all levels
        for (int which = 0; which < 2; ++which) {
            std::memcpy(y[which], SPECIAL, sizeof SPECIAL);
            std::memcpy(y[which] + N, x, (D - N) * sizeof(float));
            both[which]->smooth(y[which], N, activation);
            both[which]->smooth(y[which] + N, D - N, activation);
            if (!std::isnan(y[which][0])) return false;
        }
        if (std::memcmp(y[0] + 3, y[1] + 3, (D - 3) * sizeof(float)) != 0)
            return false;  // behind infinity
    }
    for (int which = 0; which < 2; ++which) {
        std::memcpy(y[which], SPECIAL, sizeof SPECIAL);
        std::memcpy(y[which] + N, x, (D - N) * sizeof(float));
        both[which]->soft_cap(y[which], D, 2.0f);
        if (!std::isnan(y[which][0]) || y[which][1] != 2.0f || y[which][2] != -2.0f) return false;
    }
    if (std::memcmp(y[0] + 1, y[1] + 1, (D - 1) * sizeof(float)) != 0) return false;
    uint64_t above[2];
    for (int which = 0; which < 2; ++which) {
        for (int64_t i = 0; i < 64; ++i) y[which][i] = x[i];
        above[which] = both[which]->above(x, 61, 1.0f);
        both[which]->keep_only(y[which], 0x123456789abcdef0);
    }
    return above[0] == above[1] && std::memcmp(y[0], y[1], 64 * sizeof(float)) == 0;
}

// A head of a gated delta net with whole vectors of columns and with a remainder, in one row and in three.
bool deltas_alike() {
    constexpr int64_t N = 12, J = 3;
    float scratch[delta_scratch(N, 48) + 16], after[2][J * 128 + N * 48];
    float* aligned = scratch + (16 - reinterpret_cast<uintptr_t>(scratch) / 4 % 16);
    const float* from = x + D;  // of small values
    for (int64_t M : {int64_t{48}, int64_t{37}})
        for (int64_t T : {1, 3}) {
            for (int which = 0; which < 2; ++which) {
                DeltaHead head = {};
                head.stores_key = true, head.G = head.V = 1, head.N = N, head.M = M, head.J = J,
                head.T = T, head.C = 2 * N + M, head.R = head.C + 2;
                head.x = from, head.x_stride = D, head.conv = from + 1, head.step_bias = from + 2;
                head.decay = from + 3, head.norm = from + 4, head.epsilon = 1e-6f,
                head.scratch = aligned;
                head.inputs = from + 5, head.state = from + 6;
                head.next_inputs = after[which], head.next_state = after[which] + J * 128;
                head.y = y[which], head.y_stride = D;
                both[which]->delta_head(head);
                for (int64_t t = 0; t < T; ++t) both[which]->gate_by(y[which] + t * D, from + 7, M);
                for (int64_t t = 0; t < T; ++t)
                    for (int64_t m = 0; m < M; ++m) y[which][t * D + m] *= 100.0f;  // see are_close
            }
            for (int64_t t = 0; t < T; ++t)
                if (!are_close(y[0] + t * D, y[1] + t * D, M)) return false;
            if (!are_close(after[0], after[1], (J - 1) * (2 * N + M)) ||
                !are_close(after[0] + J * 128, after[1] + J * 128, N * M))
                return false;
        }
    return true;
}

// A head of Mamba-2, likewise.
bool scans_alike() {
    constexpr int64_t N = 12, J = 3;
    float scratch[mamba2_scratch(N, 48) + 16], after[2][J * 128 + N * 48];
    float* aligned = scratch + (16 - reinterpret_cast<uintptr_t>(scratch) / 4 % 16);
    const float* from = x + D;  // of small values
    for (int64_t P : {int64_t{48}, int64_t{37}})
        for (int64_t T : {1, 3, 6}) {
            for (int which = 0; which < 2; ++which) {
                Mamba2Head head = {};
                head.stores_group = true, head.H = head.G = 1, head.N = N, head.P = P, head.J = J;
                head.T = T, head.C = P + 2 * N, head.R = head.C + 1;
                head.x = from + P, head.x_stride = D, head.conv = from + 1, head.conv_bias = from + 2;
                head.step_bias = from + 3, head.skip = from + 4, head.decay = from + 6;  // below 0
                head.inputs = from + 5, head.state = from + 7, head.scratch = aligned;
                head.next_inputs = after[which], head.next_state = after[which] + J * 128;
                head.y = y[which], head.y_stride = D;
                both[which]->mamba2_head(head);
            }
            for (int64_t t = 0; t < T; ++t)
                if (!are_close(y[0] + t * D, y[1] + t * D, P)) return false;
            if (!are_close(after[0], after[1], (J - 1) * (2 * N + P)) ||
                !are_close(after[0] + J * 128, after[1] + J * 128, N * P))
                return false;
        }
    return true;
}

// Norms, the rotary embedding, halves and sums of parts have the same bits at all levels.
bool vectors_alike() {
    for (int which = 0; which < 2; ++which) {
        float* out = y[which];
        std::memset(out, 0, 6 * D * sizeof(float));
        both[which]->rms_norm(x, x + D, 1e-5f, D - 3, out);
        both[which]->layer_norm(x, x + D, x + 2 * D, 1e-5f, D - 3, out + D);
        for (int is_adjacent = 0; is_adjacent < 2; ++is_adjacent) {
            float* heads = out + (2 + is_adjacent) * D;
            std::memcpy(heads, x, D * sizeof(float));
            both[which]->rotate(heads, 2, x + 1, x + 2, 90, is_adjacent);
        }
        both[which]->store_f16(x, D - 3, reinterpret_cast<uint16_t*>(out + 4 * D));
        both[which]->sum_parts(x, D, 5, D - 3, out + 5 * D);
    }
    return std::memcmp(y[0], y[1], 6 * D * sizeof(float)) == 0;
}

bool is_alike(int32_t kind) {
    return (is_grouped(kind) || products_alike(kind)) && (!is_tiled(kind) || ranges_alike(kind)) &&
           (is_tiled(kind) || sums_alike(kind)) && unpack_alike(kind);
}

void fill() {
    for (int64_t i = 0; i < VECTORS * D; ++i) x[i] = static_cast<float>((i + i / D) % 7 - 3);
    for (int64_t i = 0; i < 2 * MOST_ROWS; ++i) c[i] = static_cast<float>(i % 5 - 1);
}

// f16: 1 to 1.25; bf16, f32: 2^-7 to 2^-5. Rows of any width differ. Scales of one byte: up to 1/2, as larger ones would
// overflow.
void fill_weight(bool is_e8m0) {
    for (int64_t i = 0; i < static_cast<int64_t>(sizeof weight); ++i)
        weight[i] = (i % 2 ? 0x3c : i * 37 + i / 512 * 46) & (is_e8m0 ? 127 : 255);
}

// Compares products of types with grids with those of their values.
bool grids_agree() {
    fill(), fill_weight(false);
    for (int32_t kind = 0; kind < NUM_KINDS; ++kind) {
        if (form_of(kind) != FORM_GRIDS) continue;
        const Rows rows = {weight, row_bytes_of(kind, D), D, nullptr, ROWS};
        both[0]->unpack_rows[kind](rows, unpacked[0], 0, ROWS);
        const Input input{x, packed[0], D, VECTORS, 0, VECTORS};
        both[0]->quantise[kind](input, D);
        for (int64_t T : {int64_t{1}, VECTORS}) {
            both[0]->dot_rows[kind](rows, input.part(0, T), y[0], ROWS, 0, ROWS);
            for (int64_t i = 0; i < T * ROWS; ++i) {
                float sum = 0.0f, most = 0.0f;
                for (int64_t d = 0; d < D; ++d) {
                    const float term = unpacked[0][i % ROWS * D + d] * x[i / ROWS * D + d];
                    sum += term, most += std::fabs(term);
                }
                if (!(std::fabs(y[0][i] - sum) <= 1e-3f * most)) return false;
            }
        }
        if (!ranges_alike(kind)) return false;
    }
    return true;
}

bool agree() {
    fill();
    for (const bool is_e8m0 : {true, false}) {
        fill_weight(is_e8m0);
        for (int32_t kind = 0; kind < NUM_KINDS; ++kind)
            if ((KINDS[kind].head_bytes == 1) == is_e8m0 && both[1]->unpack_rows[kind] &&
                !is_alike(kind))
                return false;
    }
    for (int64_t i = 0; i < ROWS; ++i)  // so different in size, also in bf16, that sums are rounded
        x[i] = (1.0f + static_cast<float>(i)) * static_cast<float>(1 << i * 5 % 13) *
               (i % 3 == 1 ? -1.0f : 1.0f);
    for (int32_t kind : {KIND_F32, KIND_F16, KIND_BF16})
        if (!adds_in_order(kind)) return false;
    return attend_alike() && choose_alike() && dots_alike() && selection_alike() &&
           rows_of_floats_alike() && deltas_alike() && scans_alike() && vectors_alike();
}

// Whether the kernels agree, in a child process.
bool is_true_in_child(bool (*agrees)()) {
    const pid_t child = fork();
    if (child < 0) return true;
    if (child == 0) {
        const rlimit no_core = {0, 0};
        setrlimit(RLIMIT_CORE, &no_core);
        for (int number : {SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGTRAP}) std::signal(number, SIG_DFL);
        _exit(agrees() ? 0 : 1);
    }
    int status = 0;
    pid_t done;
    do done = waitpid(child, &status, 0);
    while (done < 0 && errno == EINTR);
    // If another thread waits for all children, it may take the status.
    return done < 0 || (WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace

bool runs_here(const Kernels& tried, const Kernels& reference) {
    both[0] = &tried, both[1] = &reference;
    return is_true_in_child(agree);
}

bool grids_run_here(const Kernels& tried) {
    both[0] = &tried;
    return is_true_in_child(grids_agree);
}
#else
bool runs_here(const Kernels&, const Kernels&) { return true; }
bool grids_run_here(const Kernels&) { return true; }
#endif
