// Softmax over a whole catalogue: the losses and, in the same pass, both gradients of a unit loss
// gradient.
//
// A tile of tokens is scored with all rows (one product), its logits become exponentials, and these
// give the gradients of the tokens and of the rows (two products). Nothing is computed twice, and
// tokens x rows exists for one tile only, which stays in the cache. Threads share the tokens, each
// with sums of its own for the rows; where the catalogue is too large for that, they share the rows.
#include <cmath>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "aligned_block.h"
#include "kernels.h"
#include "tall_panels.h"
#include "threads.h"

namespace slipstream {
namespace {

constexpr int64_t TILE_VALUES = 1 << 19, MOST_TOKENS = 72;  // of a tile: two megabytes of logits
constexpr int64_t CHUNK = 16 * W2;                          // rows of the catalogue that stay in the cache
constexpr int64_t OWN_SUMS_BYTES = 64 << 20;                // of all threads together
constexpr float NEVER = -std::numeric_limits<float>::infinity();

struct FullSoftmax {
    const float *hidden, *rows;  // [T, D], [N, D]
    const int32_t* targets;
    int64_t tokens, num_rows, width;
    float scale;                            // 1 / temperature
    float *loss, *grad_hidden, *grad_rows;  // [T]; [T, D], [N, D] or null
    int threads;
};

// The rows of the catalogue in panels for the logits, and padded to whole vectors for the gradients.
struct Catalogue {
    explicit Catalogue(const FullSoftmax& f)
        : columns(round_up(f.num_rows, W2)), padded(round_up(f.width, W)), packed(columns * f.width), rows(f.num_rows * padded) {}

    void fill(const FullSoftmax& f) const {
#pragma omp for schedule(static)
        for (int64_t c = 0; c < f.num_rows; c += CHUNK) {
            const int64_t count = std::min(CHUNK, f.num_rows - c);
            pack_transposed(f.rows + c * f.width, f.width, count, f.width, packed + c * f.width);
            pack_rows(f.rows + c * f.width, f.width, count, f.width, 1.0f, rows + c * padded, padded);
        }
    }

    const int64_t columns, padded;
    const Block packed, rows;
};

// Tiles of tokens, one after the other, by a team of threads.
class Tiles {
  public:
    Tiles(const FullSoftmax& call, const Catalogue& catalogue, bool shared)
        : f(call),
          all(catalogue),
          shared(shared),
          most_tokens(std::max<int64_t>(TALL, std::min(MOST_TOKENS, TILE_VALUES / std::max<int64_t>(1, catalogue.columns) / TALL * TALL))),
          logits(most_tokens * catalogue.columns),
          scaled(most_tokens * call.width),
          weighted(most_tokens * catalogue.padded),
          sums(most_tokens * catalogue.padded),
          weights(2 * most_tokens),
          row_sums(call.grad_rows ? call.num_rows * catalogue.padded : 1) {}

    // Every member of the team calls this for the same tokens.
    void run(int64_t begin, int64_t end) const {
        if (f.grad_rows)
            for (int64_t n = share(f.num_rows, 1).first; n < share(f.num_rows, 1).second; ++n)
                std::memset(row_sums + n * all.padded, 0, sizeof(float) * all.padded);
        for (int64_t first = begin; first < end; first += most_tokens) {
            const int64_t count = std::min(most_tokens, end - first);
            score(first, count);
            normalise(first, count);
            if (!f.grad_rows) continue;
            token_gradients(first, count);
            row_gradients(first, count);
        }
    }

    const float* row_gradient(int64_t row) const { return row_sums + row * all.padded; }

  private:
    // This member's part of `count` things, in steps.
    std::pair<int64_t, int64_t> share(int64_t count, int64_t step) const {
        const int64_t team = shared ? omp_get_num_threads() : 1, member = shared ? omp_get_thread_num() : 0;
        const int64_t steps = (count + step - 1) / step;
        return {steps * member / team * step, std::min(steps * (member + 1) / team * step, count)};
    }

    void wait() const {
        if (shared) {
#pragma omp barrier
        }
    }

    // Logits of a tile, divided by the temperature.
    void score(int64_t first, int64_t count) const {
        const auto [begin, end] = share(count, 1);
        for (int64_t t = begin; t < end; ++t) scale_row(f.hidden + (first + t) * f.width, f.width, f.scale, scaled + t * f.width);
        wait();
        const auto [from, to] = share(all.columns, CHUNK);
        for (int64_t c = from; c < to; c += CHUNK)
            for (int64_t t = 0; t < count; t += TALL)
                multiply_tall<false, true>(std::min<int64_t>(TALL, count - t), std::min(CHUNK, to - c), f.width, scaled + t * f.width, f.width,
                                           all.packed + c * f.width, W2, W2 * f.width, logits + t * all.columns + c, all.columns);
        wait();
    }

