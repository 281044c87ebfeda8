// Linear layers of small models, f(x W^T + b), with all their gradients in one pass over the tokens.
//
// Narrow products are where BLAS is slow: it packs and unpacks more than it multiplies. Here the
// weight is packed once, a block of tokens stays in the cache between the products, and bias,
// activation and the cut into parts happen on the way. A row of the output never depends on the rows
// beside it. Threads share the tokens; each has sums of its own for the weight's gradient.
#include <cmath>
#include <memory>
#include <new>
#include <vector>

#include "aligned_block.h"
#include "attention_ahead.h"
#include "kernels.h"
#include "tall_panels.h"
#include "threads.h"

namespace slipstream {
namespace {

constexpr int64_t BLOCK = 8 * TALL;  // tokens whose gradients stay in the cache

struct Linear {
    const float *x, *weight, *bias;  // [T, D], [F, D], [F] or null
    const int64_t* widths;           // of the parts of F
    int64_t parts, tokens, depth, width;
    bool silu;
    int threads;

    int64_t padded_width() const { return round_up(width, W2); }
    int64_t padded_depth() const { return round_up(depth, W2); }
    int team() const { return tokens * depth * width > simd::kWorthSharing ? threads : 1; }
};

int64_t total_of(const int64_t* widths, int64_t parts) {
    int64_t total = 0;
    for (int64_t part = 0; part < parts; ++part) total += widths[part];
    return total;
}

// The first `count` values of two vectors.
void keep(const vf (&x)[2], int64_t count, float* to) {
    if (count >= W2) {
        store(to, x[0]), store(to + W, x[1]);
        return;
    }
    store_first(to, x[0], std::min<int64_t>(W, count));
    if (count > W) store_first(to + W, x[1], count - W);
}

// ---- forward ------------------------------------------------------------------------------------

// Rows of x W^T, of which `bias` is null or padded like them: adds the bias, keeps the sums in z,
// and writes f of them to the parts.
void finish_rows(const Linear& f, const float* bias, float* row, int64_t first, int64_t count, float* z, const int64_t* out) {
    const int64_t columns = f.padded_width();
    for (int64_t t = first; t < first + count; ++t, row += columns) {
        for (int64_t d = 0; (bias || z || f.silu) && d < f.width; d += W2) {
            constexpr int N = 2;
            vf x[N], s[N];
            SLIPSTREAM_EACH x[i] = bias ? load(row + d + i * W) + load(bias + d + i * W) : load(row + d + i * W);
            if (z) keep(x, f.width - d, z + t * f.width + d);
            if (f.silu) sigmoid(x, s);
            SLIPSTREAM_EACH store(row + d + i * W, f.silu ? x[i] * s[i] : x[i]);
        }
        const float* from = row;
        for (int64_t part = 0; part < f.parts; from += f.widths[part++])
            copy_row(from, f.widths[part], reinterpret_cast<float*>(out[part]) + t * f.widths[part]);
    }
}

// What the rows from `first` on read and write, on its way while those before them are computed.
void fetch_rows(const Linear& f, int64_t first, int64_t count, const float* z, const int64_t* parts, Ahead& ahead) {
    if (count <= 0) return;
    ahead.add(f.x + first * f.depth, count * f.depth);
    if (z) ahead.add(z + first * f.width, count * f.width);
    for (int64_t part = 0; part < f.parts; ++part)
        ahead.add(reinterpret_cast<const float*>(parts[part]) + first * f.widths[part], count * f.widths[part]);
}

void forward(const Linear& f, float* z, const int64_t* out) {
    const int64_t columns = f.padded_width();
    const Block packed(columns * f.depth), sums(f.team() * TALL * columns), bias(columns);
    pack_transposed(f.weight, f.depth, f.width, f.depth, packed);
    if (f.bias) pack_rows(f.bias, f.width, 1, f.width, 1.0f, bias, columns);
#pragma omp parallel for num_threads(f.team()) schedule(static)
    for (int64_t first = 0; first < f.tokens; first += TALL) {
        float* rows = sums + omp_get_thread_num() * TALL * columns;
        const int64_t count = std::min<int64_t>(TALL, f.tokens - first);
        Ahead ahead;
        ahead.start(1);
        fetch_rows(f, first + count, std::min<int64_t>(TALL, f.tokens - first - count), z, out, ahead);
        ahead.rest();
        multiply_tall<false, true>(count, columns, f.depth, f.x + first * f.depth, f.depth, packed, W2, W2 * f.depth, rows, columns);
        finish_rows(f, f.bias ? static_cast<float*>(bias) : nullptr, rows, first, count, z, out);
    }
}

// ---- backward -----------------------------------------------------------------------------------

struct Gradients {
    const float* z;       // [T, F], where there is an activation
    const int64_t* grad;  // addresses of the parts' gradients
    float *x, *weight, *bias;  // [T, D], [F, D], [F]; each may be null
};

// One thread's memory and sums.
class Worker {
  public:
    Worker(const Linear& call, const Gradients& gradients, const float* wide_weight)
        : f(call),
          g(gradients),
          columns(call.padded_width()),
          padded(call.padded_depth()),
          wide_weight(wide_weight),
          dz(BLOCK * columns),
          x(BLOCK * padded),
          dx(TALL * padded),
          weight_sums(call.width * padded),
          bias_sums(columns) {
        std::memset(weight_sums, 0, sizeof(float) * f.width * padded);
        std::memset(bias_sums, 0, sizeof(float) * columns);
    }

