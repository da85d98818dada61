// Included inside the anonymous namespace of each rows_<level>.cpp, before the level's K-quants.

// A broadcast from memory comes with the load, one out of a register takes the port of all
// shuffles: so the compiler is not to find out that it has the numbers in registers (10 to 25 % of
// dot_rows in cache with AVX-512).
template <class T>
inline void keep_in_memory(T& numbers) {
    asm("" : "+m"(numbers));
}
