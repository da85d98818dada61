// rows_avx512.cpp with -mavx512vnni: products of small blocks use blocks_vnni.h, those of K-quants
// k_products_512.h, and other sums of integer products take one instruction instead of two or
// three.
#include "rows_avx512.cpp"
