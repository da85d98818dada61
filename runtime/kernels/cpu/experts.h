// The chosen experts of a layer. Rows are sorted by expert, so that each expert is read once for all
// of its rows; the weights of one that no row has chosen are not read. A row's sum is in the order in
// which its router chose, so its bits do not depend on the other rows. The reference is
// feed_forward.py.
//
// Letters: T tokens, K experts of a token, P = T * K, D model width, F neurons of an expert.
#pragma once
#include "drive.h"
#include "neurons.h"
#include "route.h"

// The largest numbers of a step's layers with experts, for which memory is taken.
struct ExpertSizes {
    int64_t most_used = 0, most_neurons = 0, most_experts = 0;
    uint32_t forms = 0, down_forms = 0;
    bool has_neuron_major = false;
    bool are_arriving = false;  // experts of some layer are read from a drive
    bool reads_f32 =
        false;  // x, as it is: some level does not pack it, or rows of `down` are per neuron

    explicit ExpertSizes(const HsStep& step) {
        for (const HsLayer* l = step.layer; l < step.layer + step.num_layers; ++l)
            for (int64_t b = 0; b < l->feed_forward.num_blocks && l->feed_forward.experts; ++b)
                add(l->feed_forward.experts[b], l->route.num_used);
    }
    ExpertSizes(const HsExperts* experts, int64_t num_used) {
        if (experts) add(*experts, num_used);
    }

  private:
    static bool packs_none(const HsMatrix& m) {
        return m.data && (form_of(m.kind) == NO_FORM || form_of(m.kind) == FORM_BF16);
    }

    void add(const HsExperts& e, int64_t num_used) {
        most_used = std::max(most_used, num_used);
        most_experts = std::max(most_experts, e.num_experts);
        most_neurons = std::max(most_neurons, e.first.num_neurons);
        forms |= forms_of(e.first);
        down_forms |= by_output_forms(e.first);
        has_neuron_major |= !e.first.is_by_output;
        are_arriving |= e.arriving != nullptr;
        reads_f32 |= !e.first.is_by_output || packs_none(e.first.gate) || packs_none(e.first.up);
    }
};

class Experts {
  public:
    Experts(Arena& arena, const ExpertSizes& sizes, int64_t D, int64_t T, Neurons& neurons)
        : neurons_(neurons) {
        const int64_t K = sizes.most_used, P = T * K;
        if (!K) return;
        const int64_t F = groups_of(sizes.most_neurons) * SUM_ROWS;
        count_ = arena.take<int32_t>(sizes.most_experts + 1);
        pair_ = arena.take<int32_t>(P);
        choice_ = arena.take<int32_t>(P);
        used_ = arena.take<Used>(std::min(P, sizes.most_experts));
        if (sizes.are_arriving) {
            const int64_t E = sizes.most_experts;
            here_ = arena.take<Used>(E), missing_ = arena.take<Used>(E), arrived_ = arena.take<Used>(E);
            buffer_ = arena.take<int32_t>(E), is_needed_ = arena.take<uint8_t>(E);
            bits_ = arena.take<uint32_t>(T * words_of(E));
        }
        x_ = arena.operand(D, T > 1 ? P : 0, sizes.forms, nullptr, sizes.reads_f32);
        hidden_ = arena.operand(F, P, sizes.down_forms);
        up_ = arena.take<float>(P * F);
        out_ = arena.take<float>(P * D);
        if (!sizes.has_neuron_major) return;
        gate_ = arena.take<float>(K * F);
        open_ = arena.take<int32_t>(K * F);
        open_position_ = arena.take<int32_t>(K * F);
        mask_ = arena.take<uint64_t>(K * F / SUM_ROWS);
        sum_ = arena.take<float>(K * MAX_CHUNKS * D);
    }

    // Writes the sum of the outputs of the chosen experts that are stored, each times its weight, to
    // out [T, D]. `routed`: [T, 2 K]. `seen`: of rows [T, K].
    void run(const HsExperts& experts, const Gate& gate, const float* routed, int64_t num_used,
             Operand& x, int64_t T, float* out, NeuronBytes& read, const Seen& seen = {}) {
        D = experts.first.gate.num_columns;
        e_ = &experts, K = num_used, F = experts.first.num_neurons, T_ = T, seen_ = seen;
        sort(routed);
        is_one_ = T == 1 && !seen.is_wanted();
        if (experts.first.is_by_output || is_one_) gather(x);
        if (experts.arriving)
            run_arriving(*experts.arriving, routed, gate, x, read);
        else
            compute(used_, num_used_, gate, x, read);
        split(T * K * D * 4, T, 1, 4, [&](int64_t t0, int64_t t1) {
            for (int64_t t = t0; t < t1; ++t) add({routed + t * 2 * K, K}, t, out + t * D);
        });
    }

