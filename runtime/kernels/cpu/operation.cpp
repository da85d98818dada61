#include "operation.h"

#include <vector>

namespace {

// Made by the first operation that registers itself, in any order of files.
std::vector<const Operation*>& registered() {
    static std::vector<const Operation*> all;
    return all;
}

}  // namespace

Operation::Operation(const char* kind, int num_read, int num_written)
    : kind(kind), num_read(num_read), num_written(num_written) {
    registered().push_back(this);
}

const Operation* registered_operation(int32_t number) {
    const auto& all = registered();
    return static_cast<size_t>(number) < all.size() ? all[number] : nullptr;
}

EXPORT int32_t hs_operation_kind(const char* kind) {
    for (size_t i = 0; i < registered().size(); ++i)
        if (!std::strcmp(registered()[i]->kind, kind)) return NUM_OP_KINDS + static_cast<int32_t>(i);
    return -1;
}

void multiply(const HsMatrix* matrix, int count, Operand& x, int64_t T, float* y, int64_t stride) {
    Input input[4];
    int64_t first[5] = {0}, bytes = 0;
    for (int m = 0; m < count; ++m) {
        input[m] = x.as(matrix[m].kind, T);
        first[m + 1] = first[m] + matrix[m].num_rows;
        bytes += num_bytes(matrix[m]);
    }
    split(bytes * T, first[count], T == 1 ? TILE_ROWS : 32, 16, [&](int64_t begin, int64_t end) {
        for (int m = 0; m < count; ++m) {
            const HsMatrix& w = matrix[m];
            const int64_t a0 = std::max<int64_t>(begin - first[m], 0);
            const int64_t a1 = std::min(end - first[m], w.num_rows);
            if (a0 >= a1) continue;
            float* out = y + first[m];
            Rows rows = rows_of(w);
            if (m + 1 < count && a1 == w.num_rows) rows.after = matrix[m + 1].data;
            kernels().dot_rows[w.kind](rows, input[m], out, stride, a0, a1);
            for (int64_t t = 0; w.bias && t < T; ++t)
                for (int64_t a = a0; a < a1; ++a) out[t * stride + a] += w.bias[a];
        }
    });
}
