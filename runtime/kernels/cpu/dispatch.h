// The interface of dispatch.cpp for the other sources of this library.
#pragma once
#include <algorithm>

#include "kernels.h"
#include "thread_pool.h"

// The kernels of the level in use.
const Kernels& kernels();

// Below this many bytes of weights it does not pay to wake a thread: reading 64 KiB takes about four
// microseconds.
constexpr int64_t INLINE_BYTES = 64 * 1024;

// Calls body(begin, end) over pieces of [0, n), on all threads if the job reads enough bytes; small jobs
// get fewer pieces.
template <class Body>
void split(int64_t bytes, int64_t n, int64_t grain, int64_t pieces_per_thread, const Body& body) {
    if (n <= 0) return;
    if (bytes < INLINE_BYTES) return body(0, n);
    parallel_for(n, grain, std::min(pieces_per_thread, 2 * bytes / INLINE_BYTES), body);
}