  private:
    // A stored expert that rows have chosen, by its place: pairs begin .. begin + count - 1 of a row and
    // an expert. `before`: the work on a group of rows of each expert before it.
    struct Used {
        int32_t place, begin, count;
        int64_t before;

        int64_t work() const { return count + READING; }
    };
    // Reading and unpacking a row takes about as long as its products with so many vectors.
    static constexpr int64_t READING = 2;
    // Of a prompt, the experts in slots are computed in so many turns, between which those that have arrived
    // are computed, and free their buffers.
    static constexpr int64_t TURNS = 8;

    static int64_t words_of(int64_t num_experts) { return (num_experts + 31) / 32; }

    // Computes some of the chosen experts, each as if alone.
    void compute(Used* wave, int64_t count, const Gate& gate, Operand& x, NeuronBytes& read) {
        wave_ = wave, num_wave_ = count, work_ = 0;
        for (Used* u = wave; u < wave + count; ++u) u->before = work_, work_ += u->work();
        if (e_->first.is_by_output)
            run_by_output(gate, read);
        else if (is_one_)
            run_one(gate, read);
        else
            run_many(gate, x, read);
    }

    // ---- experts that are read from a drive ------------------------------------------------------

    // Missing experts are read, in the file's order, while those in slots are computed, then those that have
    // arrived. The place of an expert here is its number.
    void run_arriving(const HsArriving& a, const float* routed, const Gate& gate, Operand& x,
                      NeuronBytes& read) {
        learn(a, routed);
        std::fill_n(is_needed_, e_->num_experts, uint8_t{0});
        int64_t num_here = 0, num_missing = 0;
        for (const Used* u = used_; u < used_ + num_used_; ++u) {
            is_needed_[u->place] = 1;
            (a.place[u->place] >= 0 ? here_[num_here++] : missing_[num_missing++]) = *u;
        }
        a.drive->num_used += num_used_, a.drive->num_hits += num_here;
        Arrivals arrivals(a);
        if (arrivals.has_failed()) {  // the step fails, with numbers that harm nothing
            std::fill_n(out_, T_ * K * D, 0.0f);
            num_missing = 0;
        }
        const int64_t most = T_ == 1 ? num_here : (num_here + TURNS - 1) / TURNS;
        int64_t next_here = 0, asked = 0, num_arrived = 0;
        while (next_here < num_here || num_arrived < num_missing) {
            for (; asked < num_missing && arrivals.has_room(); ++asked)
                buffer_[missing_[asked].place] = arrivals.request(missing_[asked].place);
            const auto& filled = arrivals.take(next_here == num_here);
            if (!filled.empty()) {
                const int64_t count = arrived_in(filled, asked);
                num_arrived += count;
                if (arrivals.has_failed())
                    for (const Used* u = arrived_; u < arrived_ + count; ++u)
                        std::fill_n(out_ + u->begin * D, u->count * D, 0.0f);
                else
                    compute(arrived_, count, gate, x, read);
                for (const Used* u = arrived_; u < arrived_ + count; ++u) {
                    is_needed_[u->place] = 0;
                    if (!arrivals.has_failed()) keep(a, u->place);
                    arrivals.release(buffer_[u->place]);
                }
                continue;
            }
            const int64_t some = std::min(most, num_here - next_here);
            compute(here_ + next_here, some, gate, x, read);
            for (const int64_t end = next_here + some; next_here < end; ++next_here)
                is_needed_[here_[next_here].place] = 0;
        }
    }

    // Updates what experts are worth with the choices of all rows.
    void learn(const HsArriving& a, const float* routed) {
        const int64_t W = words_of(a.drive->num_experts);
        std::fill_n(bits_, T_ * W, 0u);
        for (int64_t t = 0; t < T_; ++t)
            for (int64_t k = 0; k < K; ++k) {
                const int64_t e = Routed{routed + t * 2 * K, K}.expert(k);
                bits_[t * W + e / 32] |= 1u << (e % 32);
            }
        a.drive->learn(a.drive->policy, a.layer, bits_, T_, a.worth);
    }

