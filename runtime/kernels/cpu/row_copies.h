// Copies many rows in one call.
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

extern "C" {
// Copies in order, on the caller's thread; reads and writes each row once. `data` is a HsCopies*, as
// in the signature of a CUDA stream's host function.
void hs_copy_rows(void* data);
}
