// rows_avx512.cpp with -mavx512vnni -mavx512bf16: bf16 rows use bf16_pairs.h.
#define LEVEL_AVX512BF16
#define HAS_BF16_PAIRS
#include "rows_avx512.cpp"