    // Lists those of the first `asked` missing experts that are in these buffers in `arrived_`, by number;
    // returns how many.
    int64_t arrived_in(const std::vector<int32_t>& filled, int64_t asked) {
        int64_t count = 0;
        for (int64_t i = 0; i < asked; ++i) {
            const int32_t e = missing_[i].place;
            if (!is_needed_[e]) continue;  // has been computed
            if (std::find(filled.begin(), filled.end(), buffer_[e]) != filled.end())
                arrived_[count++] = missing_[i];
        }
        return count;
    }

    // Gives an expert that has arrived the slot of one that is worth less and not needed in this step, if
    // there is any.
    void keep(const HsArriving& a, int32_t e) {
        int64_t slot = -1;
        float least = a.worth[e] - a.drive->margin;
        for (int64_t s = 0; s < a.num_slots; ++s) {
            const int32_t other = a.expert[s];
            if (other < 0) {
                slot = s;
                break;
            }
            if (!is_needed_[other] && a.worth[other] < least) slot = s, least = a.worth[other];
        }
        if (slot < 0) return;
        if (a.expert[slot] >= 0) a.place[a.expert[slot]] = -1;
        HsBlock from = e_->first, to = e_->first;
        Arrivals::place(a, e, buffer_[e], from);
        shift(to.gate, slot * e_->gate_bytes), shift(to.up, slot * e_->up_bytes);
        shift(to.down, slot * e_->down_bytes);
        pack(from.gate, to.gate), pack(from.up, to.up), pack(from.down, to.down);
        a.expert[slot] = e, a.place[e] = static_cast<int32_t>(slot);
        ++a.drive->num_kept;
    }

    static void shift(HsMatrix& m, int64_t bytes) {
        if (m.data) m.data += bytes;
    }

    static void pack(const HsMatrix& from, const HsMatrix& to) {
        if (!from.data) return;
        hs_pack_rows(from.kind, to.kind, from.data, from.num_rows, from.num_columns, nullptr,
                     from.num_rows, const_cast<uint8_t*>(to.data), to.stride);
    }

    // The place of the expert that a row has chosen as its k-th; below 0: it is not stored.
    int64_t place_of(const Routed& routed, int64_t k) const {
        return e_->place && !e_->arriving ? e_->place[routed.expert(k)] : routed.expert(k);
    }

    // Sorts the pairs by place, those of an expert by row.
    void sort(const float* routed) {
        std::fill_n(count_, e_->num_experts + 1, 0);
        for (int64_t t = 0; t < T_; ++t)
            for (int64_t k = 0; k < K; ++k) {
                const int64_t place = place_of({routed + t * 2 * K, K}, k);
                if (place >= 0) ++count_[place + 1];
            }
        num_used_ = 0;
        for (int64_t e = 0; e < e_->num_experts; ++e) {
            const int32_t own = count_[e + 1];
            if (own) {
                used_[num_used_++] = {static_cast<int32_t>(e), count_[e], own, 0};
            }
            count_[e + 1] += count_[e];
        }
        for (int64_t t = 0; t < T_; ++t)
            for (int64_t k = 0; k < K; ++k) {
                const int64_t place = place_of({routed + t * 2 * K, K}, k);
                pair_[t * K + k] = place < 0 ? -1 : count_[place];
                if (place >= 0) choice_[count_[place]++] = static_cast<int32_t>(t * K + k);
            }
    }

    // The token of an expert's i-th pair.
    int64_t token_of(const Used& used, int64_t i) const { return choice_[used.begin + i] / K; }

    Seen seen_of(const Used& used) const {
        Seen own = seen_;
        own.row = choice_ + used.begin;
        return own;
    }

    HsBlock block_of(const Used& used) const {
        HsBlock block = e_->first;
        const int32_t e = used.place;
        const int64_t place = e_->arriving ? e_->arriving->place[e] : e;
        if (place < 0)
            Arrivals::place(*e_->arriving, e, buffer_[e], block);
        else
            shift(block.gate, place * e_->gate_bytes), shift(block.up, place * e_->up_bytes),
                shift(block.down, place * e_->down_bytes);
        for (HsMatrix* m : {&block.gate, &block.up, &block.down})
            if (m->bias) m->bias += e * m->num_rows;
        return block;
    }

