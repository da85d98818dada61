// The CPU's side of gpu_handover.py: a thread pool like the runtime's, a job that notes when it runs,
// and a server that waits for flags.
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Workers spin (pause for 50 us, then yield if `yields`), then sleep. Chunks are taken by a counter.
// The caller is thread 0, and waits only for workers inside the job.
typedef struct {
    int threads, spin_us, yields;
    _Atomic unsigned long round;
    _Atomic int inside, asleep, open, stop;
    _Atomic long next;
    long chunks, floats;
    const float* data;
    volatile float sink;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    pthread_t* handles;
} Pool;

static int spin(Pool* p, unsigned long seen, int for_round) {
    const uint64_t begin = now();
    uint64_t passed = 0;
    do {
        for (int i = 0; i < 16; ++i) {
            if (for_round ? p->round != seen : p->inside == 0) return 1;
            if (passed < 50000 || !p->yields) {
                relax();
            } else {
                sched_yield();
            }
        }
        passed = now() - begin;
    } while (!for_round || passed < 1000ull * p->spin_us);
    return 0;
}

static void take(Pool* p) {
    float sum = 0;
    for (long k; (k = p->next++) < p->chunks;) {
        const long a = k * p->floats / p->chunks, b = (k + 1) * p->floats / p->chunks;
        float part[16] = {0};
        for (long i = a; i + 16 <= b; i += 16)
            for (int j = 0; j < 16; ++j) part[j] += p->data[i + j];
        for (int j = 0; j < 16; ++j) sum += part[j];
    }
    p->sink = sum;
}

static void* work(void* argument) {
    Pool* p = argument;
    for (unsigned long seen = 0;;) {
        if (!spin(p, seen, 1)) {
            pthread_mutex_lock(&p->mutex);
            ++p->asleep;
            while (p->round == seen) pthread_cond_wait(&p->changed, &p->mutex);
            --p->asleep;
            pthread_mutex_unlock(&p->mutex);
        }
        seen = p->round;
        if (p->stop) return 0;
        ++p->inside;
        if (p->open) take(p);
        --p->inside;
    }
}

static void announce(Pool* p) {
    pthread_mutex_lock(&p->mutex);
    ++p->round;
    pthread_mutex_unlock(&p->mutex);
    if (p->asleep) pthread_cond_broadcast(&p->changed);
}

void* hb_pool(int threads, int spin_us, int yields, const float* data) {
    Pool* p = calloc(1, sizeof *p);
    p->threads = threads, p->spin_us = spin_us, p->yields = yields;
    p->data = data, p->chunks = 8 * threads;
    pthread_mutex_init(&p->mutex, 0);
    pthread_cond_init(&p->changed, 0);
    p->handles = calloc(threads, sizeof *p->handles);
    for (int i = 1; i < threads; ++i) pthread_create(p->handles + i, 0, work, p);
    return p;
}

void hb_pool_free(Pool* p) {
    p->stop = 1;
    announce(p);
    for (int i = 1; i < p->threads; ++i) pthread_join(p->handles[i], 0);
    free(p->handles);
    free(p);
}

static void run(Pool* p, long floats) {
    p->floats = floats, p->next = 0, p->open = 1;
    announce(p);
    take(p);
    p->open = 0;
    spin(p, 0, 0);
}

// Field by field in host.py.
typedef struct {
    Pool* pool;
    long floats;  // that the pool reads
    volatile float *x, *y;
    uint64_t *enter, *leave;  // times in ns [capacity]
    long count, capacity;
    long tid, policy, nice, affinity;  // of the first thread that called
} Job;

void hb_job(void* argument) {
    Job* j = argument;
    const long k = j->count < j->capacity ? j->count : j->capacity - 1;
    j->enter[k] = now();
    if (j->pool) run(j->pool, j->floats);
    for (int i = 0; i < 16; ++i) j->y[i] = j->x[i] + 1.0f;
    j->leave[k] = now();
    ++j->count;
    if (!j->tid) {
        cpu_set_t set;
        j->tid = syscall(SYS_gettid), j->policy = sched_getscheduler(0);
        j->nice = getpriority(PRIO_PROCESS, j->tid);
        if (!sched_getaffinity(0, sizeof set, &set)) j->affinity = CPU_COUNT(&set);
    }
}

// Serves the flags of n layers in order; returns how many were served before one was missing for
// limit_ns. Afterwards all are done, so that nothing waits for ever.
int hb_serve(_Atomic uint32_t* ready, _Atomic uint32_t* done, int stride, int n, Job* j,
             uint64_t limit_ns) {
    int served = 0;
    for (; served < n; ++served) {
        const uint64_t begin = now();
        int late = 0;
        while (!atomic_load_explicit(ready + served * stride, memory_order_acquire) && !late) {
            relax();
            late = now() - begin > limit_ns;
        }
        if (late) break;
        hb_job(j);
        atomic_store_explicit(done + served * stride, 1, memory_order_release);
    }
    for (int k = served; k < n; ++k)
        atomic_store_explicit(done + k * stride, 1, memory_order_release);
    return served;
}

// Round trips that the CPU begins: sets a flag to 1..n and waits until the other has the same value.
// times [2 n]: ns before and after each. Returns how many were answered.
int hb_ping(_Atomic uint32_t* there, _Atomic uint32_t* back, int n, uint64_t* times,
            uint64_t limit_ns) {
    for (int i = 1; i <= n; ++i) {
        times[2 * i - 2] = now();
        atomic_store_explicit(there, i, memory_order_release);
        while (atomic_load_explicit(back, memory_order_acquire) != (uint32_t)i) {
            relax();
            if (now() - times[2 * i - 2] > limit_ns) return i - 1;
        }
        times[2 * i - 1] = now();
    }
    return n;
}

// Keeps n cores awake until the next call.
enum { MOST_SPINNERS = 1024 };
static _Atomic int keep_awake;
static pthread_t spinners[MOST_SPINNERS];
static int num_spinners;

static void* stay_awake(void* argument) {
    while (keep_awake) relax();
    return argument;
}

void hb_awake(int n) {
    keep_awake = 0;
    for (int i = 0; i < num_spinners; ++i) pthread_join(spinners[i], 0);
    num_spinners = n < MOST_SPINNERS ? n : MOST_SPINNERS;
    keep_awake = num_spinners > 0;
    for (int i = 0; i < num_spinners; ++i) pthread_create(spinners + i, 0, stay_awake, 0);
}
