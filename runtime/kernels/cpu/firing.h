// Decides whether neurons fire, lists those that are predicted to, and keeps bits of those that do.
// The reference is feed_forward.py.
#pragma once
#include "row_sums.h"

// The predicted neurons of a layer, given by bits, or by scores above a threshold or NaN.
struct Named {
    const uint32_t* bits;  // or null
    const float* score;
    float threshold;

    bool has(int64_t j) const { return bits ? bits[j / 32] >> (j % 32) & 1 : !(score[j] <= threshold); }

    // Bit i says whether neuron j + i is predicted, for i < n <= 64. j % 32 == 0.
    uint64_t which(int64_t j, int64_t n) const {
        if (!bits) return kernels().above(score + j, n, threshold);
        const uint64_t word = bits[j / 32] | static_cast<uint64_t>(n > 32 ? bits[j / 32 + 1] : 0) << 32;
        return word & ~0ull >> (64 - n);
    }

    // Writes the predicted neurons below n to `chosen` [n], ascending; returns their number.
    int64_t list(int64_t n, int32_t* chosen) const {
        if (!bits) return kernels().choose(score, n, threshold, chosen);
        int64_t count = 0;
        for (int64_t first = 0; first < n; first += 32) {
            const uint32_t outside = n - first < 32 ? ~0u << (n - first) : 0;
            for (uint32_t left = bits[first / 32] & ~outside; left; left &= left - 1)
                chosen[count++] = static_cast<int32_t>(first + __builtin_ctz(left));
        }
        return count;
    }
};

// Memory for one bit per neuron of the layer, [T, stride] words; null: bits are not wanted.
struct Fired {
    uint32_t* bits = nullptr;
    int64_t stride = 0;

    void set(int64_t t, int64_t j) const { bits[t * stride + j / 32] |= 1u << j % 32; }
};

// Weight bytes of the rows that any token needs, each counted once. For one token, exactly these
// are read; several tokens may read further rows of the same groups (see neurons.h).
struct NeuronBytes {
    int64_t gate = 0, up = 0, down = 0;
};