    // The sum of a row's outputs, in the order of its router.
    void add(const Routed& routed, int64_t t, float* out) const {
        std::fill_n(out, D, 0.0f);
        for (int64_t k = 0; k < K; ++k) {
            if (pair_[t * K + k] < 0) continue;
            const float* own = out_ + pair_[t * K + k] * D;
            const float* bias = e_->down_bias ? e_->down_bias + place_of(routed, k) * D : nullptr;
            const float weight = routed.weight(k);
            for (int64_t d = 0; d < D; ++d) out[d] += weight * (bias ? own[d] + bias[d] : own[d]);
        }
    }

    // The vectors of an expert's pairs, of which the packed forms begin at its first pair.
    static Operand vectors(const Operand& all, const Used& used, int64_t size) {
        Operand own = {all.f32 + used.begin * size, {}, {}, size, used.count};
        for (int form = 0; form < NUM_FORMS; ++form)
            if (all.packed[form]) own.packed[form] = all.packed[form] + used.begin * packed_room(size);
        return own;
    }

    // An expert's vectors, as products with matrices of `kind` read them.
    static Input input_of(const Operand& own, int32_t kind) {
        return {own.f32, own.packed[form_of(kind)], own.size, own.capacity, 0, own.capacity};
    }

    // The input of an expert's products; `one`: of all experts, if there is one row.
    Input input_of(const Input& one, const Used& used, int32_t kind) const {
        return T_ == 1 ? one : input_of(vectors(x_, used, D), kind);
    }

    // Calls body(used, i0, i1) for vectors i0 .. i1-1 of some experts; each reads or writes `count` values.
    template <class Body>
    void over_vectors(const Used* of, int64_t num, int64_t count, const Body& body) const {
        split(T_ > 1 ? T_ * K * count * 16 : 0, T_ * K, 1, 4, [&](int64_t p0, int64_t p1) {
            for (const Used* u = of; u < of + num; ++u) {
                const int64_t i0 = std::max<int64_t>(p0 - u->begin, 0);
                const int64_t i1 = std::min<int64_t>(p1 - u->begin, u->count);
                if (i0 < i1) body(*u, i0, i1);
            }
        });
    }

    // Puts the vectors of each expert's rows together, in the forms that its products read.
    void gather(Operand& x) {
        const HsBlock& b = e_->first;
        const bool has_up = b.up.data;
        if (T_ == 1) {
            gate_x_ = x.as(b.gate.kind, 1);
            up_x_ = has_up ? x.as(b.up.kind, 1) : gate_x_;
            return;
        }
        over_vectors(used_, num_used_, D, [&](const Used& u, int64_t i0, int64_t i1) {
            const Operand own = vectors(x_, u, D);
            for (int64_t i = i0; i < i1; ++i) {
                const float* row = x.row(token_of(u, i));
                copy(row, own, b.gate.kind, i);
                if (has_up && form_of(b.up.kind) != form_of(b.gate.kind)) copy(row, own, b.up.kind, i);
            }
        });
    }

    // Writes a row as vector i of an expert, packed if products with matrices of `kind` read that.
    static void copy(const float* row, const Operand& own, int32_t kind, int64_t i) {
        Quantise* quantise = kernels().quantise[kind];
        if (quantise)
            quantise({row, own.packed[form_of(kind)], 0, own.capacity, i, 1}, own.size);
        else
            std::memcpy(own.row(i), row, own.size * sizeof(float));
    }

    // ---- a row of `down` per output --------------------------------------------------------------

