// A thread pool used instead of OpenMP, whose threads spin between calls and compete with torch's.
//
// The caller publishes a job in one line of cache. Every thread owns one more line, with a word that says
// which part of which job is left to it; the part of a thread that has not come yet follows from the
// number of the job, so nobody has to write it. A thread comes by taking from its own word, and leaves by
// a store to it; the caller looks at all words. So no line is written by all threads, and a thread that
// comes late, or not at all on a busy machine, costs nothing: its part is taken like any other.
//
// An idle thread spins for a while, so that the short jobs of a decode step need no system call, and then
// sleeps. Threads that outnumber the processors do not spin.
#include "thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#ifdef __linux__
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr size_t APART = 128;  // bytes; Intel's processors prefetch pairs of lines

alignas(APART) std::atomic<int> spin_time{PAUSE_TIME};  // microseconds

// Sleeps until the value is no longer `old`, or for no reason.
void sleep_while(const uint32_t* value, uint32_t old) {
#ifdef __linux__
    syscall(SYS_futex, value, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
#else
    if (__atomic_load_n(value, __ATOMIC_SEQ_CST) == old)
        std::this_thread::sleep_for(std::chrono::microseconds(100));
#endif
}

void wake([[maybe_unused]] const uint32_t* value, [[maybe_unused]] int count) {
#ifdef __linux__
    syscall(SYS_futex, value, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
#endif
}

// The processor that this thread runs on; -1 if unknown.
int processor_here() {
#ifdef __linux__
    return sched_getcpu();
#else
    return -1;
#endif
}

// Returns true as soon as `ready()` does, false after the spin time. After PAUSE_TIME, or as soon as
// `should_yield()`, it lets other threads of its processor run, of which one may be the one that it waits for.
template <class Ready, class Yield>
bool spin_until(const Ready& ready, const Yield& should_yield) {
    using std::chrono::microseconds, std::chrono::steady_clock;
    const auto start = steady_clock::now();
    auto passed = microseconds(0);
    do {
        const bool yields = passed >= microseconds(PAUSE_TIME) || should_yield();
        for (int i = 0; i < 16; ++i) {
            if (ready()) return true;
            if (yields)
                std::this_thread::yield();
            else
                spin_once();
        }
        passed = std::chrono::duration_cast<microseconds>(steady_clock::now() - start);
    } while (passed < microseconds(spin_time));
    return ready();
}

// Jobs are numbered modulo 2^31. Their work is counted in units, of which a job has at most MOST_UNITS.
constexpr uint32_t NUMBERS = 1u << 31;
constexpr int64_t MOST_UNITS = 0xffff;

// What every thread must know of a job to find its part.
struct Announced {
    uint32_t number, units, least;  // least: units of the shortest piece

    bool is_end() const { return units == 0; }  // of the pool

    static Announced of(uint64_t packed) {
        return {static_cast<uint32_t>(packed), static_cast<uint32_t>(packed >> 32 & 0xffff),
                static_cast<uint32_t>(packed >> 48)};
    }
    uint64_t packed() const {
        return static_cast<uint64_t>(least) << 48 | static_cast<uint64_t>(units) << 32 | number;
    }
};

// A thread's word: units of a job that nobody has begun, and whether the thread is inside the job. Only
// the thread takes from the front and goes in and out; others take from the back.
struct Part {
    uint32_t job;
    bool is_inside;
    uint32_t begin, end;

    static Part of(uint64_t packed) {
        return {static_cast<uint32_t>(packed >> 33), (packed >> 32 & 1) != 0,
                static_cast<uint32_t>(packed >> 16 & 0xffff), static_cast<uint32_t>(packed & 0xffff)};
    }
    uint64_t packed() const {
        return static_cast<uint64_t>(job) << 33 | static_cast<uint64_t>(is_inside) << 32 | begin << 16 |
               end;
    }
    uint32_t length() const { return end - begin; }
};
struct alignas(APART) Word {
    std::atomic<uint64_t> packed{0};
};

// All atomics are sequentially consistent: in each hand-over below, one side writes A and reads B while
// the other writes B and reads A, and at least one must see the other's write.
class Pool {
  public:
    Pool(int threads, int processors) : words_(threads), is_crowded_(threads > processors) {
        try {
            while (num_threads() < threads)
                workers_.emplace_back([this, self = num_threads()] { work(self); });
        } catch (const std::system_error&) {  // fewer threads give the same results
        }
        num_threads_ = static_cast<uint32_t>(num_threads());
    }

    ~Pool() {
        announce({next(), 0, 0}, INT_MAX);
        for (std::thread& worker : workers_) worker.join();
    }

    int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

    // `least`: the shortest length of a piece in grains, unless less is left of its part.
    void run(int64_t n, int64_t grain, int64_t least, RangeBody* body, const void* context) {
        const int64_t grains = (n + grain - 1) / grain;
        const int64_t together = (grains + MOST_UNITS - 1) / MOST_UNITS;
        const Announced job = {next(), static_cast<uint32_t>((grains + together - 1) / together),
                               static_cast<uint32_t>((least + together - 1) / together)};
        // No thread reads these before it is inside the new job, and none is inside the last one.
        job_.body = body, job_.context = context, job_.n = n, job_.grain = grain * together;
        job_.processor = processor_here();
        announce(job, WOKEN);
        help(0, job);
        for (uint32_t i = 1; i < num_threads_; ++i) wait_for(i, job);
    }

  private:
    // Threads that a thread wakes: each that wakes does the same, so none makes system calls for all.
    static constexpr int WOKEN = 2;

    uint32_t next() const { return (Announced::of(job_.announced).number + 1) % NUMBERS; }

    void announce(const Announced& job, int woken) {
        job_.announced = job.packed();
        // After this, every thread either is asleep or sees the new job.
        if (num_asleep_ > 0) wake(number(), woken);
    }

    // The address of the job's number.
    const uint32_t* number() const {
        return reinterpret_cast<const uint32_t*>(&job_.announced) +
               (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__);
    }

    // What is left to thread i of a job; all of its part if its word is of an earlier job.
    Part part_of(uint64_t word, uint32_t i, const Announced& job) const {
        const Part part = Part::of(word);
        if (part.job == job.number) return part;
        const uint64_t units = job.units;
        return {job.number, false, static_cast<uint32_t>(i * units / num_threads_),
                static_cast<uint32_t>((i + 1) * units / num_threads_)};
    }

    // Goes into the newest job by taking the first piece of its part; false if nothing is left of that.
    bool enter(uint32_t self, Announced& job) {
        std::atomic<uint64_t>& own = words_[self].packed;
        for (;;) {
            // In this order the word cannot be of a later job. A job ends only when all words have
            // changed, so if this one has not, the job has not ended either.
            uint64_t word = own;
            job = Announced::of(job_.announced);
            const Part left = part_of(word, self, job);
            if (left.length() == 0) return false;
            if (take(own, word, left, job)) return true;
        }
    }

    // Takes a piece from the front of a part by the thread that owns it, and computes it.
    bool take(std::atomic<uint64_t>& own, uint64_t word, const Part& left, const Announced& job) {
        const uint32_t middle =
            left.begin + std::min(left.length(), std::max(job.least, left.length() / 2));
        if (!own.compare_exchange_weak(word, Part{job.number, true, middle, left.end}.packed()))
            return false;
        const int64_t begin = left.begin * job_.grain, end = middle * job_.grain;
        job_.body(job_.context, begin, std::min(end, job_.n));
        return true;
    }

    // Computes pieces of a job until none is left to begin. A part is taken by halves, but at least
    // `least` units, so a thread reads memory in order and prefetches across pieces. One that has none
    // left takes half of the longest part of another (work stealing), or all of a short one, so all
    // finish at about the same time, whatever their speeds.
    void help(uint32_t self, const Announced& job) {
        std::atomic<uint64_t>& own = words_[self].packed;
        do {
            for (uint64_t word = own;; word = own) {
                const Part left = part_of(word, self, job);
                if (left.length() == 0) break;
                take(own, word, left, job);
            }
        } while (steal(self, job));
    }

    // Moves half of the longest part, or all of a short one, to thread `self`, which is inside the job
    // and has nothing left; false if nobody has.
    bool steal(uint32_t self, const Announced& job) {
        for (;;) {
            std::atomic<uint64_t>* longest = nullptr;
            uint64_t word = 0;
            Part most = {};
            for (uint32_t i = 0; i < num_threads_; ++i) {
                const uint64_t other = words_[i].packed;
                const Part part = part_of(other, i, job);
                if (part.length() > most.length())
                    longest = &words_[i].packed, word = other, most = part;
            }
            if (!longest) return false;
            const uint32_t kept = most.length() > job.least ? most.length() / 2 : 0;
            const uint32_t middle = most.begin + kept;
            if (!longest->compare_exchange_weak(
                    word, Part{job.number, most.is_inside, most.begin, middle}.packed()))
                continue;
            words_[self].packed = Part{job.number, true, middle, most.end}.packed();
            return true;
        }
    }

    // Waits until thread i is out of a job and has nothing left: then it cannot come any more.
    void wait_for(uint32_t i, const Announced& job) {
        auto state = [&] { return part_of(words_[i].packed, i, job); };
        auto is_news = [&] { return !state().is_inside || state().length() > 0; };
        for (;;) {
            if (!spin_until(is_news, [this] { return is_crowded_; })) {
                caller_sleeps_ = true;
                for (uint32_t left = num_left_; !is_news(); left = num_left_)
                    sleep_while(address(num_left_), left);
                caller_sleeps_ = false;
            }
            const Part part = state();
            if (part.length() > 0)
                help(0, job);
            else if (!part.is_inside)
                return;
        }
    }

    void leave(uint32_t self, const Announced& job) {
        words_[self].packed = Part{job.number, false, 0, 0}.packed();
        if (!caller_sleeps_) return;
        ++num_left_;
        wake(address(num_left_), 1);
    }

    void work(uint32_t self) {
        for (uint32_t seen = 0;;) {
            auto news = [&] { return Announced::of(job_.announced).number != seen; };
            // A thread that the system has woken on the caller's processor gives it back to it.
            auto is_in_the_way = [this] { return is_crowded_ || processor_here() == job_.processor; };
            if (!spin_until(news, is_in_the_way)) {
                ++num_asleep_;
                while (!news()) sleep_while(number(), seen);
                if (--num_asleep_ > 0) wake(number(), WOKEN);
            }
            Announced job;
            const bool is_inside = enter(self, job);
            if (job.is_end()) return;
            seen = job.number;
            if (!is_inside) continue;
            help(self, job);
            leave(self, job);
        }
    }

    const uint32_t* address(const std::atomic<uint32_t>& value) const {
        return reinterpret_cast<const uint32_t*>(&value);
    }

    // The only line that every job changes and every thread reads.
    struct alignas(APART) {
        std::atomic<uint64_t> announced{0};
        std::atomic<int> processor{-1};  // that the caller ran on
        RangeBody* body = nullptr;
        const void* context = nullptr;
        int64_t n = 0, grain = 1;
    } job_;
    alignas(APART) std::atomic<uint32_t> num_asleep_{0}, num_left_{0};
    std::atomic<bool> caller_sleeps_{false};
    alignas(APART) std::vector<Word> words_;  // of thread i; the caller is thread 0
    const bool is_crowded_;                   // by threads of its own
    uint32_t num_threads_ = 1;
    std::vector<std::thread> workers_;
};

// Held by the one caller whose job the pool is running, and while the pool is created or replaced. No thread
// of the pool looks at it.
alignas(APART) std::mutex caller_mutex;

// Created at the first use. Only set_threads destroys it, so its threads may run until the process
// ends.
Pool* pool = nullptr;
int wanted_threads = 1, processors = 1;

// A forked child has none of its parent's threads, so it creates its own pool.
[[maybe_unused]] const int fork_handler = pthread_atfork(nullptr, nullptr, [] {
    new (&caller_mutex) std::mutex;
    pool = nullptr;
});

Pool& the_pool() {
    if (!pool) pool = new Pool(wanted_threads, processors);
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

void set_default_threads(int num_threads, int num_processors) {
    std::lock_guard<std::mutex> lock(caller_mutex);
    if (!pool) wanted_threads = num_threads, processors = num_processors;
}

bool set_threads(int num_threads, int num_processors) {
    std::lock_guard<std::mutex> lock(caller_mutex);
    const bool is_same = pool && pool->num_threads() == num_threads && processors == num_processors;
    wanted_threads = num_threads, processors = num_processors;
    if (is_same) return true;
    delete pool;
    pool = nullptr;
    return the_pool().num_threads() == num_threads;
}

void set_spin_time(int microseconds) { spin_time = microseconds; }
