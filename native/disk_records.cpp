// Reads and writes fixed-size records of files with a team of threads, each waiting for its own
// read or write: a disk serves many requests at once about as fast as one. Threads beyond those that
// can run at a time start once a record makes its reader wait: records that lie in memory do not.
// Called with the interpreter's lock released.
#if defined(__linux__)
#include <sched.h>
#endif
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <thread>
#include <vector>

#include "kernels.h"

namespace {

constexpr int64_t kGrab = 8;            // records a thread takes at a time
constexpr int64_t kShort = -1;          // the file ends before the record does
constexpr int64_t kMostThreads = 256;
constexpr std::chrono::microseconds kWaiting{50};  // kGrab records from memory take a fraction of it

// How many threads this process may run at a time.
int64_t runnable_threads() {
#if defined(__linux__)
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) return CPU_COUNT(&allowed);
#endif
    return std::max(1u, std::thread::hardware_concurrency());
}

struct Transfer {
    const int32_t* files;
    const int64_t* offsets;
    int64_t count, bytes;
    char* memory;
    bool writes;
    std::atomic<int64_t> next{0}, failure{0};

    int64_t copy(int64_t i) const {
        for (int64_t done = 0; done < bytes;) {
            char* at = memory + i * bytes + done;
            const ssize_t copied = writes ? pwrite(files[i], at, bytes - done, offsets[i] + done)
                                         : pread(files[i], at, bytes - done, offsets[i] + done);
            if (copied < 0 && errno == EINTR) continue;
            if (copied < 0) return errno;
            if (copied == 0) return kShort;
            done += copied;
        }
        return 0;
    }

    // Transfers some of the records that are left; false once there are none.
    bool grab() {
        const int64_t begin = failure.load() == 0 ? next.fetch_add(kGrab) : count;
        for (int64_t i = begin; i < std::min(begin + kGrab, count); ++i)
            if (const int64_t bad = copy(i)) {
                failure.store(bad);
                return false;
            }
        return begin < count;
    }
};

struct Helpers {
    Transfer& transfer;
    std::vector<std::thread> threads;

    void start(int64_t number) try {
        while (int64_t(threads.size()) < number)
            threads.emplace_back([this] { while (transfer.grab()) {} });
    } catch (const std::system_error&) {
        // No more threads can be started: those there are do the work.
    } catch (const std::bad_alloc&) {
    }
};

}  // namespace

// Record i lies at offsets[i] of files[i] and at memory + i * bytes. Returns 0, the errno of what
// went wrong, or -1 where a file ends early.
SLIPSTREAM_API int64_t ss_transfer_records(const int32_t* files, const int64_t* offsets, int64_t count, int64_t bytes, char* memory,
                                       int64_t writes, int64_t team, int) {
    Transfer transfer{files, offsets, count, bytes, memory, writes != 0};
    Helpers helpers{transfer, {}};
    const int64_t most = std::min({team, kMostThreads, (count + kGrab - 1) / kGrab}) - 1;
    helpers.start(std::min(most, runnable_threads() - 1));
    for (bool waited = false, left = true; left;) {
        const auto begin = std::chrono::steady_clock::now();
        left = transfer.grab();
        if (waited || std::chrono::steady_clock::now() - begin < kWaiting) continue;
        waited = true;
        helpers.start(most);
    }
    for (std::thread& thread : helpers.threads) thread.join();
    return transfer.failure.load();
}
