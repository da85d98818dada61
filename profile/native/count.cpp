// Adds one chunk of values to the counts of a layer: which neurons fire, and a histogram of their
// |value|. Reads the values once (T * F * 4 bytes); the rest stays in cache.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t MAX_BINS = 256;
constexpr int64_t LANES = 16;
constexpr int NUM_TABLES = 4;  // with one, a run of equal bins would wait for each addition

// Counts the sizes of `count` firing neurons in the tables.
inline void add_bins(const float* size, int64_t count, const uint8_t* first, const float* edge,
                     int32_t* tables) {
    for (int64_t i = 0; i < count; ++i) {
        uint32_t bits;
        std::memcpy(&bits, size + i, 4);
        const uint32_t bucket = bits >> 16;
        const int bin = first[bucket] + (size[i] >= edge[bucket]);
        ++tables[(i % NUM_TABLES) * MAX_BINS + bin];
    }
}

// For each neuron of a row that fires: adds 1 to its entry of `fired`, and appends its |value| to
// `size`, which has room for F + LANES values. Returns the number of neurons that fire.
using Pick = int64_t (*)(const float* row, int64_t F, float threshold, bool is_magnitude,
                         int32_t* fired, float* size);

inline int64_t pick_from(int64_t f, int64_t found, const float* row, int64_t F, float threshold,
                         bool is_magnitude, int32_t* fired, float* size) {
    for (; f < F; ++f) {
        const float magnitude = std::fabs(row[f]);
        const bool fires = (is_magnitude ? magnitude : row[f]) > threshold;
        fired[f] += fires;
        size[found] = magnitude;
        found += fires;
    }
    return found;
}

int64_t pick_generic(const float* row, int64_t F, float threshold, bool is_magnitude, int32_t* fired,
                     float* size) {
    return pick_from(0, 0, row, F, threshold, is_magnitude, fired, size);
}

#ifdef __x86_64__
__attribute__((target("avx512f,popcnt"))) int64_t pick_avx512(const float* row, int64_t F,
                                                              float threshold, bool is_magnitude,
                                                              int32_t* fired, float* size) {
    const __m512 limit = _mm512_set1_ps(threshold);
    const __m512i one = _mm512_set1_epi32(1);
    int64_t found = 0, f = 0;
    for (; f + LANES <= F; f += LANES) {
        const __m512 value = _mm512_loadu_ps(row + f), magnitude = _mm512_abs_ps(value);
        const __mmask16 fires = _mm512_cmp_ps_mask(is_magnitude ? magnitude : value, limit, _CMP_GT_OQ);
        const __m512i before = _mm512_loadu_si512(fired + f);
        _mm512_storeu_si512(fired + f, _mm512_mask_add_epi32(before, fires, before, one));
        _mm512_storeu_ps(size + found, _mm512_maskz_compress_ps(fires, magnitude));
        found += __builtin_popcount(fires);
    }
    return pick_from(f, found, row, F, threshold, is_magnitude, fired, size);
}
#endif

Pick best_pick() {
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx512f")) return pick_avx512;
#endif
    return pick_generic;
}

}  // namespace

// value: f32 [T, F]; a neuron fires where value > threshold or, with is_magnitude, where
// |value| > threshold. first, edge: one entry for each of 2^15 buckets, see counting.py. count:
// i64 [F] and histogram: i64 [num_bins] are added to; values of neurons that do not fire count in
// bin 0. T * F < 2^31. Returns 0, or 1 for impossible sizes.
extern "C" __attribute__((visibility("default"))) int32_t hs_count(
    const float* value, int64_t T, int64_t F, float threshold, int32_t is_magnitude,
    const uint8_t* first, const float* edge, int64_t* count, int64_t* histogram, int64_t num_bins) {
    if (T < 0 || F < 1 || num_bins < 1 || num_bins > MAX_BINS || T > INT32_MAX / F) return 1;
    std::vector<int32_t> fired_in_chunk(F);
    std::vector<float> sizes(F + LANES);
    std::vector<int32_t> tables(NUM_TABLES * MAX_BINS);
    int64_t num_fired = 0;
    const Pick pick = best_pick();
    for (int64_t t = 0; t < T; ++t) {
        const int64_t found =
            pick(value + t * F, F, threshold, is_magnitude, fired_in_chunk.data(), sizes.data());
        add_bins(sizes.data(), found, first, edge, tables.data());
        num_fired += found;
    }
    for (int64_t f = 0; f < F; ++f) count[f] += fired_in_chunk[f];
    for (int64_t bin = 0; bin < num_bins; ++bin)
        for (int table = 0; table < NUM_TABLES; ++table)
            histogram[bin] += tables[table * MAX_BINS + bin];
    histogram[0] += T * F - num_fired;
    return 0;
}
