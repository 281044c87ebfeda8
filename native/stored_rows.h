// Rows of keys and values as a prefix stores them: floats, halves, or bytes with a scale.
//
// A row is one head of one token. Bytes are multiples of the row's scale, which is its largest
// magnitude over 127, rounded up to the upper half of a float. What is stored of a row depends on
// that row alone.
#pragma once
#include <algorithm>
#include <cmath>

#include "vector_math.h"

namespace slipstream {

enum class Stored : int32_t { FLOAT = 0, HALF = 1, BYTE = 2 };

inline float scale_of(uint16_t upper) {
    const uint32_t bits = static_cast<uint32_t>(upper) << 16;
    float scale;
    std::memcpy(&scale, &bits, 4);
    return scale;
}

// The smallest upper half of a float that is not below x >= 0.
inline uint16_t scale_above(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return static_cast<uint16_t>((bits + 0xFFFFu) >> 16);
}

// IEEE half precision, rounded to nearest even; magnitudes above the largest half become it.
inline uint16_t half_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 16 & 0x8000u;
    bits &= 0x7FFFFFFFu;
    if (bits > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);  // not a number
    if (bits >= 0x477FE000u) return static_cast<uint16_t>(sign | 0x7BFFu);
    if (bits < 0x38800000u) {  // below the smallest normal half: a multiple of 2^-24
        float magnitude;
        std::memcpy(&magnitude, &bits, 4);
        return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(magnitude * 16777216.0f)));
    }
    bits += 0xFFFu + (bits >> 13 & 1u);
    return static_cast<uint16_t>(sign | std::min<uint32_t>((bits - 0x38000000u) >> 13, 0x7BFFu));
}

inline float float_of(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, rest = half & 0x7FFFu;
    uint32_t bits = rest >= 0x7C00u ? rest << 13 | 0x7F800000u : (rest << 13) + 0x38000000u;
    float x;
    if (rest < 0x400u) {
        x = static_cast<float>(rest) * 5.9604644775390625e-8f;
        std::memcpy(&bits, &x, 4);
    }
    bits |= sign;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline void read_halves(const uint16_t* from, int64_t width, float* to) {
    int64_t d = 0;
#if defined(__AVX512F__)
    for (; d + 16 <= width; d += 16) _mm512_storeu_ps(to + d, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + d))));
#elif defined(__F16C__)
    for (; d + 8 <= width; d += 8) _mm256_storeu_ps(to + d, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + d))));
#endif
    for (; d < width; ++d) to[d] = float_of(from[d]);
}

inline void write_halves(const float* from, int64_t width, uint16_t* to) {
    int64_t d = 0;
#if defined(__AVX512F__)
    for (; d + 16 <= width; d += 16)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + d), _mm512_cvtps_ph((__m512)clamp(load(from + d), -65504.0f, 65504.0f), 0));
#elif defined(__F16C__)
    for (; d + 8 <= width; d += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + d), _mm256_cvtps_ph((__m256)clamp(load(from + d), -65504.0f, 65504.0f), 0));
#endif
    for (; d < width; ++d) to[d] = half_of(from[d]);
}

inline void read_bytes(const int8_t* from, float scale, int64_t width, float* __restrict to) {
    for (int64_t d = 0; d < width; ++d) to[d] = static_cast<float>(from[d]) * scale;
}

// Writes the bytes of a row and returns its scale.
inline uint16_t write_bytes(const float* from, int64_t width, int8_t* __restrict to) {
    float most = 0.0f;
    for (int64_t d = 0; d < width; ++d) most = std::max(most, std::fabs(from[d]));
    const uint16_t upper = most > 1e-30f ? scale_above(most / 127.0f) : 0;
    const float scale = scale_of(upper), inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    for (int64_t d = 0; d < width; ++d) {
        const float steps = from[d] * inverse + ROUND - ROUND;  // to the nearest whole number
        to[d] = static_cast<int8_t>(std::min(127.0f, std::max(-127.0f, steps)));
    }
    return upper;
}

struct FloatRows {
    const float* first;
    int64_t stride;
};

// The rows of one head.
struct StoredRows {
    Stored stored;
    const void* rows;        // [tokens, heads, width]
    const uint16_t* scales;  // [tokens, heads], of bytes only
    int64_t heads, width, head;

    static StoredRows plain(const float* rows, int64_t heads, int64_t width, int64_t head) {
        return {Stored::FLOAT, rows, nullptr, heads, width, head};
    }
    int64_t row(int64_t token) const { return token * heads + head; }
    // Rows of floats from `token` on, where they lie.
    FloatRows in_place(int64_t token) const { return {static_cast<const float*>(rows) + row(token) * width, heads * width}; }
    // Tokens [token, token + count) as floats, row by row.
    void read(int64_t token, int64_t count, float* to) const {
        for (int64_t r = token; r < token + count; ++r, to += width) {
            const int64_t at = row(r) * width;
            if (stored == Stored::FLOAT) std::memcpy(to, static_cast<const float*>(rows) + at, sizeof(float) * width);
            if (stored == Stored::HALF) read_halves(static_cast<const uint16_t*>(rows) + at, width, to);
            if (stored == Stored::BYTE) read_bytes(static_cast<const int8_t*>(rows) + at, scale_of(scales[row(r)]), width, to);
        }
    }
    void prefetch(int64_t token, int64_t count) const {
        const int64_t bytes = stored == Stored::FLOAT ? 4 : stored == Stored::HALF ? 2 : 1;
        for (int64_t r = token; r < token + count; ++r)
            for (int64_t at = row(r) * width * bytes, end = at + width * bytes; at < end; at += 64)
                __builtin_prefetch(static_cast<const char*>(rows) + at, 0, 2);
    }
};

// Where rows are written in their stored form; nothing is kept where `rows` is null. What a reader
// will find comes back in place of the row.
struct StoredTarget {
    Stored stored;
    void* rows;
    uint16_t* scales;

    void write(int64_t row, int64_t width, float* from) const {
        if (stored == Stored::HALF) {
            uint16_t room[64];
            for (int64_t d = 0; d < width; d += 64) {
                const int64_t count = std::min<int64_t>(64, width - d);
                uint16_t* to = rows ? static_cast<uint16_t*>(rows) + row * width + d : room;
                write_halves(from + d, count, to);
                read_halves(to, count, from + d);
            }
        }
        if (stored == Stored::BYTE) {
            int8_t room[4096];
            int8_t* to = rows ? static_cast<int8_t*>(rows) + row * width : room;
            const uint16_t scale = write_bytes(from, width, to);
            if (rows) scales[row] = scale;
            read_bytes(to, scale_of(scale), width, from);
        }
    }
};

}  // namespace slipstream
