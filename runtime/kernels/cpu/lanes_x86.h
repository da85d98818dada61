// For sums of rows of small blocks for several vectors, with AVX2 and AVX-512: factors whose lanes are vectors, and
// quants split into signed values, so that sums need no offsets. Included by rows_template.h.

// LANES numbers for each row of a group.
typedef float LaneFloats[SUM_ROWS][LANES];

// Transposes the coefficients of vectors t0 .. t1-1 for k rows, LANES vectors at a time; 0 for missing vectors.
// May read past the k rows: the coefficients of every vector are padded to whole groups.
inline void gather_coefficients(const ManySums& s, int64_t t0, int64_t t1, int64_t k, LaneFloats* to) {
    alignas(64) static constexpr float nothing[SUM_ROWS] = {};
    for (int64_t t = t0; t < t1; t += LANES, ++to)
        for (int64_t j = 0; j < k; j += 4) {
            const uint8_t* four[LANES];
            for (int64_t i = 0; i < LANES; ++i)
                four[i] = reinterpret_cast<const uint8_t*>(
                    (t + i < t1 ? s.c + (t + i) * s.c_stride : nothing) + j);
            transpose_16(four, reinterpret_cast<Ints*>((*to)[j]));
        }
}

// The bits of the largest magnitude in each lane of exact(r), r < k: a row's coefficients times its scales.
template <class Exact>
inline Ints largest_bits(int64_t k, const Exact& exact) {
    Ints largest = {};
    for (int64_t r = 0; r < k; ++r)
        largest = larger(largest, reinterpret_cast<Ints>(exact(r)) & 0x7fffffff);
    return largest;
}

// The 16-bit factors of two rows.
inline Ints factor_pair(Floats first, Floats second, Floats up) {
    const Bits low = bits(to_ints(mul(first, up)));
    const Bits high = MM(slli_epi32)(bits(to_ints(mul(second, up))), 16);
#ifdef LEVEL_AVX512
    return ints(_mm512_mask_blend_epi16(0xaaaaaaaa, low, high));
#else
    return ints(_mm256_blend_epi16(low, high, 0xaa));
#endif
}

inline void split_signed(Bytes, Ints words, Ints* part) {
    part[0] = high_bytes(ints(MM(slli_epi16)(bits(words), 8)));
    part[1] = high_bytes(words);
}

inline void split_signed(Nibbles, Ints words, Ints* part) {
    for (int p = 0; p < 4; ++p)
        part[p] = ints(MM(sub_epi16)(bits(shift_words(words, 4 * p) & 0x000f000f), MM(set1_epi16)(8)));
}
