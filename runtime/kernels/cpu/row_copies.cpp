#include "row_copies.h"

#include <cstring>

extern "C" __attribute__((visibility("default"))) void spark_copy_rows(void* data) {
    const SparkCopies& copies = *static_cast<const SparkCopies*>(data);
    for (int64_t i = 0; i < copies.count; ++i) {
        const SparkCopy& copy = copies.copy[i];
        std::memcpy(copy.to, copy.from, copy.num_bytes);
    }
}
