// As many horizontal sums as a vector has lanes, at once: sums_of(v)[i] is the sum of the lanes of
// v[i]. Every step adds the halves of two vectors into one, so sixteen sums cost fifteen additions
// and thirty shuffles.
#pragma once
#include <type_traits>

#include "simd.h"

namespace slipstream::simd {

#if defined(__AVX512F__)
static inline Floats halves4(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
           __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}
static inline Floats halves2(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
static inline Floats quarters(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
static inline Floats evens(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
static inline Floats sums_of(const Floats* v) {
    const auto four = [v](int i) { return halves2(halves4(v[i], v[i + 1]), halves4(v[i + 2], v[i + 3])); };
    return evens(quarters(four(0), four(4)), quarters(four(8), four(12)));
}
#elif defined(__AVX2__)
static inline Floats halves4(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13) + __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
}
static inline Floats halves2(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
}
static inline Floats sums_of(const Floats* v) {
    const auto four = [v](int i) { return halves2(halves4(v[i], v[i + 1]), halves4(v[i + 2], v[i + 3])); };
    const Floats a = four(0), b = four(4);
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}
#else
static inline Floats sums_of(const Floats* v) { return sum4(v[0], v[1], v[2], v[3]); }
#endif

constexpr int kKept = kLanes == 16 ? 16 : 8;  // vectors that stay in registers over a loop

// run(how many, from where) over `vectors` columns: kMost at a time, then what is left in halves of
// it.
template <int kMost, class Run>
static inline void column_passes(int64_t vectors, const Run& run, int64_t at = 0) {
    for (; at + kMost <= vectors; at += kMost) run(std::integral_constant<int, kMost>{}, at);
    if constexpr (kMost > 1) {
        if (at < vectors) column_passes<kMost / 2>(vectors, run, at);
    }
}

}  // namespace slipstream::simd