    // `next` tokens follow these.
    void run(int64_t first, int64_t count, int64_t next) {
        for (int64_t t = 0; t < count; ++t) fill_dz(first + t, dz + t * columns);
        ahead.start((g.x ? BLOCK / TALL : 0) + (g.weight ? f.width / TALL : 0));
        fetch_rows(f, first + count, next, f.silu ? g.z : nullptr, g.grad, ahead);
        if (g.x) token_gradients(first, count);
        if (g.weight) weight_gradients(first, count);
        ahead.rest();
        if (g.bias)
            for (int64_t t = 0; t < count; ++t)
                for (int64_t d = 0; d < columns; d += W) store(bias_sums + d, load(bias_sums + d) + load(dz + t * columns + d));
    }

    const float* weight_gradient(int64_t row) const { return weight_sums + row * padded; }
    const float* bias_gradient() const { return bias_sums; }

  private:
    void fill_dz(int64_t t, float* row) const {
        float* at = row;
        for (int64_t part = 0; part < f.parts; at += f.widths[part++])
            copy_row(reinterpret_cast<const float*>(g.grad[part]) + t * f.widths[part], f.widths[part], at);
        for (; at < row + columns; ++at) *at = 0.0f;
        if (!f.silu) return;
        const float* z = g.z + t * f.width;
        for (int64_t d = 0; d < f.width; d += W) {
            const vf x = d + W <= f.width ? load(z + d) : load_first(z + d, f.width - d);
            store(row + d, load(row + d) * slope(x));
        }
    }

    static vf slope(vf z) {
        const vf s = sigmoid(z);
        return s * (1.0f + z * (1.0f - s));
    }

    void token_gradients(int64_t first, int64_t count) {
        for (int64_t t = 0; t < count; t += TALL) {
            ahead.some();
            const int64_t rows = std::min<int64_t>(TALL, count - t);
            multiply_tall<false, true>(rows, padded, f.width, dz + t * columns, columns, wide_weight, padded, W2, dx, padded);
            for (int64_t r = 0; r < rows; ++r) copy_row(dx + r * padded, f.depth, g.x + (first + t + r) * f.depth);
        }
    }

    void weight_gradients(int64_t first, int64_t count) {
        for (int64_t t = 0; t < count; ++t) {
            copy_row(f.x + (first + t) * f.depth, f.depth, x + t * padded);
            for (int64_t d = f.depth; d < padded; ++d) x[t * padded + d] = 0.0f;
        }
        for (int64_t row = 0; row < f.width; row += TALL) {
            ahead.some();
            multiply_tall<true, false>(std::min<int64_t>(TALL, f.width - row), padded, count, dz + row, columns, x, padded, W2,
                                       weight_sums + row * padded, padded);
        }
    }

    const Linear& f;
    const Gradients& g;
    const int64_t columns, padded;
    const float* wide_weight;
    const Block dz, x, dx, weight_sums, bias_sums;
    Ahead ahead;
};

void backward(const Linear& f, const Gradients& g) {
    const Block wide_weight(f.width * f.padded_depth());
    pack_rows(f.weight, f.depth, f.width, f.depth, 1.0f, wide_weight, f.padded_depth());
    const int team = f.team();
    std::vector<std::unique_ptr<Worker>> workers;
    for (int i = 0; i < team; ++i) workers.push_back(std::make_unique<Worker>(f, g, wide_weight));
#pragma omp parallel for num_threads(team) schedule(static, 1)
    for (int i = 0; i < team; ++i) {
        const int64_t blocks = (f.tokens + BLOCK - 1) / BLOCK, end = std::min(blocks * (i + 1) / team * BLOCK, f.tokens);
        for (int64_t first = blocks * i / team * BLOCK; first < end; first += BLOCK)
            workers[i]->run(first, std::min(BLOCK, end - first), std::min(BLOCK, end - first - BLOCK));
    }
    for (int64_t row = 0; row < f.width; ++row)
        for (const auto& worker : workers) {
            const bool begins = worker == workers.front();
            if (g.weight)
                for (int64_t d = 0; d < f.depth; ++d)
                    g.weight[row * f.depth + d] = (begins ? 0.0f : g.weight[row * f.depth + d]) + worker->weight_gradient(row)[d];
            if (g.bias) g.bias[row] = (begins ? 0.0f : g.bias[row]) + worker->bias_gradient()[row];
        }
}

}  // namespace
}  // namespace slipstream

// `out` are the addresses of the parts, [T, widths[part]] each; z [T, F] keeps the sums before the
// activation, or is null. Returns 0, or 1 when memory ran out.
SLIPSTREAM_API int32_t ss_linear_forward(const float* x, const float* weight, const float* bias, const int64_t* widths, int64_t parts,
                                         int64_t tokens, int64_t depth, int silu, float* z, const int64_t* out, int threads) {
    const int64_t width = slipstream::total_of(widths, parts);
    try {
        slipstream::forward({x, weight, bias, widths, parts, tokens, depth, width, silu != 0, threads}, z, out);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}

// `grad` are the addresses of the parts' gradients; d_x, d_weight and d_bias may be null.
SLIPSTREAM_API int32_t ss_linear_backward(const float* x, const float* weight, const int64_t* widths, int64_t parts, int64_t tokens,
                                          int64_t depth, int silu, const float* z, const int64_t* grad, float* d_x, float* d_weight,
                                          float* d_bias, int threads) {
    const int64_t width = slipstream::total_of(widths, parts);
    try {
        slipstream::backward({x, weight, nullptr, widths, parts, tokens, depth, width, silu != 0, threads}, {z, grad, d_x, d_weight, d_bias});
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}
