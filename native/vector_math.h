// One vector type for three instruction sets (GCC vector extensions), and the sigmoid that attention lives on.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace slipstream {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
constexpr int W2 = 2 * W;  // columns of a micro-kernel tile

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef float vf_any __attribute__((vector_size(W * 4), aligned(4), may_alias));

inline vf load(const float* p) { return *reinterpret_cast<const vf_any*>(p); }
inline void store(float* p, vf v) { *reinterpret_cast<vf_any*>(p) = v; }
inline vf splat(float x) { return x - vf{}; }

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

// 1 / x for positive normal x: the hardware's estimate and one third-order step, or a plain division.
inline vf reciprocal(vf x) {
#if defined(__AVX512F__)
    const vf r = (vf)_mm512_rcp14_ps((__m512)x);
#elif defined(__AVX2__)
    const vf r = (vf)_mm256_rcp_ps((__m256)x);
#else
    return 1.0f / x;
#endif
#if defined(__AVX2__) || defined(__AVX512F__)
    const vf error = 1.0f - x * r;
    return r + r * (error + error * error);
#endif
}

// 1 / (1 + exp(-x)), relative error about 1e-7. 2^f on [-1/2, 1/2] by a polynomial, the whole part through the exponent bits.
inline vf sigmoid(vf x) {
    const float round = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number in the low bits
    const vf c = clamp(x, -87.0f, 87.0f);
    const vf shifted = c * -1.442695041f + round;
    const vf whole = shifted - round;
    const vf f = c * -1.442695041f - whole;
    vf p = f * 1.327647187e-3f + 9.675541333e-3f;
    p = p * f + 5.550713274e-2f;
    p = p * f + 2.402211972e-1f;
    p = p * f + 6.931469671e-1f;
    p = p * f + 1.000000072f;
    vi bits, power;
    memcpy(&bits, &shifted, sizeof bits);
    memcpy(&power, &p, sizeof power);
    power += bits << 23;
    vf e;
    memcpy(&e, &power, sizeof e);
    return reciprocal(1.0f + e);
}

}  // namespace slipstream
