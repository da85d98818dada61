// A thread pool used instead of OpenMP, whose threads spin between calls and compete with torch's.
//
// An idle worker spins for a while (spin_time), so that the short jobs of a decode step need no system
// call, and then sleeps. The caller waits only for workers that have begun a job, so a late worker on a busy
// machine costs nothing.
#include "thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace {

std::atomic<int> spin_time{PAUSE_TIME};  // microseconds

// Returns true as soon as `ready()` does, false after the spin time. After PAUSE_TIME it lets other threads
// of its processor run, of which one may be the thread that it waits for.
template <class Ready>
bool spin_until(const Ready& ready) {
    using std::chrono::microseconds, std::chrono::steady_clock;
    const auto start = steady_clock::now();
    auto passed = microseconds(0);
    do {
        for (int i = 0; i < 16; ++i) {
            if (ready()) return true;
            if (passed < microseconds(PAUSE_TIME))
                spin_once();
            else
                std::this_thread::yield();
        }
        passed = std::chrono::duration_cast<microseconds>(steady_clock::now() - start);
    } while (passed < microseconds(spin_time));
    return ready();
}

// Part of a job that a thread has not begun, in units of the job's grain. Only its thread takes from the
// front; others take from the back.
struct Range {
    uint32_t begin, end;

    uint32_t length() const { return end - begin; }
};
struct alignas(64) SharedRange {
    std::atomic<uint64_t> packed{0};

    static uint64_t pack(Range range) { return static_cast<uint64_t>(range.begin) << 32 | range.end; }
    static Range unpack(uint64_t packed) {
        return {static_cast<uint32_t>(packed >> 32), static_cast<uint32_t>(packed)};
    }
};

// All atomics are sequentially consistent: in each hand-over below, one side writes A and reads B while
// the other writes B and reads A, and at least one must see the other's write.
class Pool {
  public:
    explicit Pool(int threads) : ranges_(threads) {
        try {
            while (num_threads() < threads)
                workers_.emplace_back([this, self = num_threads()] { work(self); });
        } catch (const std::system_error&) {  // fewer threads give the same results
        }
    }

    ~Pool() {
        stop_ = true;
        announce();
        for (std::thread& worker : workers_) worker.join();
    }

    int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

    // `least`: the shortest length of a piece in grains, unless less is left of its range.
    void run(int64_t n, int64_t grain, int64_t least, RangeBody* body, const void* context) {
        // No worker reads these: the last job is closed and no worker is inside it.
        body_ = body, context_ = context, n_ = n, grain_ = grain, least_ = static_cast<uint32_t>(least);
        const int64_t grains = (n + grain - 1) / grain, threads = num_threads();
        for (int64_t i = 0; i < threads; ++i)
            ranges_[i].packed = SharedRange::pack({static_cast<uint32_t>(i * grains / threads),
                                                   static_cast<uint32_t>((i + 1) * grains / threads)});
        is_open_ = true;
        announce();
        take_pieces(0);
        is_open_ = false;
        auto all_out = [this] { return num_inside_ == 0; };
        if (spin_until(all_out)) return;
        std::unique_lock<std::mutex> lock(mutex_);
        caller_sleeps_ = true;
        sleep_until(done_, lock, all_out);
        caller_sleeps_ = false;
    }

  private:
    void announce() {
        ++round_;
        if (num_asleep_ == 0) return;
        // After this, every worker either is asleep or sees the new round.
        {
            std::lock_guard<std::mutex> lock(mutex_);
        }
        start_.notify_all();
    }

    // Each thread starts with an equal range and takes half of what is left of it at a time, but at
    // least `least_` grains, so it reads memory in order and prefetches across pieces. A thread whose
    // range is empty takes half of the longest range of another (work stealing), or all of a short one,
    // so all finish at about the same time.
    void take_pieces(int self) {
        do {
            std::atomic<uint64_t>& own = ranges_[self].packed;
            for (uint64_t packed = own;;) {
                const Range left = SharedRange::unpack(packed);
                if (left.length() == 0) break;
                const uint32_t count = std::min(left.length(), std::max(least_, left.length() / 2));
                if (!own.compare_exchange_weak(packed,
                                               SharedRange::pack({left.begin + count, left.end})))
                    continue;
                const int64_t end = (left.begin + static_cast<int64_t>(count)) * grain_;
                body_(context_, left.begin * grain_, std::min(end, n_));
                packed = own;
            }
        } while (steal(self));
    }

