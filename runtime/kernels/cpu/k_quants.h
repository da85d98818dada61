// Included inside the anonymous namespace of each rows_<level>.cpp, before the level's K-quants.

// A broadcast from memory is part of the load; one from a register uses the shuffle port. So the
// compiler must not know that the numbers are in registers (10 to 25 % of dot_rows in cache with
// AVX-512).
template <class T>
inline void keep_in_memory(T& numbers) {
    asm("" : "+m"(numbers));
}
