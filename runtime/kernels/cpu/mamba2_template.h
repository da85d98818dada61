// One head of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060) over consecutive rows of a sequence. Included by
// rows_template.h after delta_template.h, from which it has the convolution, and blocks of columns.
//
// The columns of a state S [N, P] are independent of each other:
//   S[n] = decay S[n] + b[n] (step x),  y = the sum over n of c[n] S[n], in order,  y = (y + skip x) silu(z)
// A row reads and writes each value once, and MAMBA2_ROWS rows one after another while it is in a register. Every value
// is computed in the same order whatever the number of rows.

// Rows that change a value while it is in a register: their columns of x and y are in registers, too.
#ifdef LEVEL_AVX512
constexpr int MAMBA2_ROWS = 4;
#else
constexpr int MAMBA2_ROWS = 2;
#endif

// Rows of a head, at most DELTA_ROWS, after the convolution.
struct Mamba2Chunk {
    const float *b, *c;         // [rows, N]
    const float* x;             // [rows, padded_delta(P)]
    float* y;                   // the same, written
    const float *step, *decay;  // [rows]
    int64_t rows, N, P;

    int64_t width() const { return padded_delta(P); }
};

// R rows from t on, in V vectors of columns from m on, through the state, whose rows are `stride` apart (0: all are one)
// and which `store` takes.
template <int V, int R, class Store>
inline void scan_rows(const Mamba2Chunk& k, int64_t t, int64_t m, const float* state, int64_t stride,
                      const Store& store) {
    Floats x[R][V], y[R][V];
    const int64_t width = k.width();
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v)
            x[r][v] = broadcast(k.step[t + r]) * load_floats(k.x + (t + r) * width + m + v * LANES);
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) y[r][v] = zero();
    const float *b = k.b + t * k.N, *c = k.c + t * k.N;
    for (int64_t n = 0; n < k.N; ++n)
        for (int v = 0; v < V; ++v) {
            Floats now = load_floats(state + n * stride + v * LANES);
            for (int r = 0; r < R; ++r) {
                now = multiply_add(broadcast(b[r * k.N + n]), x[r][v], broadcast(k.decay[t + r]) * now);
                y[r][v] = multiply_add(broadcast(c[r * k.N + n]), now, y[r][v]);
            }
            store(n, v, now);
        }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) store_floats(k.y + (t + r) * width + m + v * LANES, y[r][v]);
}

// The head's state through the rows of a chunk.
inline void scan_columns(const Mamba2Head& d, const Mamba2Chunk& k, float* blocks, bool is_first,
                         bool is_last) {
    const int64_t vectors = (k.P + LANES - 1) / LANES;
    if (d.T == 1 && k.P % LANES == 0) {  // from slot to slot
        alignas(64) static constexpr float nothing[DELTA_VECTORS_OF_ROW * LANES] = {};
        const SlotStore slot(d.next_state, k.P);
        in_steps<DELTA_VECTORS_OF_ROW, 4, 2, 1>(0, vectors, [&](auto count, int64_t v) {
            const int64_t m = v * LANES, stride = d.state ? k.P : 0;
            scan_rows<count, 1>(k, 0, m, d.state ? d.state + m : nothing, stride,
                                [&](int64_t n, int v, Floats now) {
                if (d.next_state) slot.store(d.next_state + n * k.P + m + v * LANES, now);
            });
        });
        return;
    }
    DeltaChunk columns = {};  // as wide
    columns.N = k.N, columns.M = k.P;
    in_steps<DELTA_VECTORS, 1>(0, vectors, [&](auto count, int64_t v) {
        float* block = blocks + v * LANES * k.N;
        auto in_place = [=](int64_t n, int i, Floats now) {
            store_floats(block + (n * count + i) * LANES, now);
        };
        if (is_first) load_block<count>(d.state, columns, v * LANES, block);
        in_steps<MAMBA2_ROWS, 1>(0, k.rows, [&](auto rows, int64_t t) {
            scan_rows<count, rows>(k, t, v * LANES, block, count * LANES, in_place);
        });
        if (is_last && d.next_state) store_block<count>(block, columns, v * LANES, d.next_state);
    });
}

// out = (y + skip x) silu(z)
inline void skip_and_gate(const float* y, const float* x, float skip, const float* z, int64_t P,
                          float* out) {
    for (int64_t i = 0; i < P; i += LANES) {
        const Floats gate = load_some_floats(z + i, P - i);
        const Floats sum = multiply_add(broadcast(skip), load_floats(x + i), load_floats(y + i));
        store_some_floats(out + i, sum * (gate * sigmoid_of(gate)), P - i);
    }
}

void mamba2_head(const Mamba2Head& d) {
    const int64_t width = padded_delta(d.P), end = d.begin + d.T, h = d.head, g = d.group;
    const int64_t of_b = d.H * d.P + g * d.N, of_c = of_b + d.G * d.N;  // first channels
    float *b = d.scratch, *c = b + DELTA_ROWS * d.N, *x = c + DELTA_ROWS * d.N,
          *y = x + DELTA_ROWS * width, *blocks = y + DELTA_ROWS * width;
    alignas(64) float step[DELTA_ROWS], decay[DELTA_ROWS];
    for (int64_t t0 = d.begin, rows; t0 < end; t0 += rows) {
        rows = end - t0 < DELTA_ROWS ? end - t0 : DELTA_ROWS;
        for (int64_t r = 0; r < rows; ++r) {
            convolve(d, t0 + r, of_b, d.N, false, b + r * d.N);
            convolve(d, t0 + r, of_c, d.N, false, c + r * d.N);
            convolve(d, t0 + r, h * d.P, d.P, true, x + r * width);
            step[r] = d.row(t0 + r)[d.C + h] + d.step_bias[h];
        }
        map(step, rows, [](Floats s) { return softplus_of(s); });
        for (int64_t r = 0; r < rows; ++r) decay[r] = d.decay[h] * step[r];
        map(decay, rows, [](Floats a) { return exp_of(a); });
        scan_columns(d, {b, c, x, y, step, decay, rows, d.N, d.P}, blocks, t0 == d.begin,
                     t0 + rows == end);
        for (int64_t r = d.is_again(t0) ? d.num_again - t0 : 0; r < rows; ++r)
            skip_and_gate(y + r * width, x + r * width, d.skip[h], d.row(t0 + r) - d.H * d.P + h * d.P,
                          d.P, d.y + (t0 + r - d.num_again) * d.y_stride);
    }
    keep_inputs(d, h * d.P, d.P);
    if (d.stores_group) keep_inputs(d, of_b, d.N), keep_inputs(d, of_c, d.N);
#if defined(LEVEL_AVX512) || defined(LEVEL_AVX2)
    _mm_sfence();  // after SlotStore
#endif
}
