// The functions called from Python: checks, and the choice of an instruction set.
#include <cstring>

#include "encode.h"

namespace {

const Encoders& encoders_of(int32_t level) {
#ifdef __x86_64__
    if (level == LEVEL_AVX512) return encoders_avx512;
    if (level == LEVEL_AVX2) return encoders_avx2;
#endif
    (void)level;
    return encoders_generic;
}

bool is_valid(const Job& job, const Encoder& encoder) {
    if (!encoder.encode || job.num_rows < 0 || job.num_columns < 0) return false;
    if (job.num_columns % encoder.block_values != 0) return false;
    return job.column_stride == 1 || (job.row_stride == 1 && !job.index && !job.importance);
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int32_t hs_encode_best_level() {
#ifdef __x86_64__
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("f16c")) return LEVEL_GENERIC;
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return has_avx512 ? LEVEL_AVX512 : LEVEL_AVX2;
#else
    return LEVEL_GENERIC;
#endif
}

EXPORT int32_t hs_encode(int32_t level, int32_t source_kind, const uint8_t* source, int64_t row_stride,
                         int64_t column_stride, const int64_t* index, int64_t num_rows,
                         int64_t num_columns, int32_t kind, float limit, const float* importance,
                         uint8_t* target, float* largest) {
    if (level < 0 || level > hs_encode_best_level()) return STATUS_BAD_ARGUMENT;
    if (source_kind < 0 || source_kind >= NUM_SOURCE_KINDS || kind < 0 || kind >= NUM_KINDS)
        return STATUS_BAD_ARGUMENT;
    Job job = {source, row_stride, column_stride, index, num_rows, num_columns, 0, target, importance};
    std::memcpy(&job.limit, &limit, 4);
    const Encoder& encoder = encoders_of(level).of[source_kind][kind];
    if (!is_valid(job, encoder)) return STATUS_BAD_ARGUMENT;
    const uint32_t bits = encoder.encode(job);
    std::memcpy(largest, &bits, 4);
    return STATUS_OK;
}
