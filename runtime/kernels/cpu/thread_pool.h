#pragma once
#include <algorithm>
#include <cstdint>

// How long a thread that waits keeps its processor; afterwards it lets other threads run in between.
constexpr int PAUSE_TIME = 50;  // microseconds

// A pause of a thread that looks again and again whether something has happened.
inline void spin_once() {
#ifdef __x86_64__
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

using RangeBody = void(const void* context, int64_t begin, int64_t end);

// Calls body(context, begin, end) for pieces of [0, n) on all threads and waits for them. The length of
// every piece but the last is a multiple of `grain`. Pieces get shorter; the shortest are about as long
// as if each thread had `pieces_per_thread` equal ones. The body must not throw, and its results must not
// depend on where pieces are cut.
void parallel_for(int64_t n, int64_t grain, int64_t pieces_per_thread, RangeBody* body,
                  const void* context);

template <class Body>
void parallel_for(int64_t n, int64_t grain, int64_t pieces_per_thread, const Body& body) {
    auto call = [](const void* context, int64_t begin, int64_t end) {
        (*static_cast<const Body*>(context))(begin, end);
    };
    parallel_for(n, grain, pieces_per_thread, call, &body);
}

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

// The number of threads that work on a job, including the caller's.
int num_threads();

// Until set_threads is called; starts no thread. Threads that outnumber the processors do not spin.
void set_default_threads(int num_threads, int num_processors);

// False if the operating system refused to start that many; the pool then has those that it started.
bool set_threads(int num_threads, int num_processors);

// How long an idle thread waits for a job before it sleeps.
void set_spin_time(int microseconds);
