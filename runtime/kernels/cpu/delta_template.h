// One head of a gated delta net (Yang et al. 2024, arXiv 2412.06464) over consecutive rows of a sequence. Included by
// rows_template.h.
//
// The columns of a state S [N, M] are independent of each other. Rows are taken DELTA_ROWS at a time, and for these
// one block of columns after the other, which then stays in the L1 cache:
//   q, k = sums over n of q[n] S[n], k[n] S[n]     in order of n, of the state before the row
//   d    = beta (v - decay k),  o = decay q + (q . k) d
//   S[n] = decay S[n] + k[n] d                     in the same pass as the sums of the next row
// With a decay of each row n of the state, that multiplies q[n] and k[n] of the sums in place of these.
// Every value is computed in the same order whatever the number of rows, so a row's bits do not depend on how rows
// are divided into passes.

// Vectors of a block of columns. With AVX-512 and N = 128, 16 KiB of state are in L1; of a single row, which reads
// the state once from memory, blocks are as wide as registers allow.
#ifdef LEVEL_AVX512
constexpr int DELTA_VECTORS = 2, DELTA_VECTORS_OF_ROW = 8;
#else
constexpr int DELTA_VECTORS = 2, DELTA_VECTORS_OF_ROW = 4;
#endif
// The first `count` of LANES values, then zeros.
inline Floats load_some_floats(const float* p, int64_t count) {
    if (count >= LANES) return load_floats(p);
    float rest[LANES] = {};
    __builtin_memcpy(rest, p, count * sizeof(float));
    return load_floats(rest);
}

inline void store_some_floats(float* p, Floats v, int64_t count) {
    if (count >= LANES) return store_floats(p, v);
    float rest[LANES];
    store_floats(rest, v);
    __builtin_memcpy(p, rest, count * sizeof(float));
}

// log(1 + exp(x)) as max(x, 0) + 2 artanh(y / (2 + y)) with y = exp(-|x|), by the series to s^15.
inline Floats softplus_of(Floats x) {
    const Floats is_above = chosen(x > zero(), x, zero());
    const Floats y = exp_of(chosen(x > zero(), zero() - x, x));
    const Floats s = y / (broadcast(2.0f) + y), z = s * s;
    constexpr float factors[] = {1.0f / 13, 1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f};
    Floats p = broadcast(1.0f / 15);
    for (float factor : factors) p = p * z + broadcast(factor);
    return is_above + broadcast(2.0f) * s * p;
}

// Sums of two vectors over the rows of a state.
template <int V>
struct DeltaSums {
    Floats q[V], k[V];

    inline void clear() {
        for (int v = 0; v < V; ++v) q[v] = k[v] = zero();
    }
    inline void add(int v, Floats state, float q_n, float k_n) {
        q[v] = multiply_add(broadcast(q_n), state, q[v]);
        k[v] = multiply_add(broadcast(k_n), state, k[v]);
    }
};

// What a row does to V vectors of columns of the state, of which R: each row has a decay.
template <int V, bool R>
struct DeltaUpdate {
    Floats decay, delta[V];
    const float *k, *decays;  // [N]

    inline Floats apply(int v, Floats state, int64_t n) const {
        return multiply_add(broadcast(k[n]), delta[v], (R ? broadcast(decays[n]) : decay) * state);
    }
};

// Prefetches state that is read next, half as many bytes as V vectors have with every call.
template <int V>
struct StateAhead {
    const float* next;  // or null

    inline void ask() {
        if (!next) return;
        for (int i = 0; i < V * LANES / 32; ++i, next += 16) __builtin_prefetch(next);
    }
};

template <int V>
inline void sum_state(const float* state, int64_t stride, int64_t N, const float* q, const float* k,
                      DeltaSums<V>& sums, StateAhead<V> ahead = {nullptr}) {
    sums.clear();
    for (int64_t n = 0; n < N; ++n) {
        ahead.ask();
        for (int v = 0; v < V; ++v)
            sums.add(v, load_floats(state + n * stride + v * LANES), q[n], k[n]);
    }
}

// The same for the row after `update`, which it applies to the state.
template <int V, bool R>
inline void update_and_sum(float* state, int64_t N, const DeltaUpdate<V, R>& update, const float* q,
                           const float* k, DeltaSums<V>& sums) {
    sums.clear();
    for (int64_t n = 0; n < N; ++n)
        for (int v = 0; v < V; ++v) {
            float* at = state + (n * V + v) * LANES;
            const Floats now = update.apply(v, load_floats(at), n);
            store_floats(at, now);
            sums.add(v, now, q[n], k[n]);
        }
}

