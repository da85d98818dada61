// What becomes of the products of a query with keys: scores, and their shares. Scores of src/hotsplit/model/attention.py
// has the fields of HsScores by the same names, from which its mirror is made.
#pragma once
#include <stdint.h>

#include <algorithm>
#include <cmath>

// Functions are static because each level's sources compile their own.
struct HsScores {
    float scale;              // of a product
    float score_cap;          // c: a scaled score s counts as c tanh(s / c); 0: as it is
    const float* head_sinks;  // [H] a further score of each head, of no value; or null
};

// Replaces n scaled products with the scores that count. `soft_cap`: see Kernels.
template <class SoftCap>
static inline void finish_scores(const HsScores& s, float* score, int64_t n, const SoftCap& soft_cap) {
    if (s.score_cap > 0.0f) soft_cap(score, n, s.score_cap);
}

// For one head, `out` [W] has the sum of e^(score - top) * value over its keys, and `sum` that of e^(score - top), whose
// quotient will be the head's output: adds what has a share but no value.
static inline void finish_sums(const HsScores& s, int64_t head, float top, float* out, int64_t W,
                               float& sum) {
    if (!s.head_sinks) return;
    const float sink = s.head_sinks[head];  // the largest score need not be a key's
    const float larger = std::max(top, sink), share = std::exp(top - larger);
    for (int64_t i = 0; i < W; ++i) out[i] *= share;
    sum = sum * share + std::exp(sink - larger);
}
