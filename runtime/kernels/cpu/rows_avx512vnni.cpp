// The same text, with -mavx512vnni: one instruction for two where q4_0 multiplies and adds.
#include "rows_avx512.cpp"
