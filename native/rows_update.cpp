// Row-wise Adagrad and Adam: one second moment a row. Only the given rows are updated, in place.
#include <cmath>

#include "kernels.h"
#include "simd.h"

namespace {

using namespace slipstream::simd;

constexpr int64_t kAhead = 8;

void adagrad_row(float* weights, float* state, const float* grad, int64_t width, const Tail& tail, float lr, float eps) {
    *state += dot(grad, grad, tail) / static_cast<float>(width);
    add_scaled(weights, grad, -lr / (std::sqrt(*state) + eps), width);
}

}  // namespace

SLIPSTREAM_API void ss_rowwise_adagrad(float* weights, float* state, const int64_t* rows, const float* grads, int64_t count,
                                       int64_t width, float lr, float eps, int threads) {
    const Tail tail = tail_of(width);
#pragma omp parallel for num_threads(threads) if (count * width > kWorthSharing) schedule(static)
    for (int64_t u = 0; u < count; ++u) {
        if (u + kAhead < count) {
            prefetch_row(weights + rows[u + kAhead] * width, width);
            __builtin_prefetch(state + rows[u + kAhead]);
        }
        adagrad_row(weights + rows[u] * width, state + rows[u], grads + u * width, width, tail, lr, eps);
    }
}

SLIPSTREAM_API void ss_rowwise_adam(float* weights, float* first, float* second, int64_t* steps, const int64_t* rows,
                                    const float* grads, int64_t count, int64_t width, float lr, double beta1, double beta2, float eps,
                                    int threads) {
    const Tail tail = tail_of(width);
    const float keep1 = static_cast<float>(beta1), keep2 = static_cast<float>(beta2);
    const float new1 = static_cast<float>(1.0 - beta1), new2 = static_cast<float>(1.0 - beta2);
#pragma omp parallel for num_threads(threads) if (count * width > kWorthSharing) schedule(static)
    for (int64_t u = 0; u < count; ++u) {
        const int64_t row = rows[u];
        if (u + kAhead < count) {
            prefetch_row(weights + rows[u + kAhead] * width, width);
            prefetch_row(first + rows[u + kAhead] * width, width);
            __builtin_prefetch(second + rows[u + kAhead]);
            __builtin_prefetch(steps + rows[u + kAhead]);
        }
        const float* grad = grads + u * width;
        const int64_t step = ++steps[row];
        second[row] = keep2 * second[row] + new2 * (dot(grad, grad, tail) / static_cast<float>(width));
        const float correction1 = static_cast<float>(1.0 - std::pow(beta1, static_cast<double>(step)));
        const float correction2 = static_cast<float>(1.0 - std::pow(beta2, static_cast<double>(step)));
        const float scale = lr / ((std::sqrt(second[row] / correction2) + eps) * correction1);
        float* __restrict moment = first + row * width;
        float* __restrict weight = weights + row * width;
        for (int64_t d = 0; d < width; ++d) {
            moment[d] = keep1 * moment[d] + new1 * grad[d];
            weight[d] -= scale * moment[d];
        }
    }
}
