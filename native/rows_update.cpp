// Row-wise Adagrad and Adam: one second moment a row, touched rows only, in place. The from_tokens entry sorts token gradients by
// row, sums each segment in token order and updates its row in the same pass.
#include <cmath>

#include "export.h"
#include "lanes.h"
#include "rows_sort.h"

namespace {

using namespace slipstream::lanes;

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

// scratch_keys: int64 [2, tokens]; scratch_places: int32 [2, tokens]; sums: [threads, width].
SLIPSTREAM_API void ss_rowwise_adagrad_from_tokens(float* weights, float* state, const int64_t* rows, const float* grads,
                                                   int64_t tokens, int64_t width, float lr, float eps, int64_t* scratch_keys,
                                                   int32_t* scratch_places, float* sums, int threads) {
    const slipstream::sorting::Sorted sorted = slipstream::sorting::radix_sort(rows, tokens, scratch_keys, scratch_places, threads);
    const Tail tail = tail_of(width);
#pragma omp parallel for num_threads(threads) if (tokens * width > kWorthSharing) schedule(static)
    for (int part = 0; part < threads; ++part) {
        float* total = sums + part * width;
        int64_t i = tokens * part / threads;
        const int64_t end = tokens * (part + 1) / threads;
        while (i > 0 && i < tokens && sorted.keys[i] == sorted.keys[i - 1]) ++i;  // a segment belongs to where it starts
        const auto ask_ahead = [&](int64_t at) {
            if (at + kAhead >= tokens) return;
            prefetch_row(grads + sorted.places[at + kAhead] * width, width);
            if (sorted.keys[at + kAhead] == sorted.keys[at + kAhead - 1]) return;
            const int64_t row = slipstream::sorting::key_of(sorted.keys[at + kAhead]);
            prefetch_row(weights + row * width, width);
            __builtin_prefetch(state + row);
        };
        while (i < end) {
            const uint64_t key = sorted.keys[i];
            float* row = weights + slipstream::sorting::key_of(key) * width;
            ask_ahead(i);
            std::memcpy(total, grads + sorted.places[i] * width, sizeof(float) * width);
            for (++i; i < tokens && sorted.keys[i] == key; ++i) {
                ask_ahead(i);
                add_scaled(total, grads + sorted.places[i] * width, 1.0f, width);
            }
            adagrad_row(row, state + slipstream::sorting::key_of(key), total, width, tail, lr, eps);
        }
    }
}
