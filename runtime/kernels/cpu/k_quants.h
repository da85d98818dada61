// Included inside the anonymous namespace of each rows_<level>.cpp, before the level's K-quants.

// A broadcast from memory is part of the load; one from a register uses the shuffle port. So the
// compiler must not know that the numbers are in registers (10 to 25 % of dot_rows in cache with
// AVX-512).
template <class T>
inline void keep_in_memory(T& numbers) {
    asm("" : "+m"(numbers));
}

// Packed x of eight blocks of 32 values, as for q8_0 (PackedBlocks in blocks_template.h).
struct SuperX {
    const uint8_t* values;  // units are `stride` bytes apart
    int64_t stride;
    const float* scale;                 // [8]
    const int32_t *sum, *first_sum;     // [8] of each block, and of its first 16 values
};

// The two parts that share bytes, for each of the four pairs of a block.
struct Parts {
    int first, second;
};

// The factor of each part (q6_K: of each half of a part), and the offset subtracted from its
// values.
struct Factors {
    float factor[16], minimum[8];
};