    // Two passes over a list of jobs, groups of rows of all chosen experts: gates and ups, then downs.
    void run_by_output(const Gate& gate, NeuronBytes& read) {
        const HsBlock& b = e_->first;
        const int64_t grain = T_ == 1 ? TILE_ROWS : 32, pairs = T_ * K;
        over_rows(F, grain, pairs * F * (row_bytes(b.gate) + (b.up.data ? row_bytes(b.up) : 0)),
                  [&](const Used& u, const Used* next, int64_t a0, int64_t a1) {
            gates_and_ups(gate, u, next, a0, a1);
        });
        if (Quantise* quantise = kernels().quantise[b.down.kind])
            over_vectors(wave_, num_wave_, F, [&](const Used& u, int64_t i0, int64_t i1) {
                quantise(input_of(vectors(hidden_, u, F), b.down.kind).part(i0, i1), F);
            });
        over_rows(D, grain, pairs * D * row_bytes(b.down),
                  [&](const Used& u, const Used* next, int64_t d0, int64_t d1) {
            const HsMatrix down = block_of(u).down;
            Rows rows = rows_of(down);
            if (next && d1 == D) rows.after = block_of(*next).down.data;
            kernels().dot_rows[down.kind](rows, input_of(vectors(hidden_, u, F), down.kind),
                                          out_ + u.begin * D, D, d0, d1);
        });
        read.gate += num_wave_ * F * row_bytes(b.gate), read.down += num_wave_ * D * row_bytes(b.down);
        if (b.up.data) read.up += num_wave_ * F * row_bytes(b.up);
    }

    // Calls body(used, next, a0, a1) for pieces of `count` rows of each chosen expert, cut so that equal pieces
    // are equal work; `next`: the expert after it, or null.
    template <class Body>
    void over_rows(int64_t count, int64_t grain, int64_t bytes, const Body& body) {
        const int64_t groups = (count + grain - 1) / grain;
        split(bytes, work_ * groups, 1, 16, [&](int64_t i0, int64_t i1) {
            for (const Used* u = wave_; u < wave_ + num_wave_; ++u) {
                auto from = [&](int64_t i) {  // the first group whose work begins at i or later
                    const int64_t own = i - u->before * groups;
                    return std::clamp<int64_t>((own + u->work() - 1) / u->work(), 0, groups);
                };
                const int64_t g0 = from(i0), g1 = from(i1);
                const Used* next = u + 1 < wave_ + num_wave_ ? u + 1 : nullptr;
                if (g0 < g1) body(*u, next, g0 * grain, std::min(count, g1 * grain));
            }
        });
    }

    // Writes the hidden values of neurons a0 .. a1-1 of an expert.
    void gates_and_ups(const Gate& gate, const Used& u, const Used* next, int64_t a0, int64_t a1) {
        const HsBlock block = block_of(u);
        float *hidden = hidden_.f32 + u.begin * F, *up = up_ + u.begin * F;
        Rows gates = rows_of(block.gate), ups = rows_of(block.up);
        const uint8_t* then = a1 < F ? block.gate.data + a1 * block.gate.stride
                              : next ? block_of(*next).gate.data
                                     : nullptr;
        gates.after = block.up.data ? block.up.data + a0 * block.up.stride : then;
        ups.after = then;
        kernels().dot_rows[block.gate.kind](gates, input_of(gate_x_, u, block.gate.kind), hidden, F, a0,
                                            a1);
        if (block.up.data)
            kernels().dot_rows[block.up.kind](ups, input_of(up_x_, u, block.up.kind), up, F, a0, a1);
        for (int64_t i = 0; i < u.count; ++i)
            activate_whole(block, gate, i, a0, a1, hidden + i * F, up + i * F, seen_of(u));
    }

    // ---- a row of `down` per neuron --------------------------------------------------------------

    // One row that is not seen: one pass over a list of jobs, chunks of neurons of all chosen experts.
    void run_one(const Gate& gate, NeuronBytes& read) {
        const HsBlock& b = e_->first;
        const int64_t chunk = groups_of_chunk(F) * SUM_ROWS, chunks = (F + chunk - 1) / chunk;
        const int64_t stride = groups_of(F) * SUM_ROWS;
        Opened opened[MAX_CHUNKS * MAX_USED] = {};
        split(K * F * row_bytes(b.gate), num_wave_ * chunks, 1, MAX_CHUNKS,
              [&](int64_t i0, int64_t i1) {
            for (int64_t i = i0, end; i < i1; i = end) {
                const int64_t u = i / chunks, first = u * chunks;
                end = std::min(i1, first + chunks);
                opened[i] = run_chunks(gate, wave_[u], i - first, end - first, chunk, stride);
            }
        });
        split(K * chunks * D * 4, D, 128, 1, [&](int64_t d0, int64_t d1) {
            for (const Used* u = wave_; u < wave_ + num_wave_; ++u)
                RowSums::join(sum_ + u->begin * MAX_CHUNKS * D, D, chunks, b.down.kind, d0, d1,
                              out_ + u->begin * D);
        });
        int64_t fired = 0;
        for (int64_t i = 0; i < num_wave_ * chunks; ++i) fired += opened[i].end - opened[i].begin;
        count(b, num_wave_ * F, WholeNeurons::takes(b, gate) ? num_wave_ * F : fired, read);
    }

