// rows_avx2.cpp with -mavxvnni: AVX-512 VNNI's instructions on vectors of 32 bytes, as processors
// without AVX-512 have them.
#include "rows_avx2.cpp"
