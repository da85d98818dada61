#include "row_copies.h"

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

namespace {

// std::condition_variable's own wait, as gcc 12 compiles it, is missing in older C++ libraries.
template <class Ready>
void sleep_until(std::condition_variable& news, std::unique_lock<std::mutex>& lock,
                 const Ready& ready) {
    while (!ready()) pthread_cond_wait(news.native_handle(), lock.mutex()->native_handle());
}

using Clock = std::chrono::steady_clock;

void copy(const HsCopies& copies) {
    for (int64_t i = 0; i < copies.count; ++i) {
        const HsCopy& one = copies.copy[i];
        std::memcpy(one.to, one.from, one.num_bytes);
    }
}

}  // namespace

struct HsCopier {
    HsCopier() {
        try {
            thread_ = std::thread([this] { work(); });
        } catch (const std::system_error&) {  // finish() then makes the copies
        }
    }

    ~HsCopier() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
        }
        wanted_.notify_all();
        if (thread_.joinable()) thread_.join();
    }

    void start(const HsCopies* copies, double seconds) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            waiting_ = copies;
            end_ = Clock::now() +
                   std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
        }
        wanted_.notify_one();
    }

    void finish() {
        std::unique_lock<std::mutex> lock(mutex_);
        const HsCopies* mine = waiting_;
        waiting_ = nullptr;
        sleep_until(done_, lock, [this] { return !is_running_; });
        lock.unlock();
        if (mine) copy(*mine);
        std::this_thread::sleep_until(end_);
    }

  private:
    void work() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            sleep_until(wanted_, lock, [this] { return stop_ || waiting_; });
            if (stop_) return;
            const HsCopies* mine = waiting_;
            waiting_ = nullptr, is_running_ = true;
            lock.unlock();
            copy(*mine);
            lock.lock();
            is_running_ = false;
            done_.notify_one();
        }
    }

    std::mutex mutex_;
    std::condition_variable wanted_, done_;
    const HsCopies* waiting_ = nullptr;  // copies that have not begun
    bool is_running_ = false, stop_ = false;
    Clock::time_point end_{};
    std::thread thread_;
};

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void hs_copy_rows(void* data) { copy(*static_cast<const HsCopies*>(data)); }

EXPORT HsCopier* hs_copier_new() { return new (std::nothrow) HsCopier; }

EXPORT void hs_copier_start(HsCopier* copier, const HsCopies* copies, double seconds) {
    copier->start(copies, seconds);
}

EXPORT void hs_copier_finish(HsCopier* copier) { copier->finish(); }

EXPORT void hs_copier_free(HsCopier* copier) { delete copier; }
