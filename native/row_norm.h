// The norm of a row, with sums in an order that depends on its width alone.
#pragma once
#include <cmath>
#include <cstdint>

namespace slipstream {

static inline float sum_of(const float* x, int64_t width) {
    float total = 0.0f;
#pragma omp simd reduction(+ : total)
    for (int64_t d = 0; d < width; ++d) total += x[d];
    return total;
}

static inline float squares_of(const float* x, float mean, int64_t width) {
    float total = 0.0f;
#pragma omp simd reduction(+ : total)
    for (int64_t d = 0; d < width; ++d) total += (x[d] - mean) * (x[d] - mean);
    return total;
}

struct Moments {
    float mean, inverse;  // the mean, or 0 where a norm is not centred; 1 / deviation
};

static inline Moments moments_of(const float* row, int64_t width, bool centred, float eps) {
    const float mean = centred ? sum_of(row, width) / static_cast<float>(width) : 0.0f;
    return {mean, 1.0f / std::sqrt(squares_of(row, mean, width) / static_cast<float>(width) + eps)};
}

// out = norm(row) * weight * gate + bias; each of them may be null. `out` may be `row`.
static inline void norm_row(const float* row, Moments moments, const float* weight, const float* gate, const float* bias, int64_t width,
                            float* out) {
    for (int64_t d = 0; d < width; ++d) out[d] = (row[d] - moments.mean) * moments.inverse;
    if (weight != nullptr)
        for (int64_t d = 0; d < width; ++d) out[d] *= weight[d];
    if (gate != nullptr)
        for (int64_t d = 0; d < width; ++d) out[d] *= gate[d];
    if (bias != nullptr)
        for (int64_t d = 0; d < width; ++d) out[d] += bias[d];
}

}  // namespace slipstream
