// The experts of a token and their weights, from a router's logits. The reference is route.py.
#pragma once
#include <algorithm>
#include <cmath>

#include "step.h"

// A router's result for one token: K experts, as numbers in f32, then their weights.
struct Routed {
    const float* values;  // [2 K]
    int64_t num_used;

    int64_t expert(int64_t k) const { return static_cast<int64_t>(values[k]); }
    float weight(int64_t k) const { return values[num_used + k]; }
};

class Chooser {
  public:
    // `choice` [E] is scratch.
    Chooser(const HsRoute& route, float* choice) : r(route), E(r.router.num_rows), choice(choice) {}

    // Writes the experts of a token and their weights to out [2 K]; overwrites logits [E].
    void run(float* score, float* out) const {
        gate(score);
        for (int64_t e = 0; e < E; ++e)
            choice[e] = r.choice_bias ? score[e] + r.choice_bias[e] : score[e];
        if (r.num_groups > 1) keep_groups();
        const int64_t K = r.num_used;
        float *weight = out + K, sum = 0.0f;
        for (int64_t k = 0; k < K; ++k) {
            const int64_t e = take_largest(choice, E);
            out[k] = static_cast<float>(e);
            weight[k] = score[e];
        }
        if (r.gating == GATING_SOFTMAX_OF_CHOSEN) softmax(weight, K);
        for (int64_t k = 0; k < K; ++k) sum += weight[k];
        for (int64_t k = 0; k < K; ++k)
            weight[k] = (r.renormalises ? weight[k] / (sum + LEAST_SUM) : weight[k]) * r.scale;
        for (int64_t k = 0; r.own_scale && k < K; ++k)
            weight[k] *= r.own_scale[static_cast<int64_t>(out[k])];
    }

  private:
    static constexpr float LEAST_SUM = 1e-20f;  // as in route.py
    static constexpr float TAKEN = -INFINITY;

    void gate(float* x) const {
        if (r.gating == GATING_SOFTMAX) softmax(x, E);
        for (int64_t e = 0; r.gating == GATING_SIGMOID && e < E; ++e)
            x[e] = 1.0f / (1.0f + std::exp(-x[e]));
    }

    static void softmax(float* x, int64_t n) {
        const float top = *std::max_element(x, x + n);
        float sum = 0.0f;
        for (int64_t i = 0; i < n; ++i) sum += x[i] = std::exp(x[i] - top);
        for (int64_t i = 0; i < n; ++i) x[i] /= sum;
    }

    // The index of the largest value, which is then out of the choice; of equal ones the first, and
    // where none is a number above -infinity, any that has not been taken.
    int64_t take_largest(float* value, int64_t n) const {
        int64_t best = 0;
        for (int64_t i = 1; i < n; ++i)
            if (value[i] > value[best] || std::isnan(value[best])) best = i;
        value[best] = TAKEN;
        return best;
    }

    // Takes the experts of all groups but those whose two largest sum to most, or with the largest one, out of the
    // choice.
    void keep_groups() const {
        const int64_t size = E / r.num_groups;
        float best[MAX_GROUPS];
        bool is_used[MAX_GROUPS] = {};
        for (int64_t g = 0; g < r.num_groups; ++g) {
            float first = TAKEN, second = TAKEN;
            for (const float* c = choice + g * size; c < choice + (g + 1) * size; ++c) {
                if (*c > first)
                    second = first, first = *c;
                else if (*c > second)
                    second = *c;
            }
            best[g] = r.groups_by_largest ? first : first + second;
        }
        for (int64_t i = 0; i < r.num_used_groups; ++i)
            is_used[take_largest(best, r.num_groups)] = true;
        for (int64_t e = 0; e < E; ++e)
            if (!is_used[e / size]) choice[e] = TAKEN;
    }

    const HsRoute& r;
    const int64_t E;
    float* const choice;
};

// True if the route's numbers are those of a router with this many columns.
inline bool fits(const HsRoute& r, int64_t width) {
    const int64_t E = r.router.num_rows;
    if (!r.router.data) return true;
    return E >= 1 && E <= MAX_EXPERTS && fits(r.router, E, width) && r.num_used >= 1 &&
           r.num_used <= E && r.num_groups >= 1 && r.num_groups <= MAX_GROUPS &&
           E % r.num_groups == 0 && (r.num_groups == 1 || E >= 2 * r.num_groups) &&
           r.num_used_groups >= 1 && r.num_used_groups <= r.num_groups &&
           r.num_used * r.num_groups <= E * r.num_used_groups && r.gating >= 0 &&
           r.gating < NUM_GATINGS;
}
