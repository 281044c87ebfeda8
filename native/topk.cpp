// The first pass of exact top-k search: 8-bit codes with error bounds decide which rows of a
// catalogue can be among the k best of a query.
#include <algorithm>
#include <cmath>
#include <queue>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(_OPENMP)
#include <omp.h>
#endif

#include "kernels.h"

namespace {

constexpr int64_t kBlock = 1024;          // rows that share one bound of their norms
constexpr int64_t kWorthSharing = 1 << 14;  // rows

// The product of 16-bit query values and 8-bit codes; both are padded to a multiple of 64.
inline int32_t code_dot(const int16_t* query, const int8_t* codes, int64_t stride) {
#if defined(__AVX512BW__)
    __m512i total = _mm512_setzero_si512();
    for (int64_t d = 0; d < stride; d += 32) {
        const __m512i row = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + d)));
        total = _mm512_add_epi32(total, _mm512_madd_epi16(row, _mm512_loadu_si512(query + d)));
    }
    return _mm512_reduce_add_epi32(total);
#elif defined(__AVX2__)
    __m256i total = _mm256_setzero_si256();
    for (int64_t d = 0; d < stride; d += 16) {
        const __m256i row = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + d)));
        const __m256i part = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(query + d));
        total = _mm256_add_epi32(total, _mm256_madd_epi16(row, part));
    }
    const __m128i half = _mm_add_epi32(_mm256_castsi256_si128(total), _mm256_extracti128_si256(total, 1));
    const __m128i pair = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(pair, _mm_shuffle_epi32(pair, 0xb1)));
#else
    int32_t total = 0;
    for (int64_t d = 0; d < stride; ++d) total += static_cast<int32_t>(query[d]) * codes[d];
    return total;
#endif
}

struct Candidate {
    float lowest, highest;  // the exact score lies between
    int64_t row;
};

// The candidates of one thread's rows: those that may beat the k-th best score known so far.
class Search {
   public:
    Search(int64_t k, float threshold, const int64_t* excluded, int64_t num_excluded, const uint8_t* allowed)
        : k_(k), excluded_(excluded), num_excluded_(num_excluded), allowed_(allowed), threshold_(threshold) {}

    float threshold() const { return threshold_; }

    void offer(float lowest, float highest, int64_t row) {
        if (!(highest >= threshold_) || !may_answer(row)) return;
        found_.push_back({lowest, highest, row});
        if (static_cast<int64_t>(lowest_.size()) < k_) {
            lowest_.push(lowest);
        } else if (lowest > lowest_.top()) {
            lowest_.pop();
            lowest_.push(lowest);
        }
        if (static_cast<int64_t>(lowest_.size()) == k_) threshold_ = std::max(threshold_, lowest_.top());
        if (found_.size() > full_) {
            keep(threshold_);
            full_ = std::max<size_t>(kBlock, 2 * found_.size());
        }
    }

    void keep(float threshold) {
        found_.erase(std::remove_if(found_.begin(), found_.end(), [=](const Candidate& c) { return c.highest < threshold; }),
                     found_.end());
    }

    std::vector<Candidate> found_;
    std::priority_queue<float, std::vector<float>, std::greater<float>> lowest_;

   private:
    bool may_answer(int64_t row) const {
        if (allowed_ != nullptr && allowed_[row] == 0) return false;
        return !std::binary_search(excluded_, excluded_ + num_excluded_, row);
    }

    int64_t k_;
    const int64_t* excluded_;
    int64_t num_excluded_;
    const uint8_t* allowed_;
    float threshold_;
    size_t full_ = 16 * kBlock;
};

}  // namespace

