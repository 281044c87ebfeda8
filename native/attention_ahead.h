// Prefetches the memory of the next block, a few cache lines at a time, while the present block is
// computed.
//
// A block of queries reads and writes rows that no cache holds yet; waiting for them would cost a
// tenth of the time.
#pragma once
#include <algorithm>
#include <cstdint>

namespace slipstream {

class Ahead {
  public:
    // Drops what was not prefetched yet; the next ranges are spread over `calls` calls of `some`.
    void start(int64_t calls) {
        count_ = at_ = 0;
        lines_ = 0;
        calls_ = std::max<int64_t>(1, calls);
    }
    void add(const float* from, int64_t floats) {
        if (!from || floats <= 0 || count_ == RANGES) return;
        const char* begin = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(from) & ~uintptr_t{LINE - 1});
        const char* end = reinterpret_cast<const char*>(from + floats);
        ranges_[count_++] = {begin, end};
        lines_ += (end - begin + LINE - 1) / LINE;
        share_ = (lines_ + calls_ - 1) / calls_;
    }
    // Prefetches the next share of lines.
    void some() { ask(share_); }
    // Prefetches all that is left.
    void rest() { ask(lines_); }

  private:
    void ask(int64_t left) {
        for (; at_ < count_ && left > 0;) {
            Range& range = ranges_[at_];
            for (; left > 0 && range.begin < range.end; --left, range.begin += LINE) __builtin_prefetch(range.begin, 0, 2);
            if (range.begin >= range.end) ++at_;
        }
    }
    static constexpr int LINE = 64, RANGES = 16;
    struct Range {
        const char *begin, *end;
    };
    Range ranges_[RANGES];
    int count_ = 0, at_ = 0;
    int64_t lines_ = 0, calls_ = 1, share_ = 0;
};

}  // namespace slipstream
