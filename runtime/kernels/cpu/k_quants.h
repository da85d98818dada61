// Included inside the anonymous namespace of each rows_<level>.cpp, before the level's K-quants.

// Makes the compiler store the numbers, so that it later broadcasts them from memory: such a
// broadcast is part of the load, one from a register uses the shuffle port.
template <class T>
inline void keep_in_memory(T& numbers) {
    asm("" : "+m"(numbers));
}

// Packed x of eight blocks of 32 values, as for q8_0 (PackedBlocks in blocks_template.h).
struct SuperX {
    const uint8_t* values;  // units are `stride` bytes apart
    int64_t stride;
    const float* scale;              // [8]
    const int32_t *sum, *first_sum;  // [8] of each block's values, and of its first 16
};

// A pair of parts that share bytes: the low nibbles are the first part, the high ones the second. A
// block has four pairs.
struct Parts {
    int first, second;
};

// The factor of each part (q6_K: of each half of a part), and the offset subtracted from the part's
// values (not used for q6_K).
struct Factors {
    float factor[16], minimum[8];
};
