// Memory that will soon be needed, asked for a few cache lines at a time while the arithmetic of the present block runs.
//
// A block of queries reads and writes rows that no cache holds yet; fetched when they are needed they cost a tenth of all time.
#pragma once
#include <algorithm>
#include <cstdint>

namespace slipstream {

class Ahead {
  public:
    // Forgets what was not asked for; the next ranges will be spread over `calls` calls of `some`.
    void start(int64_t calls) {
        count_ = at_ = 0;
        lines_ = 0;
        calls_ = std::max<int64_t>(1, calls);
    }
    void add(const float* from, int64_t floats) {
        if (!from || floats <= 0) return;
        const char* begin = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(from) & ~uintptr_t{LINE - 1});
        const char* end = reinterpret_cast<const char*>(from + floats);
        ranges_[count_++] = {begin, end};
        lines_ += (end - begin + LINE - 1) / LINE;
        share_ = (lines_ + calls_ - 1) / calls_;
    }
    // Asks for the next share of lines.
    void some() { ask(share_); }
    // Asks for all that is left.
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
