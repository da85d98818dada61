#pragma once
#include <chrono>

#include "step.h"

// Divides the time of a step among its parts: each reading gives what has passed since the one before
// to a part. Without `times` nothing is read.
class StepClock {
  public:
    explicit StepClock(const SparkStep& step) : times_(step.times), num_layers_(step.num_layers) {
        if (!times_) return;
        last_ = now();
        outside();
    }

    void layer(int64_t index) { row_ = times_ ? times_ + index * NUM_TIMED : nullptr; }

    void outside() { layer(num_layers_); }

    void ended(int32_t part) {
        if (!times_) return;
        const int64_t time = now();
        row_[part] += time - last_;
        last_ = time;
    }

  private:
    static int64_t now() {
        const auto time = std::chrono::steady_clock::now().time_since_epoch();
        return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
    }

    int64_t *times_, *row_ = nullptr;
    int64_t num_layers_, last_ = 0;
};
