#pragma once
#include <chrono>

#include "step.h"

// Assigns a step's time and bytes to its parts: each reading adds the time since the previous one to a
// part. Without `times` the clock is not read.
class StepClock {
  public:
    explicit StepClock(const HsStep& step) : step_(step) {
        if (!step.times) return;
        time_ = now(), bytes_ = bytes();
    }

    void layer(int64_t index) { layer_ = index; }  // num_layers: outside the layers

    void ended(int32_t part) {
        if (!step_.times) return;
        int64_t* counted = step_.times + 2 * (layer_ * NUM_TIMED + part);
        const int64_t time = now(), read = bytes();
        counted[0] += time - time_, counted[1] += read - bytes_;
        time_ = time, bytes_ = read;
    }

  private:
    int64_t bytes() const {
        const int64_t neurons = step_.gate_bytes + step_.up_bytes + step_.down_bytes;
        return neurons + step_.predictor_bytes + step_.attention_bytes;
    }

    static int64_t now() {
        const auto time = std::chrono::steady_clock::now().time_since_epoch();
        return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
    }

    const HsStep& step_;
    int64_t layer_ = 0, time_ = 0, bytes_ = 0;
};