    // Writes the sums of chunks c0 .. c1-1 of an expert.
    Opened run_chunks(const Gate& gate, const Used& u, int64_t c0, int64_t c1, int64_t chunk,
                      int64_t stride) {
        const HsBlock block = block_of(u);
        const int64_t at = u.begin * stride;
        float *hidden = hidden_.f32 + at, *up = up_ + at, *sum = sum_ + u.begin * MAX_CHUNKS * D;
        if (WholeNeurons::takes(block, gate)) {
            WholeNeurons{block,  gate, gate_x_, up_x_, 1, hidden, up, mask_ + at / SUM_ROWS,
                         stride, sum,  chunk,   {}}
                .run(c0, c1);
            return {};
        }
        const TokenRoom room = {gate_ + at, up, hidden, open_ + at, open_position_ + at, sum, chunk};
        return OneToken(block, gate, gate_x_, up_x_, room, {nullptr, nullptr, F}).run(c0, c1);
    }

    // Several rows, or one that is seen: one expert after another.
    void run_many(const Gate& gate, Operand& x, NeuronBytes& read) {
        for (const Used* u = wave_; u < wave_ + num_wave_; ++u) {
            Operand own = vectors(x_, *u, D);
            for (int64_t i = 0; i < u->count; ++i)
                std::memcpy(own.row(i), x.row(token_of(*u, i)), D * sizeof(float));
            neurons_.run(block_of(*u), gate, nullptr, own, u->count, out_ + u->begin * D, read, {},
                         seen_of(*u));
        }
    }

    static void count(const HsBlock& b, int64_t num_gates, int64_t num_fired, NeuronBytes& read) {
        read.gate += num_gates * row_bytes(b.gate), read.down += num_fired * row_bytes(b.down);
        if (b.up.data) read.up += num_fired * row_bytes(b.up);
    }

    int64_t D = 0;  // the width of the experts
    Neurons& neurons_;
    const HsExperts* e_ = nullptr;
    int64_t K = 0, F = 0, T_ = 0, num_used_ = 0;
    bool is_one_ = false;  // one row that is not seen
    // The experts that are computed together; work_: on a group of rows of all of them.
    Used* wave_ = nullptr;
    int64_t num_wave_ = 0, work_ = 0;
    // pair_: of [T, K], its place among the sorted; below 0: none. choice_: the inverse, t * K + k
    int32_t *count_ = nullptr, *pair_ = nullptr, *choice_ = nullptr;
    Used* used_ = nullptr;
    // Of experts that are read from a drive: those in slots, those that are not, those that have arrived; by
    // number the buffer, and whether the step still has to compute it; the choices of rows.
    Used *here_ = nullptr, *missing_ = nullptr, *arrived_ = nullptr;
    int32_t* buffer_ = nullptr;
    uint8_t* is_needed_ = nullptr;
    uint32_t* bits_ = nullptr;
    Operand x_ = {}, hidden_ = {};   // by pair
    Input gate_x_ = {}, up_x_ = {};  // of one row
    float *up_ = nullptr, *out_ = nullptr, *gate_ = nullptr, *sum_ = nullptr;
    int32_t *open_ = nullptr, *open_position_ = nullptr;
    uint64_t* mask_ = nullptr;
    Seen seen_ = {};
};

// True if these are experts of a layer of width D, of which a router chooses `num_used`.
inline bool fits(const HsExperts& e, int64_t num_used, int64_t D, bool computes_all) {
    const HsBlock& b = e.first;
    if (e.num_experts < 1 || e.num_experts > MAX_EXPERTS || num_used < 1 || num_used > MAX_USED)
        return false;
    if (b.row || b.id || b.num_neurons < 1) return false;
    for (int64_t bytes : {e.gate_bytes, e.up_bytes, e.down_bytes})
        if (bytes < 0) return false;
    return fits(b, D, b.num_neurons, b.up.data != nullptr, computes_all);
}
