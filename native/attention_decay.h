// The time bias as a function of the gap, a exp(-b u^c) with u = |dt| / unit, and its gradients.
//
// Whole vectors of pairs are computed; nothing is looked up. A gap is an exact integer rounded once
// to a float, whether the times of a tile fit 32 bits or not. So a pair has the same bits in any
// tile, which keeps a cached prefix exact.
#pragma once
#include <cmath>

#include "attention_plan.h"

namespace slipstream {

inline uint64_t time_apart(int64_t a, int64_t b) {
    return a > b ? static_cast<uint64_t>(a) - static_cast<uint64_t>(b) : static_cast<uint64_t>(b) - static_cast<uint64_t>(a);
}

// log2 x of normal positive x, to 1e-7 beyond the rounding of its whole part: x = 2^n (1 + f) with
// 1 + f in [sqrt(1/2), sqrt(2)), log2(1 + f) by a polynomial.
template <int N>
inline __attribute__((always_inline)) void logarithm(const vf (&x)[N], vf (&y)[N]) {
    const int32_t half = 0x3F3504F3;  // the bits of sqrt(1/2)
    vi whole[N];
    vf f[N];
    SLIPSTREAM_EACH whole[i] = ((vi)x[i] - half) >> 23;
    SLIPSTREAM_EACH f[i] = (vf)((vi)x[i] - (whole[i] << 23)) - 1.0f;
    SLIPSTREAM_EACH y[i] = f[i] * -1.457444727e-1f + 2.368903756e-1f;
    SLIPSTREAM_EACH y[i] = y[i] * f[i] - 2.500690520e-1f;
    SLIPSTREAM_EACH y[i] = y[i] * f[i] + 2.867074609e-1f;
    SLIPSTREAM_EACH y[i] = y[i] * f[i] - 3.600872159e-1f;
    SLIPSTREAM_EACH y[i] = y[i] * f[i] + 4.809394479e-1f;
    SLIPSTREAM_EACH y[i] = y[i] * f[i] - 7.213571668e-1f;
    SLIPSTREAM_EACH y[i] = y[i] * f[i] + 1.442694783f;
    SLIPSTREAM_EACH y[i] = y[i] * f[i] + __builtin_convertvector(whole[i], vf);
}

// 2^x, relative error about 1e-7; x is clamped to what a normal float holds.
template <int N>
inline __attribute__((always_inline)) void exponential(const vf (&x)[N], vf (&p)[N]) {
    vf f[N], shifted[N];
    SLIPSTREAM_EACH f[i] = clamp(x[i], -126.0f, 126.0f);
    SLIPSTREAM_EACH shifted[i] = f[i] + ROUND;
    SLIPSTREAM_EACH f[i] -= shifted[i] - ROUND;
    power_of_two(f, shifted, p);
}

class TimeDecay {
  public:
    TimeDecay(const float* decay, float unit) : present_(decay != nullptr) {
        if (!decay) return;
        amplitude_ = decay[0], rate_ = decay[1], power_ = decay[2];
        log_unit_ = std::log2(unit), rate_2_ = -rate_ * 1.442695041f;
    }
    bool present() const { return present_; }

    // Of gaps: the decay exp(-b u^c), u^c and log2 u. A gap of 0 has u^c = 0
    // and some finite logarithm; a decay below 2^-100 is 0, so that no product with it is denormal.
    template <int N>
    inline __attribute__((always_inline)) void parts(const vf (&apart)[N], vf (&decay)[N], vf (&power)[N], vf (&log)[N]) const {
        vf x[N];
        logarithm(apart, log);
        SLIPSTREAM_EACH log[i] -= log_unit_;
        SLIPSTREAM_EACH x[i] = log[i] * power_;
        exponential(x, power);
        SLIPSTREAM_EACH power[i] = (vf)((vi)power[i] & (apart[i] > splat(0.0f)));
        SLIPSTREAM_EACH x[i] = power[i] * rate_2_;
        exponential(x, decay);
        SLIPSTREAM_EACH decay[i] = (vf)((vi)decay[i] & (x[i] > splat(-100.0f)));
    }
    float amplitude() const { return amplitude_; }
    // The bias of one pair, and with `slopes` what its gradient is multiplied with in `gradient`.
    float one(uint64_t gap, float (*slopes)[3] = nullptr) const {
        const vf apart[1] = {splat(static_cast<float>(static_cast<int64_t>(gap)))};
        vf decay[1], power[1], log[1];
        parts(apart, decay, power, log);
        const float d = decay[0][0], p = d * power[0][0];
        if (slopes) (*slopes)[0] = d, (*slopes)[1] = p, (*slopes)[2] = p * log[0][0];
        return d * amplitude_;
    }
    // sums: over pairs, the gradient of the bias times decay, decay u^c, decay u^c log2 u.
    void gradient(const double (&sums)[3], float* to) const {
        const double rate = -static_cast<double>(amplitude_) * rate_;
        to[0] = static_cast<float>(sums[0]);
        to[1] = static_cast<float>(-sums[1] * amplitude_);
        to[2] = static_cast<float>(sums[2] * rate * 0.69314718055994531);
    }

  private:
    bool present_;
    float amplitude_ = 0.0f, rate_ = 0.0f, power_ = 0.0f, log_unit_ = 0.0f, rate_2_ = 0.0f;
};

// The gaps between the queries of a block and the keys of a tile, row by row.
class TimeGaps {
  public:
    void start(const Attention& call, const Sequence& s, const RowBlock& block, int64_t tile) {
        queries_ = call.q_times + s.q0 + block.first, keys_ = call.k_times + s.first_time + tile;
        count_ = std::min<int64_t>(KEYS, s.keys - tile);
        const auto queries = std::minmax_element(queries_, queries_ + block.rows), keys = std::minmax_element(keys_, keys_ + count_);
        first_ = std::min(*queries.first, *keys.first);
        narrow_ = time_apart(std::max(*queries.second, *keys.second), first_) <= INT32_MAX;
        for (int64_t c = 0; c < KEYS && narrow_; ++c) after_[c] = c < count_ ? static_cast<int32_t>(keys_[c] - first_) : 0;
    }
    // |dt| of row r and the computed columns.
    void row(int64_t r, const PanelRange& range, float* to) const {
        if (!narrow_) {
            for (int64_t c = range.first; c < range.last; ++c)
                to[c] = c < count_ ? static_cast<float>(static_cast<int64_t>(time_apart(queries_[r], keys_[c]))) : 0.0f;
            return;
        }
        const vi now = static_cast<int32_t>(queries_[r] - first_) - vi{};
        for (int64_t c = range.first; c < range.last; c += W) {
            const vi apart = now - simd::load(after_ + c), sign = apart >> 31;
            store(to + c, __builtin_convertvector((apart ^ sign) - sign, vf));
        }
    }

  private:
    const int64_t *queries_, *keys_;
    int64_t count_, first_;
    bool narrow_;
    int32_t after_[KEYS];
};

}  // namespace slipstream
