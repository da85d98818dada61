#include "row_copies.h"

#include <cstring>

#include "kernels.h"

EXPORT void hs_copy_rows(void* data) {
    const HsCopies& copies = *static_cast<const HsCopies*>(data);
    for (int64_t i = 0; i < copies.count; ++i) {
        const HsCopy& one = copies.copy[i];
        std::memcpy(one.to, one.from, one.num_bytes);
    }
}