// Writes vectors of a slot past the caches if they are aligned: nothing reads the state again before all of the
// model's weights. Without that, every line would be read first.
struct SlotStore {
    explicit SlotStore(const float* slot, int64_t M)
        : is_past_caches(reinterpret_cast<uintptr_t>(slot) % sizeof(Floats) == 0 && M % LANES == 0) {}

    inline void store(float* p, Floats v) const {
#if defined(LEVEL_AVX512) || defined(LEVEL_AVX2)
        if (is_past_caches) return MM(stream_ps)(p, v);
#endif
        store_floats(p, v);
    }
    const bool is_past_caches;
};

// to = the state after `update`, in a slot with rows of M values
template <int V, bool R>
inline void copy_updated(const float* state, int64_t stride, int64_t N, const DeltaUpdate<V, R>& update,
                         float* to, int64_t M, StateAhead<V> ahead) {
    const SlotStore slot(to, M);
    for (int64_t n = 0; n < N; ++n) {
        ahead.ask();
        for (int v = 0; v < V; ++v)
            slot.store(to + n * M + v * LANES,
                       update.apply(v, load_floats(state + n * stride + v * LANES), n));
    }
}

// Rows of a head, at most DELTA_ROWS, after the convolution.
struct DeltaChunk {
    const float *q, *k, *update_k;     // [rows, N], normed; q and k of the sums, and k of the updates
    const float* v;                    // [rows, padded_delta(M)]
    const float *decay, *beta, *both;  // [rows, A]; [rows]; both: q . k
    int64_t rows, N, M;
    float* y;  // row t's output begins at y + t * y_stride
    int64_t y_stride;

    const float* value(int64_t t) const { return v + t * padded_delta(M); }
};

// Writes columns m .. of row t's output, and returns its update of the state.
template <int V, bool R>
inline DeltaUpdate<V, R> delta_of(const DeltaChunk& c, int64_t t, int64_t m, const DeltaSums<V>& sums) {
    DeltaUpdate<V, R> update;
    update.decays = c.decay + t * c.N, update.k = c.update_k + t * c.N;
    update.decay = broadcast(R ? 1.0f : c.decay[t]);
    for (int v = 0; v < V; ++v) {
        const Floats value = load_floats(c.value(t) + m + v * LANES);
        update.delta[v] = broadcast(c.beta[t]) * (value - update.decay * sums.k[v]);
        const Floats out =
            multiply_add(broadcast(c.both[t]), update.delta[v], update.decay * sums.q[v]);
        store_some_floats(c.y + t * c.y_stride + m + v * LANES, out, c.M - m - v * LANES);
    }
    return update;
}

// The only row of a head, from state to state; whole vectors of columns from m on. `then`: state that is read next.
template <int V, bool R>
inline void run_row(const DeltaChunk& c, int64_t m, const float* state, int64_t stride, float* after,
                    const float* then) {
    DeltaSums<V> sums;
    const int64_t half = V * LANES * c.N / 2;
    const StateAhead<V> first = {then ? then + m * c.N : nullptr},
                        second = {then ? first.next + half : nullptr};
    sum_state<V>(state + (stride ? m : 0), stride, c.N, c.q, c.k, sums, first);
    const DeltaUpdate<V, R> update = delta_of<V, R>(c, 0, m, sums);
    if (after) copy_updated<V>(state + (stride ? m : 0), stride, c.N, update, after + m, c.M, second);
}

// A block of columns [N, V * LANES] through all rows, in place.
template <int V, bool R>
inline void run_block(const DeltaChunk& c, int64_t m, float* block) {
    DeltaSums<V> sums;
    sum_state<V>(block, V * LANES, c.N, c.q, c.k, sums);
    for (int64_t t = 0;; ++t) {
        const DeltaUpdate<V, R> update = delta_of<V, R>(c, t, m, sums);
        if (t + 1 < c.rows) {
            update_and_sum<V>(block, c.N, update, c.q + (t + 1) * c.N, c.k + (t + 1) * c.N, sums);
            continue;
        }
        for (int64_t n = 0; n < c.N; ++n)
            for (int v = 0; v < V; ++v) {
                float* at = block + (n * V + v) * LANES;
                store_floats(at, update.apply(v, load_floats(at), n));
            }
        return;
    }
}