// codes [rows, stride]: values divided by scales[row], rounded; the rest of a row is 0. errors[row]
// is the length of what rounding took away, norms[row] the length of the row.
SLIPSTREAM_API void ss_quantize_rows(const float* rows, int64_t count, int64_t width, int64_t stride, int8_t* codes, float* scales,
                                     float* errors, float* norms, int threads) {
#pragma omp parallel for num_threads(threads) if (count > kWorthSharing) schedule(static)
    for (int64_t row = 0; row < count; ++row) {
        const float* from = rows + row * width;
        int8_t* to = codes + row * stride;
        float largest = 0.0f;
        double norm = 0.0, error = 0.0;
        for (int64_t d = 0; d < width; ++d) largest = std::max(largest, std::fabs(from[d]));
        const float scale = largest / 127.0f, inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
        for (int64_t d = 0; d < width; ++d) {
            const float code = std::nearbyint(from[d] * inverse);
            const double left = static_cast<double>(from[d]) - static_cast<double>(scale) * code;
            to[d] = static_cast<int8_t>(code);
            norm += static_cast<double>(from[d]) * from[d];
            error += left * left;
        }
        for (int64_t d = width; d < stride; ++d) to[d] = 0;
        scales[row] = scale;
        errors[row] = static_cast<float>(std::sqrt(error)) * 1.0001f;
        norms[row] = static_cast<float>(std::sqrt(norm)) * 1.0001f;
    }
}

// Searches the rows begin … end - 1 (`begin` is the first of a block) and writes those that may be
// among the k best of all rows, with the bounds of their scores; returns how many there are; where
// more than `room`, only the number is right. A row's score lies within scale * query_scale * product,
// plus or minus query_norm * errors[row] + query_error * norms[row], plus its boost where there are
// some (at most `most_boost`). Rows that cannot reach `threshold` are left out.
SLIPSTREAM_API int64_t ss_search_codes(const int16_t* query, float query_scale, float query_norm, float query_error, const int8_t* codes,
                                       const float* scales, const float* errors, const float* norms, const float* block_norms,
                                       int64_t begin, int64_t end, int64_t stride, int64_t k, float threshold, const int64_t* excluded,
                                       int64_t num_excluded, const uint8_t* allowed, const float* boosts, float most_boost, int64_t* out,
                                       float* out_lowest, float* out_highest, int64_t room, int threads) {
    const int team = end - begin > kWorthSharing ? std::max(1, threads) : 1;
    std::vector<Search> searches(team, Search(k, threshold, excluded, num_excluded, allowed));
    const int64_t first = begin / kBlock, blocks = (end - begin + kBlock - 1) / kBlock;
    const float reach = query_norm * 1.0001f;
#pragma omp parallel for num_threads(team) schedule(static)
    for (int part = 0; part < team; ++part) {
        Search& search = searches[part];
        for (int64_t block = first + part * blocks / team; block < first + (part + 1) * blocks / team; ++block) {
            if (reach * block_norms[block] + most_boost < search.threshold()) continue;
            const int64_t last = std::min(end, (block + 1) * kBlock);
            for (int64_t row = block * kBlock; row < last; ++row) {
                const float boost = boosts == nullptr ? 0.0f : boosts[row];
                if (reach * norms[row] + boost < search.threshold()) continue;  // without a look at its codes
                const float about = scales[row] * query_scale * static_cast<float>(code_dot(query, codes + row * stride, stride));
                const float unsure = query_norm * errors[row] + query_error * norms[row];
                const float highest = about + unsure + boost;
                if (highest >= search.threshold()) search.offer(about - unsure + boost, highest, row);
            }
        }
    }
    std::vector<float> lowest;
    for (Search& search : searches)
        for (; !search.lowest_.empty(); search.lowest_.pop()) lowest.push_back(search.lowest_.top());
    if (static_cast<int64_t>(lowest.size()) >= k) {
        std::nth_element(lowest.begin(), lowest.begin() + (k - 1), lowest.end(), std::greater<float>());
        threshold = std::max(threshold, lowest[k - 1]);
    }
    int64_t total = 0;
    for (Search& search : searches) {
        search.keep(threshold);
        for (const Candidate& candidate : search.found_) {
            if (total < room) {
                out[total] = candidate.row;
                out_lowest[total] = candidate.lowest;
                out_highest[total] = candidate.highest;
            }
            ++total;
        }
    }
    return total;
}
