// Scattered rows that will be read soon, to be prefetched while others are read.
#pragma once
#include <cstdint>

// Rows in the order in which they will be read. A kernel that reads rows takes some from here and prefetches
// them line by line, a line of each in turn: as many as it reads, and as many again if more are queued than it
// will read; sums of rows of small blocks take QUEUED_ROWS. A core drops prefetches beyond the misses that it can
// wait for, so they must be spread evenly, and go to the cache that waits for more of them (queue_to_l2;
// docs/log/kernels.md).
class PrefetchQueue {
  public:
    // If there are ROOM rows, the first one is given up.
    void push(const uint8_t* row) {
        rows_[end_++ % ROOM] = row;
        first_ += end_ - first_ > ROOM;
    }

    // These two are always inlined, because a shared copy could contain the instructions of another level.
    __attribute__((always_inline)) inline int64_t size() const {
        return static_cast<int64_t>(end_ - first_);
    }

    // Takes the next `count` rows, to be prefetched by the caller; false if there is none. If there are
    // fewer, the last one is repeated.
    __attribute__((always_inline)) inline bool take(const uint8_t** next, int64_t count) {
        const int64_t there = size() < count ? size() : count;
        for (int64_t r = 0; there && r < count; ++r)
            next[r] = rows_[(first_ + (r < there ? r : there - 1)) % ROOM];
        first_ += there;
        return there > 0;
    }

  private:
    static constexpr uint64_t ROOM = 128;
    const uint8_t* rows_[ROOM];
    uint64_t first_ = 0, end_ = 0;
};