// Copies V * LANES columns of a state from a slot [N, M] (null: zeros) to a block, and back.
template <int V>
inline void load_block(const float* state, const DeltaChunk& c, int64_t m, float* block) {
    for (int64_t n = 0; n < c.N; ++n)
        for (int v = 0; v < V; ++v, block += LANES) {
            const int64_t at = m + v * LANES;
            store_floats(block, state ? load_some_floats(state + n * c.M + at, c.M - at) : zero());
        }
}

template <int V>
inline void store_block(const float* block, const DeltaChunk& c, int64_t m, float* state) {
    const SlotStore slot(state, c.M);
    for (int64_t n = 0; n < c.N; ++n)
        for (int v = 0; v < V; ++v, block += LANES) {
            const int64_t at = m + v * LANES;
            if (at + LANES <= c.M)
                slot.store(state + n * c.M + at, load_floats(block));
            else
                store_some_floats(state + n * c.M + at, load_floats(block), c.M - at);
        }
}

// The head's state through the rows of a chunk.
template <bool R>
inline void run_columns(const DeltaHead& d, const DeltaChunk& c, float* blocks, bool is_first,
                        bool is_last) {
    const int64_t vectors = (c.M + LANES - 1) / LANES;
    if (d.T == 1 && !d.is_again(d.begin) && c.M % LANES == 0) {
        alignas(64) static constexpr float nothing[DELTA_VECTORS_OF_ROW * LANES] = {};
        const float* state = d.state ? d.state : nothing;
        const float* then = d.state && d.value_head + 1 < d.V ? d.state + c.N * c.M : nullptr;
        in_steps<DELTA_VECTORS_OF_ROW, 2, 1>(0, vectors, [&](auto count, int64_t v) {
            run_row<count, R>(c, v * LANES, state, d.state ? c.M : 0, d.next_state, then);
        });
        return;
    }
    in_steps<DELTA_VECTORS, 1>(0, vectors, [&](auto count, int64_t v) {
        float* block = blocks + v * LANES * c.N;
        if (is_first) load_block<count>(d.state, c, v * LANES, block);
        run_block<count, R>(c, v * LANES, block);
        if (is_last && d.next_state) store_block<count>(block, c, v * LANES, d.next_state);
    });
}

// The inputs of the convolution for row t, which may be before row 0; null: before the text.
inline const float* inputs_of(const HeadRows& d, int64_t t) {
    if (t >= 0) return d.row(t);
    return d.inputs ? d.inputs + (d.J - 1 + t) * d.C : nullptr;
}

// y[i] = silu(bias[i] + the sum over j of conv[j] * inputs of row t - J + 1 + j), in channels from `first` on, for
// i < n, rounded up to whole vectors if `is_padded`.
inline void convolve(const HeadRows& d, int64_t t, int64_t first, int64_t n, bool is_padded, float* y) {
    for (int64_t i = 0; i < n; i += LANES) {
        Floats sum = d.conv_bias ? load_some_floats(d.conv_bias + first + i, n - i) : zero();
        for (int64_t j = 0; j < d.J; ++j) {
            const float* inputs = inputs_of(d, t - d.J + 1 + j);
            const float* factor = d.conv + j * d.C + first + i;
            if (inputs)
                sum = multiply_add(load_some_floats(inputs + first + i, n - i),
                                   load_some_floats(factor, n - i), sum);
        }
        store_some_floats(y + i, sum * sigmoid_of(sum), is_padded ? LANES : n - i);
    }
}

// Stores the inputs of the last J - 1 rows of the text in channels first .. first + n - 1.
inline void keep_inputs(const HeadRows& d, int64_t first, int64_t n) {
    for (int64_t j = 0; d.next_inputs && j < d.J - 1; ++j) {
        const float* inputs = inputs_of(d, d.begin + d.T - d.J + 1 + j);
        float* to = d.next_inputs + j * d.C + first;
        if (inputs)
            __builtin_memcpy(to, inputs + first, n * sizeof(float));
        else
            __builtin_memset(to, 0, n * sizeof(float));
    }
}

