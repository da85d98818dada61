// Times jobs of a thread pool, for ../pool_times.py:
//   jobs hotsplit|openmp THREADS BYTES PROCESSORS PAUSE_US ...
// Before a job the caller computes for PAUSE_US microseconds, or sleeps as long if it is negative. A job
// reads BYTES that no other job of the last 64 MiB has read; 0: it reads nothing. Prints for each pause the
// median and the 90th percentile in nanoseconds.
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "thread_pool.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t ROW = 1024, MEMORY = 64 << 20;  // bytes
constexpr int WARM_UP = 5, FEWEST_JOBS = 20, MOST_JOBS = 2000;
constexpr auto LIMIT = std::chrono::milliseconds(250);  // for the jobs of one pause

struct alignas(128) Sum {
    int64_t value = 0;
};

int64_t sum_of(const int64_t* data, int64_t begin, int64_t end) {
    int64_t sum = 0;
    for (int64_t i = begin * ROW / 8; i < end * ROW / 8; ++i) sum += data[i];
    return sum;
}

void wait_for(int64_t pause_us) {
    if (pause_us < 0) return std::this_thread::sleep_for(std::chrono::microseconds(-pause_us));
    const auto end = Clock::now() + std::chrono::microseconds(pause_us);
    while (Clock::now() < end) {
    }
}

void run_hotsplit(int threads, const int64_t* data, int64_t rows) {
    auto body = [=](int64_t begin, int64_t end) {
        if (rows && sum_of(data, begin, end) == 1) std::abort();  // never: all values are 0
    };
    if (rows)
        split(rows * ROW, rows, 1, 16, body);
    else
        parallel_for(threads, 1, 1, body);
}

void run_openmp(int threads, const int64_t* data, int64_t rows, std::vector<Sum>& sums) {
#pragma omp parallel num_threads(threads)
    {
        const int64_t i = omp_get_thread_num(), n = omp_get_num_threads();
        sums[i].value += sum_of(data, i * rows / n, (i + 1) * rows / n);
    }
}

}  // namespace

int main(int count, char** words) {
    if (count < 6) return 2;
    const bool is_ours = std::strcmp(words[1], "hotsplit") == 0;
    const int threads = std::atoi(words[2]);
    const int64_t rows = std::atoll(words[3]) / ROW, jobs_in_memory = MEMORY / ROW / (rows + 1);
    std::vector<int64_t> memory(MEMORY / 8, 0);
    std::vector<Sum> sums(threads);
    if (is_ours && !set_threads(threads, std::atoi(words[4]))) return 3;
    int64_t job = 0;
    for (char** pause = words + 5; *pause; ++pause) {
        std::vector<int64_t> times;
        const auto first = Clock::now();
        for (int n = 0; n < FEWEST_JOBS || (n < MOST_JOBS && Clock::now() - first < LIMIT); ++n) {
            wait_for(std::atoll(*pause));
            const int64_t* data = memory.data() + job++ % jobs_in_memory * rows * ROW / 8;
            const auto began = Clock::now();
            if (is_ours)
                run_hotsplit(threads, data, rows);
            else
                run_openmp(threads, data, rows, sums);
            const std::chrono::nanoseconds passed = Clock::now() - began;
            if (n >= WARM_UP) times.push_back(passed.count());
        }
        std::sort(times.begin(), times.end());
        std::printf("%lld %lld\n", static_cast<long long>(times[times.size() / 2]),
                    static_cast<long long>(times[times.size() * 9 / 10]));
    }
    return 0;
}
