// Sums of grouped rows for several vectors with AVX2 and AVX-512, bit-identical to grouped_template.h, which includes
// this.
//
// Lanes of factors are vectors (AVX-512: times some blocks), so the largest factor is found without a reduction over
// lanes. The parts of a place that belong to the same columns share a sum.

// Factors of a block's rows.
struct LaneFactors {
    alignas(64) int32_t even[PLACES][LANES], odd[PLACES][LANES];
    alignas(64) float scale[LANES];
};

// The factors of coefficients times scales exact(r) of each row, as fill() computes them.
template <class Exact>
inline void fill_places(const Exact& exact, LaneFactors& to) {
    const FactorScale by = factor_scale(largest_bits(SUM_ROWS, exact));
    auto pair = [&](int64_t r, int32_t* at) {
        const Ints both = factor_pair(exact(r), exact(r + 2 * PLACES), by.up);
        __builtin_memcpy(at, &both, sizeof both);
    };
    for (int64_t p = 0; p < PLACES; ++p) pair(p, to.even[p]), pair(p + PLACES, to.odd[p]);
    store_floats(to.scale, by.scale);
}

// A place's quants as 16-bit values, in vectors of columns: of[0] those of rows with even factors, of[1] the others.
typedef Ints PlaceWords[2][VECTORS];

template <class F>
inline void split_place(const uint8_t* quants, PlaceWords& of) {
    constexpr int HALF = F::PARTS / 2;
    for (int u = 0; u < F::WORDS; ++u) {
        Ints part[F::PARTS];
        split_signed(F(), load_in_order(quants + 4 * LANES * u), part);
        for (int p = 0; p < F::PARTS; ++p) of[p / HALF][p % HALF * F::WORDS + u] = part[p];
    }
}

#ifdef LEVEL_AVX512
#include "grouped_avx512.h"
#else
#include "grouped_avx2.h"
#endif
