// Copies many rows in one call, or in a background thread.
#pragma once
#include <stdint.h>

struct HsCopy {
    const uint8_t* from;
    uint8_t* to;
    int64_t num_bytes;
};

struct HsCopies {
    const HsCopy* copy;  // [count]
    int64_t count;
};

struct HsCopier;

extern "C" {
// Copies in order, on the caller's thread; reads and writes each row once. `data` is a HsCopies*, as
// in the signature of a CUDA stream's host function.
void hs_copy_rows(void* data);
// Null if out of memory. If no thread can be started, hs_copier_finish makes the copies.
HsCopier* hs_copier_new();
// Starts copies. `copies` must stay valid until they are finished, which takes at least `seconds`.
void hs_copier_start(HsCopier* copier, const HsCopies* copies, double seconds);
// Waits for the copies, and until `seconds` have passed since their start. If the thread has not begun
// them, the caller makes them instead of waiting for it. May be called again.
void hs_copier_finish(HsCopier* copier);
void hs_copier_free(HsCopier* copier);
}
