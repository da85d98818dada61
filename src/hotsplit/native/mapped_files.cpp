// Ends the process in one line where a library or the system would kill it: both handlers remove the
// files set by hs_set_unfinished, and call only async-signal-safe functions.
//
// Touching a page of a mapped file beyond the end to which the file was truncated raises SIGBUS, in
// whichever thread and library touches it. This handler prints the file's name, from
// /proc/self/maps.
//
// Rust's libraries, and C++ that does not catch, abort where memory or threads run out.

#include <atomic>
#include <cstdint>
#include <cstring>
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

namespace {

constexpr int EXIT_CODE = 74;  // sysexits.h: EX_IOERR
constexpr int ABORTED = 1;     // as other failures for want of memory
constexpr int MAX_UNFINISHED = 16;
constexpr size_t PATH_BYTES = 4096;

char unfinished[MAX_UNFINISHED][PATH_BYTES];
std::atomic<int> num_unfinished{0};
std::atomic_flag is_ending = ATOMIC_FLAG_INIT;
char line[2 * PATH_BYTES];  // of /proc/self/maps

// Reads one line of the file into `line`, without the newline; false at the end of the file.
bool read_line(int file) {
    static char block[4096];
    static ssize_t begin = 0, end = 0;
    size_t length = 0;
    for (;;) {
        if (begin == end) {
            begin = 0;
            end = read(file, block, sizeof block);
            if (end <= 0) return false;
        }
        const char next = block[begin++];
        if (next == '\n') break;
        if (length + 1 < sizeof line) line[length++] = next;
    }
    line[length] = 0;
    return true;
}

const char* hexadecimal(const char* text, uintptr_t& value) {
    value = 0;
    for (;; text++) {
        if (*text >= '0' && *text <= '9')
            value = 16 * value + (*text - '0');
        else if (*text >= 'a' && *text <= 'f')
            value = 16 * value + (*text - 'a' + 10);
        else
            return text;
    }
}

// The name of the file mapped at an address; null if there is none.
const char* file_at(uintptr_t address) {
    const int maps = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    if (maps < 0) return nullptr;
    while (read_line(maps)) {
        uintptr_t begin, end;
        const char* rest = hexadecimal(line, begin);
        hexadecimal(rest + 1, end);
        if (address >= begin && address < end) return strchr(line, '/');
    }
    return nullptr;
}

void say(const char* text) {
    if (write(STDERR_FILENO, text, strlen(text)) < 0) return;
}

[[noreturn]] void end(int exit_code) {
    for (int i = 0; i < num_unfinished; i++) unlink(unfinished[i]);
    _exit(exit_code);
}

void on_bus_error(int number, siginfo_t* info, void*) {
    if (is_ending.test_and_set()) {
        for (;;) pause();  // another thread handles it
    }
    const char* path = file_at(reinterpret_cast<uintptr_t>(info->si_addr));
    if (path == nullptr) {  // not a file: the process ends as it would without this handler
        signal(number, SIG_DFL);
        raise(number);  // delivered when this returns
        return;
    }
    say("hotsplit: ");
    say(path);
    say(": was changed while it was read; run the command again\n");
    end(EXIT_CODE);
}

void on_abort(int number, siginfo_t* info, void*) {
    if (info->si_pid != getpid()) {  // sent by another process
        signal(number, SIG_DFL);
        raise(number);
        return;
    }
    if (is_ending.test_and_set()) {
        for (;;) pause();
    }
    say("hotsplit: a library has given up, most likely for want of memory or threads; use smaller"
        " sizes, or raise the limits (ulimit -v, ulimit -u)\n");
    end(ABORTED);
}

}  // namespace

// Installs the handlers; 0 on success.
extern "C" __attribute__((visibility("default"))) int32_t hs_guard_mapped_files() {
    struct sigaction action{};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    if (sigaction(SIGBUS, &action, nullptr) != 0) return -1;
    action.sa_sigaction = on_abort;
    return sigaction(SIGABRT, &action, nullptr);
}

// Sets the files that the handler removes, at most MAX_UNFINISHED: `count` names, each terminated
// by a zero byte. Names that do not fit into PATH_BYTES with that byte are left out.
extern "C" __attribute__((visibility("default"))) void hs_set_unfinished(const char* names,
                                                                         int64_t count) {
    num_unfinished = 0;
    int kept = 0;
    for (int64_t i = 0; i < count && kept < MAX_UNFINISHED; i++) {
        const size_t length = strlen(names) + 1;
        if (length <= PATH_BYTES) memcpy(unfinished[kept++], names, length);
        names += length;
    }
    num_unfinished = kept;
}
