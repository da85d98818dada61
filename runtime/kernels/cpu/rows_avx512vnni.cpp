// The same source, with -mavx512vnni: one instruction instead of two where q4_0 multiplies and adds.
#include "rows_avx512.cpp"