// x = factor * x / sqrt(the sum of its squares + 1e-6)
inline void norm_to(float factor, int64_t n, float* x) {
    const float squares = sum_of(n, [=](int64_t i) { return x[i] * x[i]; });
    factor *= 1.0f / __builtin_sqrtf(squares + 1e-6f);
    for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

// y = the RMS norm of y [M], times silu(z), or sigmoid(z)
inline void norm_and_gate(const DeltaHead& d, const float* z, float* y) {
    rms_norm(y, d.norm, d.epsilon, d.M, y);
    for (int64_t i = 0; i < d.M; i += LANES) {
        const Floats gate = load_some_floats(z + i, d.M - i);
        const Floats factor = d.is_by_row ? sigmoid_of(gate) : gate * sigmoid_of(gate);
        store_some_floats(y + i, load_some_floats(y + i, d.M - i) * factor, d.M - i);
    }
}

// Decays of a row's state, from alpha + bias.
inline void decays_of(float rate, int64_t n, float* alpha) {
    map(alpha, n, [&](Floats a) { return exp_of(broadcast(rate) * softplus_of(a)); });
}

void delta_head(const DeltaHead& d) {
    const int64_t padded = padded_delta(d.M), h = d.value_head, g = d.key_head, end = d.begin + d.T;
    float *q = d.scratch, *k = q + DELTA_ROWS * d.N, *v = k + DELTA_ROWS * d.N,
          *blocks = v + DELTA_ROWS * padded, *no_output = blocks + d.N * padded,
          *decay = no_output + padded, *update_k = d.is_by_row ? decay + DELTA_ROWS * d.N : k;
    const float root = 1.0f / __builtin_sqrtf(static_cast<float>(d.N));
    alignas(64) float beta[DELTA_ROWS], both[DELTA_ROWS];
    const int64_t A = d.A();
    for (int64_t t0 = d.begin, rows; t0 < end; t0 += rows) {
        const bool is_again = d.is_again(t0);
        rows = (is_again && d.num_again < end ? d.num_again : end) - t0;
        if (rows > DELTA_ROWS) rows = DELTA_ROWS;
        for (int64_t r = 0; r < rows; ++r) {
            float *q_N = q + r * d.N, *k_N = k + r * d.N;
            convolve(d, t0 + r, g * d.N, d.N, false, q_N);
            convolve(d, t0 + r, (d.G + g) * d.N, d.N, false, k_N);
            convolve(d, t0 + r, 2 * d.G * d.N + h * d.M, d.M, true, v + r * padded);
            norm_to(root, d.N, q_N);
            norm_to(1.0f, d.N, k_N);
            both[r] = sum_of(d.N, [=](int64_t i) { return q_N[i] * k_N[i]; });
            beta[r] = d.gates(t0 + r)[h];
            const float* alpha = d.gates(t0 + r) + d.V + h * A;
            for (int64_t n = 0; n < A; ++n) decay[r * A + n] = alpha[n] + d.step_bias[h * A + n];
        }
        map(beta, rows, [](Floats b) { return sigmoid_of(b); });
        decays_of(d.decay[h], rows * A, decay);
        for (int64_t i = 0; d.is_by_row && i < rows * A; ++i)
            update_k[i] = k[i], q[i] *= decay[i], k[i] *= decay[i];
        float* y = is_again ? no_output : d.y + (t0 - d.num_again) * d.y_stride;
        const int64_t y_stride = is_again ? 0 : d.y_stride;
        const DeltaChunk chunk = {q, k, update_k, v, decay, beta, both, rows, d.N, d.M, y, y_stride};
        (d.is_by_row ? run_columns<true> : run_columns<false>)(d, chunk, blocks, t0 == d.begin,
                                                               t0 + rows == end);
        for (int64_t r = 0; r < rows && !is_again; ++r)
            norm_and_gate(d, d.gates(t0 + r) + d.V + d.V * A + h * d.M, y + r * y_stride);
    }
    keep_inputs(d, 2 * d.G * d.N + h * d.M, d.M);
    if (d.stores_key) keep_inputs(d, g * d.N, d.N), keep_inputs(d, (d.G + g) * d.N, d.N);
#if defined(LEVEL_AVX512) || defined(LEVEL_AVX2)
    _mm_sfence();  // after SlotStore
#endif
}

// y[i] *= sigmoid(gate[i])
void gate_by(float* y, const float* gate, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES)
        store_some_floats(
            y + i, load_some_floats(y + i, n - i) * sigmoid_of(load_some_floats(gate + i, n - i)),
            n - i);
}
