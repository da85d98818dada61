// Scattered rows that will be read soon, to be prefetched while others are read.
#pragma once
#include <cstdint>

// Rows in the order in which they will be read. A kernel that reads a few rows takes as many from here, and
// as many again if they are there, and prefetches them line by line, a line of each in turn: rows of 2 KiB
// that are read as four streams arrive 1.4 times as fast on a Zen 5 as one after the other
// (docs/log/kernels.md). Taking up to two rows for each that is read keeps the prefetched rows
// ahead, although sums of q8_0 and q4_0 rows take only four for each group.
class PrefetchQueue {
  public:
    void push(const uint8_t* row, int64_t bytes) { rows_[end_++ % ROOM] = {row, bytes}; }

    // Takes the next `count` rows, to be prefetched by the caller; false if there are too few.
    // Always inlined, because a shared copy could contain the instructions of another level.
    __attribute__((always_inline)) inline bool take(const uint8_t** next, int64_t count) {
        if (end_ - first_ < static_cast<uint64_t>(count)) return false;
        for (int64_t r = 0; r < count; ++r) next[r] = rows_[first_++ % ROOM].row;
        return true;
    }

    // Prefetches and removes all rows.
    void prefetch_all() {
        for (; first_ != end_; ++first_) {
            const Row& row = rows_[first_ % ROOM];
            for (int64_t at = 0; at < row.bytes; at += 64) __builtin_prefetch(row.row + at);
        }
    }

  private:
    // More rows than OneToken ever has in a queue. If one were overwritten, it would only be read
    // without prefetching.
    static constexpr uint64_t ROOM = 128;
    struct Row {
        const uint8_t* row;
        int64_t bytes;
    };
    Row rows_[ROOM];
    uint64_t first_ = 0, end_ = 0;
};
