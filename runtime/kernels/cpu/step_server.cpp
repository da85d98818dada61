#include "step_server.h"

#include <chrono>
#include <thread>

#include "kernels.h"
#include "thread_pool.h"

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

constexpr int NOT_READY = 600;  // cudaErrorNotReady
constexpr int LOOKS = 64;       // between two readings of the clock

bool is_set(const uint32_t* flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE) != 0; }

void set(uint32_t* flag) { __atomic_store_n(flag, 1, __ATOMIC_RELEASE); }

// Waits until the flag is set. Returns 0 if it is, NOT_READY after the timeout, -1 if the stream has
// ended without setting it, and the stream's error if it failed.
int wait_for(const uint32_t* flag, const HsServing& serving) {
    if (is_set(flag)) return 0;
    const auto start = Clock::now(), end = start + microseconds(serving.timeout_us);
    auto next = start + microseconds(serving.query_us);
    for (;;) {
        for (int i = 0; i < LOOKS && serving.query_us; ++i) {
            if (is_set(flag)) return 0;
            spin_once();
        }
        const auto now = Clock::now();
        if (now >= next) {
            const int found = serving.query(serving.stream);
            if (is_set(flag)) return 0;
            if (found != NOT_READY) return found ? found : -1;
            next = now + microseconds(serving.query_us);
        }
        if (now >= end) return NOT_READY;
        // The thread that is waited for may be the driver's, on this processor.
        if (now - start > microseconds(PAUSE_TIME)) std::this_thread::yield();
    }
}

}  // namespace

EXPORT int64_t hs_serve(const HsHandover* handover, int64_t count, const HsServing* serving,
                        int32_t* status) {
    int64_t served = 0;
    for (; served < count; ++served) {
        const HsHandover& next = handover[served];
        *status = wait_for(next.ready, *serving);
        if (*status) break;
        next.function(next.argument);
        set(next.done);
    }
    for (int64_t left = served; left < count; ++left) set(handover[left].done);
    return served;
}
