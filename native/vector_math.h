// The vector type of attention's kernels, and the sigmoid they spend most of their time on.
#pragma once
#include "simd.h"
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace slipstream {

constexpr int W = simd::kLanes;
constexpr int W2 = 2 * W;  // columns of a micro-kernel tile

using vf = simd::Floats;
using vi = simd::Ints;
typedef float vf_any __attribute__((vector_size(W * 4), aligned(4), may_alias));

inline vf load(const float* p) { return *reinterpret_cast<const vf_any*>(p); }
inline void store(float* p, vf v) { *reinterpret_cast<vf_any*>(p) = v; }
inline vf splat(float x) { return x - vf{}; }

// The first `count` values of a vector, 1 to W; loading puts zeros behind them.
inline vf load_first(const float* p, int64_t count) {
#if defined(__AVX512F__)
    return (vf)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), p);
#else
    float room[W] = {};
    std::memcpy(room, p, sizeof(float) * count);
    return load(room);
#endif
}
inline void store_first(float* p, vf v, int64_t count) {
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << count) - 1), (__m512)v);
#else
    std::memcpy(p, &v, sizeof(float) * count);
#endif
}

// A short row, without the calls that its copies would cost.
inline void copy_row(const float* from, int64_t width, float* to) {
    int64_t d = 0;
    for (; d + W <= width; d += W) store(to + d, load(from + d));
    if (d < width) store_first(to + d, load_first(from + d, width - d), width - d);
}

inline vf clamp(vf x, float low, float high) {
#if defined(__AVX512F__)
    return (vf)_mm512_min_ps(_mm512_max_ps((__m512)x, _mm512_set1_ps(low)), _mm512_set1_ps(high));
#elif defined(__AVX2__)
    return (vf)_mm256_min_ps(_mm256_max_ps((__m256)x, _mm256_set1_ps(low)), _mm256_set1_ps(high));
#elif defined(__SSE2__)
    return (vf)_mm_min_ps(_mm_max_ps((__m128)x, _mm_set1_ps(low)), _mm_set1_ps(high));
#else
    x = x > low ? x : splat(low);
    return x < high ? x : splat(high);
#endif
}

// 1 / x for positive normal x: the hardware's estimate and Newton steps, or a plain division. The
// relative error is below 2e-7, and 1 / 1 is 1: what is left of it would be multiplied by a large x
// in SiLU's slope. An estimate of 12 bits needs two steps for that, one of 14 bits one.
inline vf reciprocal(vf x) {
#if defined(__AVX512F__)
    const vf r = (vf)_mm512_rcp14_ps((__m512)x);
    return r * (2.0f - x * r);
#elif defined(__AVX2__)
    vf r = (vf)_mm256_rcp_ps((__m256)x);
    r = r * (2.0f - x * r);
    return r + r * (1.0f - x * r);
#else
    return 1.0f / x;
#endif
}

#define SLIPSTREAM_EACH _Pragma("GCC unroll 8") for (int i = 0; i < N; ++i)

constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number in the low bits

// 2^(n + f) where shifted = ROUND + n: 2^f on [-1/2, 1/2] by a polynomial, the whole part through
// the exponent bits.
template <int N>
inline __attribute__((always_inline)) void power_of_two(const vf (&f)[N], const vf (&shifted)[N], vf (&p)[N]) {
    SLIPSTREAM_EACH p[i] = f[i] * 1.327647187e-3f + 9.675541333e-3f;
    SLIPSTREAM_EACH p[i] = p[i] * f[i] + 5.550713274e-2f;
    SLIPSTREAM_EACH p[i] = p[i] * f[i] + 2.402211972e-1f;
    SLIPSTREAM_EACH p[i] = p[i] * f[i] + 6.931469671e-1f;
    SLIPSTREAM_EACH p[i] = p[i] * f[i] + 1.000000072f;
    SLIPSTREAM_EACH p[i] = (vf)((vi)p[i] + ((vi)shifted[i] << 23));
}

// 1 / (1 + exp(-x)), relative error below 1e-6 for |x| < 30, of N vectors side by side: one alone
// is a long chain that leaves the arithmetic units waiting.
template <int N>
inline __attribute__((always_inline)) void sigmoid(const vf (&x)[N], vf (&s)[N]) {
    vf f[N], shifted[N], p[N];
    SLIPSTREAM_EACH f[i] = clamp(x[i], -87.0f, 87.0f);
    SLIPSTREAM_EACH shifted[i] = f[i] * -1.442695041f + ROUND;
    SLIPSTREAM_EACH p[i] = shifted[i] - ROUND;
    SLIPSTREAM_EACH f[i] = f[i] * -1.442695041f - p[i];
    power_of_two(f, shifted, p);
    SLIPSTREAM_EACH p[i] += 1.0f;
    SLIPSTREAM_EACH s[i] = reciprocal(p[i]);
}

inline vf sigmoid(vf x) {
    const vf one[1] = {x};
    vf s[1];
    sigmoid(one, s);
    return s[0];
}

// Lanes of the vector at column `c` that lie in [low, high), as a mask of bits.
inline vi lanes_within(int64_t c, int64_t low, int64_t high) {
    vi lane;
    for (int i = 0; i < W; ++i) lane[i] = i;
    const auto bound = [c](int64_t x) { return static_cast<int32_t>(x - c < 0 ? 0 : x - c > W ? W : x - c) - vi{}; };
    return (lane >= bound(low)) & (lane < bound(high));
}

}  // namespace slipstream