    // Moves half of the longest range, or all of a short one, into the empty range of thread `self`; false
    // if all are empty.
    bool steal(int self) {
        for (;;) {
            SharedRange* longest = nullptr;
            uint64_t packed = 0;
            for (int i = 0; i < num_threads(); ++i) {
                const uint64_t found = ranges_[i].packed;
                if (SharedRange::unpack(found).length() > SharedRange::unpack(packed).length())
                    longest = &ranges_[i], packed = found;
            }
            if (!longest) return false;
            const Range left = SharedRange::unpack(packed);
            const uint32_t kept = left.length() > least_ ? left.length() / 2 : 0;
            const uint32_t middle = left.begin + kept;
            if (!longest->packed.compare_exchange_weak(packed, SharedRange::pack({left.begin, middle})))
                continue;
            ranges_[self].packed = SharedRange::pack({middle, left.end});
            return true;
        }
    }

    void work(int self) {
        for (uint64_t seen = 0;;) {
            auto news = [&] { return round_ != seen; };
            if (!spin_until(news)) {
                std::unique_lock<std::mutex> lock(mutex_);
                ++num_asleep_;
                sleep_until(start_, lock, news);
                --num_asleep_;
            }
            seen = round_;
            if (stop_) return;
            ++num_inside_;
            if (is_open_) take_pieces(self);
            if (--num_inside_ == 0 && caller_sleeps_) {
                {
                    std::lock_guard<std::mutex> lock(mutex_);
                }
                done_.notify_one();
            }
        }
    }

    std::mutex mutex_;
    std::condition_variable start_, done_;
    RangeBody* body_ = nullptr;
    const void* context_ = nullptr;
    int64_t n_ = 0, grain_ = 1;
    uint32_t least_ = 1;
    std::vector<SharedRange> ranges_;  // of thread i; the caller is thread 0
    std::atomic<uint64_t> round_{0};
    std::atomic<int> num_inside_{0}, num_asleep_{0};
    std::atomic<bool> is_open_{false}, caller_sleeps_{false}, stop_{false};
    std::vector<std::thread> workers_;
};

// Held by the one caller whose job the pool is running, and while the pool is created or replaced.
std::mutex caller_mutex;

// Created at the first use. Only set_threads destroys it, so its threads may run until the process
// ends.
Pool* pool = nullptr;
int wanted_threads = 1;

// A forked child has none of its parent's threads, so it creates its own pool.
[[maybe_unused]] const int fork_handler = pthread_atfork(nullptr, nullptr, [] {
    new (&caller_mutex) std::mutex;
    pool = nullptr;
});

Pool& the_pool() {
    if (!pool) pool = new Pool(wanted_threads);
    return *pool;
}

}  // namespace

void parallel_for(int64_t n, int64_t grain, int64_t pieces_per_thread, RangeBody* body,
                  const void* context) {
    std::lock_guard<std::mutex> one_caller_at_a_time(caller_mutex);
    Pool& pool = the_pool();
    const int64_t pieces = pieces_per_thread * pool.num_threads();
    const int64_t grains = (n + grain - 1) / grain;
    const int64_t least = (grains + pieces - 1) / pieces;
    if (pool.num_threads() == 1 || grains <= least) return body(context, 0, n);
    pool.run(n, grain, least, body, context);
}

int num_threads() {
    std::lock_guard<std::mutex> lock(caller_mutex);
    return pool ? pool->num_threads() : wanted_threads;
}

void set_default_threads(int num_threads) {
    std::lock_guard<std::mutex> lock(caller_mutex);
    if (!pool) wanted_threads = num_threads;
}

bool set_threads(int num_threads) {
    std::lock_guard<std::mutex> lock(caller_mutex);
    wanted_threads = num_threads;
    if (pool && pool->num_threads() == num_threads) return true;
    delete pool;
    pool = nullptr;
    return the_pool().num_threads() == num_threads;
}

void set_spin_time(int microseconds) { spin_time = microseconds; }
