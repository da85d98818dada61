// Runs jobs on the thread pool while its threads are suspended at random: by a signal whose handler
// sleeps. Each value of a job must be computed once, while the job runs.
#include <dirent.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "thread_pool.h"

namespace {

using Clock = std::chrono::steady_clock;

std::atomic<int> num_suspended{0};
std::atomic<long> running{0};  // the number of the job that runs

void suspend(int) {
    const unsigned turn = static_cast<unsigned>(++num_suspended) * 2654435761u;
    timespec time = {0, static_cast<long>(turn >> 13) % 400'000};
    nanosleep(&time, nullptr);
}

struct Job {
    long number;
    std::vector<long>* computed;  // the number of the last job that computed a value
};

[[noreturn]] void fail(const char* what, long job, long value) {
    std::printf("job %ld: value %ld %s\n", job, value, what);
    std::fflush(stdout);
    _exit(1);
}

void run_one(std::mt19937& random, std::vector<long>& computed, long number) {
    const int64_t n = 1 + random() % (random() % 50 ? 600 : computed.size()), grain = 1 + random() % 5;
    const Job job = {number, &computed};
    running = number;
    parallel_for(n, grain, 1 + random() % 16, [&job, n, grain](int64_t begin, int64_t end) {
        const long mine = job.number;
        if (begin % grain || (end % grain && end != n) || begin >= end || end > n)
            fail("begins or ends a piece", mine, begin);
        for (int64_t i = begin; i < end; ++i) {
            if ((*job.computed)[i] == mine) fail("is computed twice", mine, i);
            (*job.computed)[i] = mine;
        }
        for (volatile int64_t wait = (end - begin) * 50; wait > 0;) wait = wait - 1;
        if (running != mine) fail("is computed after the job", mine, begin);
    });
    for (int64_t i = 0; i < n; ++i)
        if (computed[i] != number) fail("is not computed", number, i);
}

std::vector<int> threads_here() {
    std::vector<int> found;
    DIR* folder = opendir("/proc/self/task");
    while (const dirent* entry = readdir(folder))
        if (const int id = std::atoi(entry->d_name); id > 0) found.push_back(id);
    closedir(folder);
    return found;
}

}  // namespace

int main(int, char** words) {
    signal(SIGUSR1, suspend);
    std::mt19937 random(1);
    std::vector<long> computed(150'000);
    long number = 0;
    for (int threads : {2, 3, 4, 7, 16}) {
        set_spin_time(threads % 3 ? 20 : 0);
        if (!set_threads(threads, std::atoi(words[2]))) return 2;
        std::atomic<bool> ends{false};
        std::thread suspender([&] {
            std::mt19937 random(2);
            const std::vector<int> threads = threads_here();
            const int self = static_cast<int>(syscall(SYS_gettid));
            while (!ends) {
                const int id = threads[random() % threads.size()];
                if (id != self) syscall(SYS_tgkill, getpid(), id, SIGUSR1);
                std::this_thread::sleep_for(std::chrono::microseconds(random() % 150));
            }
        });
        const auto end = Clock::now() + std::chrono::milliseconds(std::atoi(words[1]));
        while (Clock::now() < end) run_one(random, computed, ++number);
        ends = true;
        suspender.join();
    }
    std::printf("%ld jobs, %d suspensions\n", number, num_suspended.load());
    return 0;
}
