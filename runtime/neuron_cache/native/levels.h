// Compiles loops over neurons for several instruction sets, with equal results (no fused operations).
#pragma once
#include <stdint.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

#if defined(__x86_64__) && defined(__linux__)
#define FOR_EACH_LEVEL __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_LEVEL
#endif

struct BitMasks {
    constexpr BitMasks() : of{} {
        for (int i = 0; i < 32; ++i) of[i] = 1u << i;
    }
    uint32_t of[32];
};
constexpr BitMasks MASKS;
