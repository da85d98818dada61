// rows_avx512.cpp with -mavx512vnni -mamx-tile -mamx-int8: products of q8_0 and q4_0 with many vectors use
// blocks_amx.h.
#define LEVEL_AMX
#include "rows_avx512.cpp"
