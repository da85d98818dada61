// See drive.h.
#include "drive.h"

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>

namespace {

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

#ifdef __APPLE__
int64_t modified_ns(const struct stat& s) {
    return s.st_mtimespec.tv_sec * INT64_C(1000000000) + s.st_mtimespec.tv_nsec;
}
#else
int64_t modified_ns(const struct stat& s) {
    return s.st_mtim.tv_sec * INT64_C(1000000000) + s.st_mtim.tv_nsec;
}
#endif

}  // namespace

DriveReader::DriveReader(HsDrive& drive) : drive_(drive), left_(drive.num_buffers, 0) {
    for (int64_t b = drive.num_buffers - 1; b >= 0; --b) free.push_back(static_cast<int32_t>(b));
    try {
        for (int64_t i = 0; i < drive.num_threads; ++i)
            threads_.emplace_back([this, i] { serve(static_cast<unsigned>(i + 1)); });
    } catch (const std::system_error&) {  // with some of them reads are only slower
        if (threads_.empty()) throw;
    }
}

DriveReader::~DriveReader() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        is_ending_ = true;
    }
    requested_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void DriveReader::request(const HsArriving& a, int32_t e, int32_t buffer) {
    uint8_t* to = drive_.buffer + buffer * drive_.buffer_bytes;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!num_pending_) began_ns_ = now_ns();
        for (const HsStack* s : {&a.gate, &a.up, &a.down}) {
            const int64_t bytes = stack_bytes(*s);
            if (!bytes) continue;
            queue_.push_back({s->offset + e * s->stride, bytes, to, s->file, buffer});
            to += read_room(bytes);
            ++left_[buffer], ++num_pending_;
        }
    }
    requested_.notify_all();
}

void DriveReader::take(bool waits, std::vector<int32_t>& filled) {
    filled.clear();
    std::unique_lock<std::mutex> lock(mutex_);
    if (waits && filled_.empty()) {
        const int64_t began = now_ns();
        filled_now_.wait(lock, [this] { return !filled_.empty(); });
        drive_.waiting_ns += now_ns() - began;
    }
    filled.swap(filled_);
}

void DriveReader::serve(unsigned seed) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        requested_.wait(lock, [this] { return is_ending_ || !queue_.empty(); });
        if (queue_.empty()) return;
        const Request request = queue_.front();
        queue_.pop_front();
        const bool is_lost = drive_.error != 0;
        lock.unlock();
        const int32_t error = is_lost ? 0 : read(request);
        if (drive_.delay_us)
            std::this_thread::sleep_for(std::chrono::microseconds(rand_r(&seed) % drive_.delay_us));
        lock.lock();
        if (error && !drive_.error) drive_.error = error, drive_.failed_file = request.file;
        if (!error && !is_lost) drive_.bytes_read += request.bytes;
        if (!--num_pending_) drive_.reading_ns += now_ns() - began_ns_;
        if (--left_[request.buffer]) continue;
        filled_.push_back(request.buffer);
        filled_now_.notify_one();
    }
}

// Reads the aligned bytes around those that are wanted; 0, an errno or READ_CHANGED.
int32_t DriveReader::read(const Request& r) const {
    const int fd = drive_.file[r.file];
    const int64_t begin = r.offset / READ_ALIGNMENT * READ_ALIGNMENT, needed = r.offset + r.bytes;
    const int64_t end = (needed + READ_ALIGNMENT - 1) / READ_ALIGNMENT * READ_ALIGNMENT;
    for (int64_t at = begin; at < needed;) {
        const ssize_t count = pread(fd, r.to + (at - begin), end - at, at);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) return errno;
        at += count;
        if (!count || (at < needed && at % READ_ALIGNMENT)) return READ_CHANGED;  // the file's end
    }
    struct stat now;
    if (fstat(fd, &now)) return errno;
    const bool is_same =
        now.st_size == drive_.size[r.file] && modified_ns(now) == drive_.modified_ns[r.file];
    return is_same ? 0 : READ_CHANGED;
}

EXPORT int32_t hs_open_drive(HsDrive* drive) {
    try {
        drive->reader = new DriveReader(*drive);
    } catch (const std::system_error&) {
        return STATUS_NO_THREADS;
    } catch (const std::bad_alloc&) {
        return STATUS_NO_MEMORY;
    }
    return STATUS_OK;
}

EXPORT void hs_close_drive(HsDrive* drive) {
    delete static_cast<DriveReader*>(drive->reader);
    drive->reader = nullptr;
}
