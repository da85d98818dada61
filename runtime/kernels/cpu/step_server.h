// Serves the hand-overs of a GPU's step: the thread that waits for the step runs the CPU's parts.
//
// A hand-over is a function and two flags in pinned memory, which the GPU's stream writes and awaits.
// Flags are 0 before the step. The stream sets `ready` to 1 once everything before it has run, and
// later waits until `done` is at least 1.
#pragma once
#include <stdint.h>

struct HsHandover {
    void (*function)(void* argument);
    void* argument;
    uint32_t *ready, *done;  // each in a cache line of its own
};

// Asks the device how far its stream is: 0 if all its work has ended, 600 (cudaErrorNotReady) if not,
// else the error with which it failed. It has the signature of cudaStreamQuery.
using HsQuery = int(void* stream);

struct HsServing {
    HsQuery* query;
    void* stream;
    int64_t query_us;    // pause between two queries while a flag is awaited; 0: at every look
    int64_t timeout_us;  // the longest wait for a flag
};

extern "C" {
// Runs the functions of `count` hand-overs in order, each once its `ready` is set, and sets their
// `done`. Returns how many it has run: fewer than `count` if a flag does not come in time, or never
// will because the stream has ended or failed; *status is then 600 or the query's last result. All
// `done` are set in any case, so the stream cannot wait for ever.
int64_t hs_serve(const HsHandover* handover, int64_t count, const HsServing* serving, int32_t* status);
}
