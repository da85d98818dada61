// Included inside the anonymous namespace of each rows_<level>.cpp, before the level's K-quants.

// A broadcast from memory comes with the load; one from a register takes the port of all shuffles. So
// the compiler must not see that the numbers are in registers (10 to 25 % of dot_rows in cache with
// AVX-512).
template <class T>
inline void keep_in_memory(T& numbers) {
    asm("" : "+m"(numbers));
}
