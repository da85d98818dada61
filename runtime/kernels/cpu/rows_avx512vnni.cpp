// rows_avx512.cpp with -mavx512vnni: products of q8_0 and q4_0 use blocks_vnni.h, and other sums of integer
// products take one instruction instead of two or three.
#include "rows_avx512.cpp"
