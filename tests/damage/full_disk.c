// Preloaded: writes to regular files fail with ENOSPC once `disk_left` bytes are written; -1 is no
// limit. A write that does not fit is cut short first, as file systems do.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

long disk_left = -1;

static long allowed(int file, size_t count) {
    struct stat found;
    if (disk_left < 0 || fstat(file, &found) || !S_ISREG(found.st_mode)) return (long)count;
    const long left = __atomic_load_n(&disk_left, __ATOMIC_RELAXED);
    const long taken = (long)count < left ? (long)count : left;
    __atomic_fetch_sub(&disk_left, taken, __ATOMIC_RELAXED);
    return taken;
}

ssize_t write(int file, const void* data, size_t count) {
    static ssize_t (*real)(int, const void*, size_t);
    if (!real) real = (ssize_t (*)(int, const void*, size_t))dlsym(RTLD_NEXT, "write");
    const long size = allowed(file, count);
    if (count && !size) return errno = ENOSPC, -1;
    return real(file, data, (size_t)size);
}

ssize_t writev(int file, const struct iovec* parts, int count) {
    ssize_t sum = 0;
    for (int i = 0; i < count; i++) {
        const ssize_t written = write(file, parts[i].iov_base, parts[i].iov_len);
        if (written < 0) return sum ? sum : -1;
        sum += written;
        if ((size_t)written < parts[i].iov_len) break;
    }
    return sum;
}

ssize_t pwrite64(int file, const void* data, size_t count, off64_t offset) {
    static ssize_t (*real)(int, const void*, size_t, off64_t);
    if (!real) real = (ssize_t (*)(int, const void*, size_t, off64_t))dlsym(RTLD_NEXT, "pwrite64");
    const long size = allowed(file, count);
    if (count && !size) return errno = ENOSPC, -1;
    return real(file, data, (size_t)size, offset);
}
