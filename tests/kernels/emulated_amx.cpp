// Compares products at the AMX level, on emulated tiles, with those of the generic level, bit for
// bit. The last row ends where its allocation does, so that the address sanitizer notices reads
// past it. With the argument "wrong" the tiles make an error. With "well" the program multiplies
// tiles once, correctly; any other argument names a misuse of tiles, which must end the program.
#include "emulated_amx.h"

#include <vector>

#include "../../runtime/kernels/cpu/kernels.h"

namespace {

uint32_t state = 1;

uint32_t random_bits() {
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}

// Vectors, quantised in two parts, the last third first; a single vector is quantised in one.
struct Packed {
    Packed(const Kernels& kernels, int32_t kind, const std::vector<float>& x, int64_t D, int64_t T)
        : input{x.data(), nullptr, D, T, 0, T} {
        const int64_t bytes = T * packed_bytes(D);
        input.packed = static_cast<uint8_t*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
        std::memset(input.packed, 0xff, bytes);  // NaN, if a scale is read that was not written
        const int64_t border = T * 2 / 3;
        kernels.quantise[kind](input.part(border, T), D);
        if (border > 0) kernels.quantise[kind](input.part(0, border), D);
    }
    ~Packed() { std::free(input.packed); }
    Input input;
};

struct Weights {
    int32_t kind;
    int64_t D, N, row_bytes;
    std::vector<uint8_t> data;

    Weights(int32_t kind, int64_t D, int64_t N) : kind(kind), D(D), N(N) {
        const int64_t block_bytes = KINDS[kind].block_bytes, head = KINDS[kind].head_bytes;
        const bool is_planar = KINDS[kind].layout == PLANAR;
        const int64_t n = D / block_values(kind);
        row_bytes = n * block_bytes;
        data.resize(N * row_bytes);
        for (uint8_t& byte : data) byte = static_cast<uint8_t>(random_bits());
        for (int64_t a = 0; a < N; ++a)
            for (int64_t b = 0; b < n; ++b) {  // scales and minima of 0.5 to 2, f16 of either sign
                uint8_t* at = &data[a * row_bytes + b * (is_planar ? 2 : block_bytes)];
                if (head == 1) at[0] = static_cast<uint8_t>(127 + random_bits() % 3);
                for (int64_t i = 0; i < head / 2; ++i) {
                    const uint16_t number = 0x3800 | (random_bits() & 0x87ff);
                    std::memcpy(at + 2 * i, &number, 2);
                }
            }
        if (!is_tiled(kind)) return;
        std::vector<uint8_t> tiles(data.size());  // see kernels.h
        const int64_t quant_bytes = block_bytes - head, size = head == 1 ? 1 : 2;
        for (int64_t a = 0; a < N; ++a)
            for (int64_t b = 0; b < n; ++b) {
                const int64_t most = 4 / head, first = b / most * most, r = a % TILE_ROWS;
                const int64_t together = n - first < most ? n - first : most;
                const uint8_t* block = &data[a * row_bytes + b * block_bytes];
                uint8_t* to = &tiles[(a - r) * row_bytes] + first * TILE_ROWS * block_bytes;
                for (int64_t i = 0; i < head; i += size)
                    std::memcpy(to + TILE_ROWS * ((b - first) * head + i) + size * r, block + i, size);
                to += TILE_ROWS * (head * together + (b - first) * quant_bytes) + 4 * r;
                for (int64_t at = 0; at < quant_bytes; at += 4)
                    std::memcpy(to + TILE_ROWS * at, block + head + at, 4);
            }
        data = tiles;
    }
};

// Writes y[t * N + a] for vectors t0 .. t1 - 1 and rows a0 .. a1 - 1, and nothing else.
void products(const Kernels& kernels, const Weights& w, const Packed& x, const int32_t* index,
              int64_t t0, int64_t t1, int64_t a0, int64_t a1, std::vector<float>& y) {
    const Rows rows = {w.data.data(), w.row_bytes, w.D, index, w.N};
    kernels.dot_rows[w.kind](rows, x.input.part(t0, t1), y.data() + t0 * w.N, w.N, a0, a1);
}

bool fail(const char* what, const Weights& w, int64_t T) {
    std::printf("%s: kind %d, D %d, N %d, T %d\n", what, static_cast<int>(w.kind),
                static_cast<int>(w.D), static_cast<int>(w.N), static_cast<int>(T));
    return false;
}

bool agree(const Weights& w, int64_t T) {
    std::vector<float> x(T * w.D);
    for (float& value : x) value = static_cast<float>(random_bits()) / (1 << 23) - 1.0f;
    const Packed reference(kernels_generic, w.kind, x, w.D, T);
    const Packed tried(kernels_amx, w.kind, x, w.D, T);
    std::vector<float> want(T * w.N), got(T * w.N);
    const auto are_alike = [&] {
        return !emulated_tiles().is_configured &&
               std::memcmp(want.data(), got.data(), want.size() * sizeof(float)) == 0;
    };
    products(kernels_generic, w, reference, nullptr, 0, T, 0, w.N, want);
    products(kernels_amx, w, tried, nullptr, 0, T, 0, w.N, got);
    if (!are_alike()) return fail("differs", w, T);

    std::vector<int32_t> index(w.N);
    for (int64_t a = 0; a < w.N; ++a) index[a] = static_cast<int32_t>(a * 7 % w.N);
    products(kernels_generic, w, reference, index.data(), 0, T, 0, w.N, want);
    products(kernels_amx, w, tried, index.data(), 0, T, 0, w.N, got);
    if (!are_alike()) return fail("chosen rows differ", w, T);

    const int64_t t0 = T / 3, a0 = w.N / 3;
    std::fill(want.begin(), want.end(), -1.0f);
    got = want;
    products(kernels_generic, w, reference, nullptr, t0, T, a0, w.N, want);
    products(kernels_amx, w, tried, nullptr, t0, T, a0, w.N, got);
    return are_alike() || fail("a part differs", w, T);
}

// Adds the product of tile 1, 16 x 32, and tile 2, 32 x 16, to tile 0, 16 x 16, with the misuse
// that `what` names, if any.
void misuse(const char* what) {
    const auto is = [&](const char* name) { return std::strcmp(what, name) == 0; };
    uint8_t config[64] = {1};
    config[16] = config[20] = 64, config[18] = 32;
    config[48] = config[49] = 16, config[50] = is("shape") ? 7 : 8;
    config[15] = is("reserved");
    if (!is("unconfigured")) _tile_loadconfig(config);
    if (is("released")) _tile_release();
    _tile_dpbssd(0, 1, is("twice") ? 1 : is("other") ? 3 : 2);
}

}  // namespace

