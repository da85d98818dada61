// Experts that arrive from a drive while others are computed. Direct reads from a few threads go to buffers,
// in the file's form; each expert is up to three contiguous reads.
//
// Letters: E experts of a layer.
#pragma once
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "step.h"

// Direct reads begin and end at multiples of this.
constexpr int64_t READ_ALIGNMENT = 4096;

inline int64_t read_room(int64_t bytes) {
    return bytes ? (bytes / READ_ALIGNMENT + 2) * READ_ALIGNMENT : 0;
}
inline int64_t stack_bytes(const HsStack& s) { return s.matrix.num_rows * s.matrix.stride; }

// The threads of a drive, their queue, and which buffers have been filled.
class DriveReader {
  public:
    explicit DriveReader(HsDrive& drive);
    ~DriveReader();

    // Begins to read expert e of a layer to a buffer that is free.
    void request(const HsArriving& a, int32_t e, int32_t buffer);
    // The buffers that have been filled, or could not be, since the last call; if `waits`, at least one.
    void take(bool waits, std::vector<int32_t>& filled);

    std::vector<int32_t> free;  // buffers, of the caller alone

  private:
    struct Request {
        int64_t offset, bytes;
        uint8_t* to;
        int32_t file, buffer;
    };

    void serve(unsigned seed);
    int32_t read(const Request& request) const;

    HsDrive& drive_;
    std::mutex mutex_;
    std::condition_variable requested_, filled_now_;
    std::deque<Request> queue_;
    std::vector<int32_t> left_, filled_;  // reads of a buffer under way; what take() returns
    std::vector<std::thread> threads_;
    int64_t num_pending_ = 0, began_ns_ = 0;
    bool is_ending_ = false;
};

// The reads of one layer in one step.
class Arrivals {
  public:
    explicit Arrivals(const HsArriving& a)
        : a_(a), drive_(*a.drive), reader_(*static_cast<DriveReader*>(a.drive->reader)) {}

    bool has_room() const { return !reader_.free.empty(); }

    // Begins to read an expert; returns its buffer.
    int32_t request(int32_t e) {
        const int32_t buffer = reader_.free.back();
        reader_.free.pop_back();
        reader_.request(a_, e, buffer);
        return buffer;
    }

    const std::vector<int32_t>& take(bool waits) {
        reader_.take(waits, filled_);
        return filled_;
    }

    void release(int32_t buffer) { reader_.free.push_back(buffer); }
    bool has_failed() const { return drive_.error != 0; }

    // The expert's matrices in a buffer, in the file's form.
    static void place(const HsArriving& a, int32_t e, int32_t buffer, HsBlock& block) {
        const uint8_t* at = a.drive->buffer + buffer * a.drive->buffer_bytes;
        const HsStack* stacks[] = {&a.gate, &a.up, &a.down};
        HsMatrix* matrices[] = {&block.gate, &block.up, &block.down};
        for (int i = 0; i < 3; ++i) {
            const HsStack& s = *stacks[i];
            if (!stack_bytes(s)) continue;
            const float* bias = matrices[i]->bias;
            *matrices[i] = s.matrix;
            matrices[i]->data = at + (s.offset + e * s.stride) % READ_ALIGNMENT;
            matrices[i]->bias = bias;
            at += read_room(stack_bytes(s));
        }
    }

  private:
    const HsArriving& a_;
    HsDrive& drive_;
    DriveReader& reader_;
    std::vector<int32_t> filled_;
};
