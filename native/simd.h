// Short vectors for kernels over embedding rows: load, store, sum, exponential, dot products and
// scaled additions. GCC vector extensions, so one source serves SSE, AVX2 and AVX-512. Everything
// is static: each source file has its own copy.
#pragma once
#include <cstdint>
#include <cstring>

namespace slipstream::simd {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
// Below this much work (values touched) a second thread costs more than it brings.
constexpr int64_t kWorthSharing = 1 << 15;

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

static inline Floats load(const float* p) {
    Floats v;
    std::memcpy(&v, p, sizeof(v));
    return v;
}
static inline Ints load(const int32_t* p) {
    Ints v;
    std::memcpy(&v, p, sizeof(v));
    return v;
}
static inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof(v)); }
static inline Floats splat(float x) { return Floats{} + x; }

typedef float Quad __attribute__((vector_size(16)));

// The lanes of a vector folded into four.
static inline Quad fold(Floats v) {
#if defined(__AVX512F__)
    typedef float Half __attribute__((vector_size(32)));
    const Half h = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    return __builtin_shufflevector(h, h, 0, 1, 2, 3) + __builtin_shufflevector(h, h, 4, 5, 6, 7);
#elif defined(__AVX2__)
    return __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
#else
    return v;
#endif
}
static inline float sum(Floats v) {
    const Quad q = fold(v);
    return (q[0] + q[2]) + (q[1] + q[3]);
}
// Four sums at once.
static inline Quad sum4(Floats a, Floats b, Floats c, Floats d) {
    const Quad p = fold(a), q = fold(b), r = fold(c), s = fold(d);
    const Quad pq = __builtin_shufflevector(p, q, 0, 4, 1, 5) + __builtin_shufflevector(p, q, 2, 6, 3, 7);
    const Quad rs = __builtin_shufflevector(r, s, 0, 4, 1, 5) + __builtin_shufflevector(r, s, 2, 6, 3, 7);
    return __builtin_shufflevector(pq, rs, 0, 1, 4, 5) + __builtin_shufflevector(pq, rs, 2, 3, 6, 7);
}

// What is left of a row after its whole vectors. A row of at least one vector is finished by
// loading its last kLanes values once more and masking those already done; `scalars` counts the
// values of rows too short for that.
struct Tail {
    int64_t whole;    // values in whole vectors
    int64_t at;       // where the last, overlapping vector starts (unused where scalars > 0)
    int64_t scalars;  // values to be done one by one
    bool overlaps;
    Ints mask;
};
static inline Tail tail_of(int64_t width) {
    const int64_t rest = width % kLanes;
    Tail tail{width - rest, width - kLanes, width < kLanes ? rest : 0, width > kLanes && rest > 0, Ints{}};
    for (int i = 0; i < kLanes; ++i) tail.mask[i] = i >= kLanes - rest ? -1 : 0;
    return tail;
}
static inline Floats masked(Floats v, const Tail& tail) { return (Floats)((Ints)v & tail.mask); }

static inline float largest(Floats v) {
    float part[kLanes];
    std::memcpy(part, &v, sizeof(v));
    float best = part[0];
    for (int i = 1; i < kLanes; ++i) best = part[i] > best ? part[i] : best;
    return best;
}

// e^x, relative error below 2e-7; 0 under -87, NaN stays NaN. Clamped above 88, which callers do
// not reach.
static inline Floats exponential(Floats x) {
    const Ints tiny = x < splat(-87.0f);
    x = x > splat(88.0f) ? splat(88.0f) : x;
    x = tiny ? splat(-87.0f) : x;
    const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
    const Floats shifted = x * 1.44269504f + magic;
    const Floats n = shifted - magic;
    const Floats r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    Floats y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    const Ints power = ((Ints)shifted << 23) + (Ints)splat(1.0f);
    y = y * (Floats)power;
    return tiny ? splat(0.0f) : y;
}

static inline float dot(const float* a, const float* b, const Tail& tail) {
    Floats total{};
    for (int64_t d = 0; d < tail.whole; d += kLanes) total += load(a + d) * load(b + d);
    if (tail.overlaps) total += masked(load(a + tail.at), tail) * load(b + tail.at);
    float result = sum(total);
    for (int64_t d = 0; d < tail.scalars; ++d) result += a[d] * b[d];
    return result;
}

// Four dot products of one vector: four independent chains hide the latency of the multiply-add.
static inline void dot4(const float* a, const float* const* b, const Tail& tail, float* out) {
    const float *b0 = b[0], *b1 = b[1], *b2 = b[2], *b3 = b[3];
    Floats s0{}, s1{}, s2{}, s3{};
    const auto step = [&](Floats x, int64_t d) {
        s0 += x * load(b0 + d);
        s1 += x * load(b1 + d);
        s2 += x * load(b2 + d);
        s3 += x * load(b3 + d);
    };
    for (int64_t d = 0; d < tail.whole; d += kLanes) step(load(a + d), d);
    if (tail.overlaps) step(masked(load(a + tail.at), tail), tail.at);
    Quad total = sum4(s0, s1, s2, s3);
    for (int64_t d = 0; d < tail.scalars; ++d) total += Quad{b0[d], b1[d], b2[d], b3[d]} * a[d];
    std::memcpy(out, &total, sizeof(total));
}

// to += w * from. The rest goes one by one: an overlapping vector would wait for the store before
// it.
static inline void add_scaled(float* to, const float* from, float w, int64_t width) {
    int64_t d = 0;
    for (; d + kLanes <= width; d += kLanes) store(to + d, load(to + d) + load(from + d) * w);
    for (; d < width; ++d) to[d] += w * from[d];
}

// out [rows, width] = the sum over threads of copies [threads, copy], rows `stride` apart.
static inline void sum_copies(float* out, int64_t rows, int64_t width, const float* copies, int64_t copy, int64_t stride,
                              int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > kWorthSharing) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        float* __restrict to = out + row * width;
        std::memcpy(to, copies + row * stride, sizeof(float) * width);
        for (int k = 1; k < threads; ++k)
            for (int64_t d = 0; d < width; ++d) to[d] += copies[k * copy + row * stride + d];
    }
}

static inline void prefetch_row(const float* row, int64_t width) {
    for (int64_t d = 0; d < width; d += 16) __builtin_prefetch(row + d);
}

}  // namespace slipstream::simd