int main(int argc, char** argv) {
    emulated_error = argc > 1 && std::strcmp(argv[1], "wrong") == 0;
    if (argc > 1 && !emulated_error) {
        misuse(argv[1]);
        return 0;
    }
    for (int32_t kind = 0; kind < NUM_KINDS; ++kind)
        for (int64_t D : {32, 64, 96, 576, 640, 2048})
            for (int64_t N : {1, 15, 16, 17, 40, 48}) {
                const int64_t values = block_values(kind);
                if (!kernels_amx.dot_rows[kind]) continue;  // amx_products.cpp
                if (D % values || (D == 640 && values < 128)) continue;
                // Rows and vectors share tiles, so short rows are tried with every N and T. Blocks
                // are multiplied one after another, so few of each suffice for long rows.
                const bool is_long = D > 96;
                if ((is_tiled(kind) && N % TILE_ROWS) || (is_long && N != 17 && N != 48)) continue;
                // Other types differ in how a block is unpacked.
                const bool is_first =
                    kind_in_file(kind) == KIND_Q8_0 || kind_in_file(kind) == KIND_Q4_0;
                if (!is_first && ((D != 96 && D != 576 && D != 640) || (N != 17 && N != 48))) continue;
                const Weights weights(kind, D, N);
                for (int64_t T : {1, 7, 8, 15, 16, 17, 31, 32, 33, 70})
                    if (!(is_long && T != 1 && T != 17) && !agree(weights, T)) return 1;
            }
    std::printf("alike\n");
    return 0;
}
