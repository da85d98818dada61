// The same source, with -mavx512vnni -mamx-tile -mamx-int8: products with many vectors use blocks_amx.h.
#define LEVEL_AMX
#include "rows_avx512.cpp"
