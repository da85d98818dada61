// Only reads rows: a line of each of a few in turn, prefetching rows of a later turn meanwhile.
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

// What a thread reads in a call. Turn p reads rows row[p * streams ...]; layer l ends at turn end[l].
typedef struct {
    const uint8_t* const* row;
    const int64_t* end;
    int64_t layers, streams, bytes;
    int64_t ahead;  // turns
    int64_t hint;   // 1, 2: prefetch to that cache; 0: do not
} Work;

typedef struct {
    const Work* work;
    int threads, self;
} Thread;

typedef int32_t Line __attribute__((vector_size(64), aligned(1), may_alias));
static _Atomic int64_t arrived;
volatile int32_t sink;

static void wait_for_all(int64_t round, int threads) {
    ++arrived;
    for (int64_t i = 0; arrived < round * threads; ++i)
        if (i > 1000) sched_yield();
}

// `streams` and `hint` are constants where this is inlined.
static inline __attribute__((always_inline)) Line turn(const Work* w, int64_t p, int64_t streams,
                                                       int64_t hint, Line sum) {
    const uint8_t *const *row = w->row + p * streams, *const *next = row + w->ahead * streams;
    if (p + w->ahead >= w->end[w->layers - 1]) next = row;
    for (int64_t at = 0; at < w->bytes; at += 64)
        for (int64_t i = 0; i < streams; ++i) {
            if (hint == 1) __builtin_prefetch(next[i] + at);
            if (hint == 2) __builtin_prefetch(next[i] + at, 0, 2);
            sum += *(const Line*)(row[i] + at);
        }
    return sum;
}

static void* read_all(void* argument) {
    const Thread* thread = argument;
    const Work* w = thread->work + thread->self;
    Line sum = {0};
    int64_t p = 0;
    wait_for_all(1, thread->threads);
    for (int64_t l = 0; l < w->layers; ++l) {
        for (; p < w->end[l]; ++p) switch (w->streams * 4 + w->hint) {
#define CASE(STREAMS, HINT) case STREAMS * 4 + HINT: sum = turn(w, p, STREAMS, HINT, sum); break;
#define CASES(STREAMS) CASE(STREAMS, 0) CASE(STREAMS, 1) CASE(STREAMS, 2)
                CASES(1) CASES(4) CASES(8) CASES(16)
            }
        wait_for_all(l + 2, thread->threads);
    }
    sink += sum[0];
    return 0;
}

// Seconds in which all threads have read their rows; after each layer they wait for each other.
double read_rows(const Work* work, int threads) {
    pthread_t handle[64];
    Thread thread[64];
    struct timespec begin, end;
    arrived = 0;
    for (int t = threads - 1; t >= 0; --t) {
        thread[t] = (Thread){work, threads, t};
        if (t > 0) pthread_create(&handle[t], 0, read_all, &thread[t]);
    }
    while (arrived < threads - 1) sched_yield();
    clock_gettime(CLOCK_MONOTONIC, &begin);
    read_all(&thread[0]);
    clock_gettime(CLOCK_MONOTONIC, &end);
    for (int t = 1; t < threads; ++t) pthread_join(handle[t], 0);
    return (end.tv_sec - begin.tv_sec) + 1e-9 * (end.tv_nsec - begin.tv_nsec);
}
