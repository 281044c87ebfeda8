// Reads and writes fixed-size records of files with a team of threads, each waiting for its own
// read or write: a disk serves many requests at once about as fast as one. Called with the
// interpreter's lock released.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>
#include <thread>
#include <vector>

#include "kernels.h"

namespace {

constexpr int64_t kGrab = 8;            // records a thread takes at a time
constexpr int64_t kShort = -1;          // the file ends before the record does
constexpr int64_t kMostThreads = 256;

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

    void work() {
        for (int64_t begin; failure.load() == 0 && (begin = next.fetch_add(kGrab)) < count;)
            for (int64_t i = begin; i < std::min(begin + kGrab, count); ++i)
                if (const int64_t bad = copy(i)) {
                    failure.store(bad);
                    return;
                }
    }
};

}  // namespace

// Record i lies at offsets[i] of files[i] and at memory + i * bytes. Returns 0, the errno of what
// went wrong, or -1 where a file ends early.
SLIPSTREAM_API int64_t ss_transfer_records(const int32_t* files, const int64_t* offsets, int64_t count, int64_t bytes, char* memory,
                                       int64_t writes, int64_t team, int) {
    Transfer transfer{files, offsets, count, bytes, memory, writes != 0};
    std::vector<std::thread> threads;
    const int64_t helpers = std::min({team, kMostThreads, (count + kGrab - 1) / kGrab}) - 1;
    try {
        for (int64_t i = 0; i < helpers; ++i) threads.emplace_back([&transfer] { transfer.work(); });
    } catch (const std::system_error&) {
        // No more threads can be started: those there are do the work.
    } catch (const std::bad_alloc&) {
    }
    transfer.work();
    for (std::thread& thread : threads) thread.join();
    return transfer.failure.load();
}
