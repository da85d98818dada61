// Copies many rows in one call, or in a background thread.
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

struct SparkCopier;

extern "C" {
// Copies in order, on the caller's thread; reads and writes each row once. `data` is a SparkCopies*, as
// in the signature of a CUDA stream's host function.
void spark_copy_rows(void* data);
// Null if out of memory. If no thread can be started, spark_copier_finish makes the copies.
SparkCopier* spark_copier_new();
// Starts copies. `copies` must stay valid until they are finished, which takes at least `seconds`.
void spark_copier_start(SparkCopier* copier, const SparkCopies* copies, double seconds);
// Waits for the copies, and until `seconds` have passed since their start. If the thread has not begun
// them, the caller makes them instead of waiting for it. May be called again.
void spark_copier_finish(SparkCopier* copier);
void spark_copier_free(SparkCopier* copier);
}