    // Losses; logits become e^(logit - shift), that of the target 0. A token's weight is what its
    // exponentials are multiplied with to be gradients; the target's own gradient stands apart, so
    // that a probability near 1 does not cancel.
    void normalise(int64_t first, int64_t count) const {
        const auto [begin, end] = share(count, 1);
        for (int64_t t = begin; t < end; ++t) {
            float* row = logits + t * all.columns;
            const int32_t target = f.targets[first + t];
            const float own = row[target];
            row[target] = NEVER;
            for (int64_t c = f.num_rows; c < all.columns; ++c) row[c] = NEVER;
            vf most = splat(own);
            for (int64_t c = 0; c < all.columns; c += W) most = load(row + c) > most ? load(row + c) : most;
            const float shift = simd::largest(most);
            vf total[2] = {};
            for (int64_t c = 0; c < all.columns; c += W2)
                for (int half = 0; half < 2; ++half) {
                    const vf e = simd::exponential(load(row + c + half * W) - shift);
                    store(row + c + half * W, e);
                    total[half] += e;
                }
            const float others = simd::sum(total[0] + total[1]), sum = others + std::exp(own - shift);
            f.loss[first + t] = shift == own ? std::log1p(others) : std::log(sum) + (shift - own);
            weights[2 * t] = f.scale / sum;
            weights[2 * t + 1] = -others * f.scale / sum;
            pack_rows(f.hidden + (first + t) * f.width, f.width, 1, f.width, f.scale / sum, weighted + t * all.padded, all.padded);
        }
        wait();
    }

    void token_gradients(int64_t first, int64_t count) const {
        const auto [begin, end] = share(count, TALL);
        for (int64_t c = 0; c < f.num_rows; c += CHUNK) {
            const auto multiply = c == 0 ? multiply_tall<false, true> : multiply_tall<false, false>;
            for (int64_t t = begin; t < end; t += TALL)
                multiply(std::min<int64_t>(TALL, end - t), all.padded, std::min(CHUNK, f.num_rows - c), logits + t * all.columns + c,
                         all.columns, all.rows + c * all.padded, all.padded, W2, sums + t * all.padded, all.padded);
        }
        for (int64_t t = begin; t < end; ++t) {
            const float *own = f.rows + f.targets[first + t] * f.width, *summed = sums + t * all.padded;
            float* out = f.grad_hidden + (first + t) * f.width;
            for (int64_t d = 0; d < f.width; ++d) out[d] = weights[2 * t] * summed[d] + weights[2 * t + 1] * own[d];
        }
    }

    void row_gradients(int64_t first, int64_t count) const {
        const auto [begin, end] = share(f.num_rows, TALL);
        for (int64_t n = begin; n < end; n += TALL)
            multiply_tall<true, false>(std::min<int64_t>(TALL, end - n), all.padded, count, logits + n, all.columns, weighted, all.padded, W2,
                                       row_sums + n * all.padded, all.padded);
        for (int64_t t = 0; t < count; ++t) {
            const int64_t target = f.targets[first + t];
            if (target < begin || target >= end) continue;
            const float* from = f.hidden + (first + t) * f.width;
            float* to = row_sums + target * all.padded;
            for (int64_t d = 0; d < f.width; ++d) to[d] += weights[2 * t + 1] * from[d];
        }
        wait();
    }

    const FullSoftmax& f;
    const Catalogue& all;
    const bool shared;
    const int64_t most_tokens;
    const Block logits, scaled, weighted, sums, weights, row_sums;
};

void full_softmax(const FullSoftmax& f) {
    const Catalogue catalogue(f);
    const int64_t teams = f.tokens * f.num_rows < simd::kWorthSharing ? 1 : f.threads;
    const bool shared = teams * f.num_rows * catalogue.padded * static_cast<int64_t>(sizeof(float)) > OWN_SUMS_BYTES;
    std::vector<std::unique_ptr<Tiles>> tiles;  // memory is taken here, where running out of it can be told
    for (int64_t i = 0; i < (shared ? 1 : teams); ++i) tiles.push_back(std::make_unique<Tiles>(f, catalogue, shared));
#pragma omp parallel num_threads(static_cast<int>(teams))
    {
        catalogue.fill(f);
        const int64_t member = omp_get_thread_num(), team = omp_get_num_threads();
        if (shared)
            tiles[0]->run(0, f.tokens);
        else
            for (int64_t i = member; i < teams; i += team) tiles[i]->run(f.tokens * i / teams, f.tokens * (i + 1) / teams);
#pragma omp barrier
#pragma omp for schedule(static)
        for (int64_t n = 0; n < (f.grad_rows ? f.num_rows : 0); ++n) {
            float* out = f.grad_rows + n * f.width;
            std::memcpy(out, tiles[0]->row_gradient(n), sizeof(float) * f.width);
            for (size_t i = 1; i < tiles.size(); ++i)
                for (int64_t d = 0; d < f.width; ++d) out[d] += tiles[i]->row_gradient(n)[d];
        }
    }
}

}  // namespace
}  // namespace slipstream

// Returns 0, or 1 when memory ran out. Gradients are computed where grad_hidden and grad_rows are
// given.
SLIPSTREAM_API int32_t ss_full_softmax(const float* hidden, const float* rows, const int32_t* targets, int64_t tokens, int64_t num_rows,
                                       int64_t width, float scale, float* loss, float* grad_hidden, float* grad_rows, int threads) {
    try {
        slipstream::full_softmax({hidden, rows, targets, tokens, num_rows, width, scale, loss, grad_hidden, grad_rows, threads});
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}
