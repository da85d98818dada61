// Copies of rows between memories, many in one call.
#pragma once
#include <stdint.h>

struct SparkCopy {
    const uint8_t* from;
    uint8_t* to;
    int64_t num_bytes;
};

struct SparkCopies {
    const SparkCopy* copy;  // [count]
    int64_t count;
};

extern "C" {
// Copies in order, on the caller's thread; reads and writes each row once. `data` is a SparkCopies*: this
// is the signature of a CUDA stream's host function.
void spark_copy_rows(void* data);
}
