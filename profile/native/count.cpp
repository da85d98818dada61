// Adds one chunk of values to the counts of a layer: which neurons fire, and a histogram of
// |value| of those that do. Reads the values once (T * F * 4 bytes); the rest stays in cache.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t MAX_BINS = 256;
constexpr int NUM_TABLES = 4;  // a run of equal bins would wait for the addition before

// Sizes of `count` neurons that fire, into the tables.
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

}  // namespace

// value: f32 [T, F]; a neuron fires where value > threshold, or |value| > threshold.
// first, edge: of each of 2^15 buckets, see counting.py; count: i64 [F] and histogram: i64
// [num_bins], added to; what does not fire is in bin 0. T * F < 2^31. Returns 0, or 1 for sizes
// that cannot be.
extern "C" __attribute__((visibility("default"))) int32_t spark_count(
    const float* value, int64_t T, int64_t F, float threshold, int32_t is_magnitude,
    const uint8_t* first, const float* edge, int64_t* count, int64_t* histogram,
    int64_t num_bins) {
    if (T < 0 || F < 1 || num_bins < 1 || num_bins > MAX_BINS || T > INT32_MAX / F) return 1;
    std::vector<int32_t> fired_in_chunk(F);
    std::vector<float> sizes(F);
    std::vector<int32_t> tables(NUM_TABLES * MAX_BINS);
    int64_t num_fired = 0;
    for (int64_t t = 0; t < T; ++t) {
        const float* row = value + t * F;
        int64_t found = 0;
        if (is_magnitude) {
            for (int64_t f = 0; f < F; ++f) fired_in_chunk[f] += std::fabs(row[f]) > threshold;
            for (int64_t f = 0; f < F; ++f) {
                sizes[found] = std::fabs(row[f]);
                found += sizes[found] > threshold;
            }
        } else {
            for (int64_t f = 0; f < F; ++f) fired_in_chunk[f] += row[f] > threshold;
            for (int64_t f = 0; f < F; ++f) {
                sizes[found] = row[f];
                found += row[f] > threshold;
            }
            for (int64_t i = 0; i < found; ++i) sizes[i] = std::fabs(sizes[i]);
        }
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
