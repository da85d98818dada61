// Copies of rows between memories, many in one call, and a thread that does it beside the caller.
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
// Copies in order, on the caller's thread; reads and writes each row once. `data` is a SparkCopies*: this
// is the signature of a CUDA stream's host function.
void spark_copy_rows(void* data);
// Null if there is no memory. Without a thread, copies are made when they are waited for.
SparkCopier* spark_copier_new();
// Starts copies, which must stay until they are finished; at least `seconds` pass until then.
void spark_copier_start(SparkCopier* copier, const SparkCopies* copies, double seconds);
// Waits for the copies. If the thread has not begun them, the caller makes them: on a busy machine a late
// thread costs nothing. May be called again.
void spark_copier_finish(SparkCopier* copier);
void spark_copier_free(SparkCopier* copier);
}
