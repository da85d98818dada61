// Integer products of pairs of 16-bit values, for blocks_template.h, at the levels generic, AVX2
// and AVX-512. The including file defines FEW as LANES / 4; products_q8(quants, x) and
// products_q4(quants, x), which give LANES partial sums of one row's block; and reduce(s), whose
// lane 4 * r + i is the sum of the lanes of s[r][i].

template <class F>
constexpr int64_t unit() {
    return 1;
}

template <class F>
constexpr int32_t offset_of() {
    if constexpr (F::IS_CODED) return F::BIAS;
    return F::HAS_NIBBLES ? 8 : 0;
}

template <class F>
constexpr int32_t OFFSET = offset_of<F>();

template <class F>
inline void quantise_unit(const int16_t* value, uint8_t* to) {
    __builtin_memcpy(to, value, BLOCK * sizeof(int16_t));
}

template <class F>
inline Ints products_of(const uint8_t* block, const uint8_t* x) {
    const int16_t* values = reinterpret_cast<const int16_t*>(x);
    if constexpr (F::HAS_NIBBLES)
        return products_q4(block, values);
    else
        return products_q8(block, values);
}

#include "blocks_few.h"

// Number of vectors that hold an unpacked block of LANES rows, two 16-bit values per lane.
template <class F>
constexpr int TILE_WEIGHTS = 16;

#ifndef HAS_PANELS  // level avx2 has its own
// Four bytes of each lane as four words: two in w[0], two in w[1].
inline void signed_words(Ints bytes, Ints* w) {
    w[0] = (bytes << 24 >> 24 & 0xffff) | (bytes << 16 >> 24 << 16);
    w[1] = (bytes << 8 >> 24 & 0xffff) | (bytes >> 24 << 16);
}

inline void unsigned_words(Ints bytes, Ints* w) {
    w[0] = (bytes & 0xff) | (bytes << 8 & 0xff0000);
    w[1] = (bytes >> 16 & 0xff) | (bytes >> 8 & 0xff0000);
}
#endif

template <class F>
inline void byte_weights(const Ints* bytes, Ints* w) {
    for (int v = 0; v < 8; ++v) unsigned_words(bytes[v], w + 2 * v);
}

template <class F>
inline void tile_weights(const Ints* quarter, Ints* w) {
    if constexpr (F::IS_CODED) {
        Ints bytes[8];
        F::bytes_of_lanes(quarter, bytes);
        return byte_weights<F>(bytes, w);
    }
    for (int v = 0; v < 8; ++v) {
        if constexpr (F::HAS_NIBBLES)
            unsigned_words(v < 4 ? quarter[v] & 0x0f0f0f0f : quarter[v - 4] >> 4 & 0x0f0f0f0f,
                           w + 2 * v);
        else
            signed_words(quarter[v], w + 2 * v);
    }
}

constexpr int TILES_AT_ONCE = 1;

template <class F, int FIRST = 0, int END = 8>
inline Ints tile_products(const Ints* w, const uint8_t* x, int64_t, Ints start) {
    Ints even = start, odd = {};
    for (int v = 2 * FIRST; v < 2 * END; v += 2) {
        int32_t pair[2];
        __builtin_memcpy(pair, x + 4 * v, 8);
        even = add_pairs(even, w[v], Ints{} + pair[0]);
        odd = add_pairs(odd, w[v + 1], Ints{} + pair[1]);
    }
    return even + odd;
}
