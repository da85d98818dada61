// rows_avx512.cpp with -mavx512vnni -mavx512bf16 -mamx-tile -mamx-int8: products of small blocks with many
// vectors use blocks_amx.h, and bf16 rows bf16_pairs.h.
#define LEVEL_AMX
#ifdef __AVX512BF16__  // not in tests that emulate tiles
#define HAS_BF16_PAIRS
#endif
#include "rows_avx512.cpp"
