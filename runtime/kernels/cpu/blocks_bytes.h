// Weights as unsigned bytes, for products of four bytes at a time: included by blocks_vnni.h and
// blocks_avxvnni.h.

template <class F>
constexpr int32_t offset_of() {
    if constexpr (F::IS_CODED) return F::BIAS;
    return F::HAS_NIBBLES ? 8 : 128;
}

template <class F>
constexpr int32_t OFFSET = offset_of<F>();

template <class F>
constexpr int TILE_WEIGHTS = 8;

template <class F>
inline void tile_weights(const Ints* quarter, Ints* w) {
    if constexpr (F::IS_CODED) return F::bytes_of_lanes(quarter, w);
    for (int v = 0; v < 8; ++v) {
        if constexpr (F::HAS_NIBBLES)
            w[v] = v < 4 ? quarter[v] & 0x0f0f0f0f : quarter[v - 4] >> 4 & 0x0f0f0f0f;
        else
            w[v] = quarter[v] ^ static_cast<int32_t>(0x80808080);
    }
}

template <class F>
inline void byte_weights(const Ints* bytes, Ints* w) {
    for (int v = 0; v < TILE_WEIGHTS<F>; ++v) w[v] = bytes[v];
}
