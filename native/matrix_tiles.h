// Small dense products in registers: C[M x N] += A[M x K] B[K x N], six rows by two vectors at a
// time.
//
// Every element of C is one chain of multiply-adds over k in ascending order, whatever the tile
// sizes: a row's result does not depend on its neighbours, which is why a prefix equals the same
// rows of a longer sequence bit for bit.
#pragma once
#include "vector_math.h"

namespace slipstream {

constexpr int MR = 6;  // rows of a micro-kernel: 6 x 2 accumulators + 2 of B + 1 of A fit 16 registers
#define SLIPSTREAM_NOINLINE __attribute__((noinline))

// Loops over the accumulators are unrolled early, so that these live in registers only.
#define SLIPSTREAM_TILE(M, NV) \
    _Pragma("GCC unroll 16") for (int r = 0; r < (M); ++r) _Pragma("GCC unroll 8") for (int n = 0; n < (NV); ++n)

// acc += A B. A is addressed A[r * lda + k] (rows) or A[k * lda + r] (columns).
template <int M, int NV, bool COLUMNS>
inline __attribute__((always_inline)) void multiply_add(vf (&acc)[M][NV], int64_t depth, const float* __restrict a, int64_t lda,
                                                        const float* __restrict b, int64_t ldb) {
#pragma GCC unroll 4
    for (int64_t k = 0; k < depth; ++k) {
        vf row[NV];
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n) row[n] = load(b + n * W);
#pragma GCC unroll 16
        for (int r = 0; r < M; ++r) {
            const vf x = splat(COLUMNS ? a[r] : a[r * lda]);
#pragma GCC unroll 8
            for (int n = 0; n < NV; ++n) acc[r][n] += x * row[n];
        }
        a += COLUMNS ? lda : 1;
        b += ldb;
    }
}

// Steps of NV vectors through B lie `panel` apart; `steps` of them are taken in one call. noinline:
// GCC spills the accumulators when it inlines this.
template <int M, int NV, bool COLUMNS, bool ZERO>
SLIPSTREAM_NOINLINE void micro_kernel(int64_t steps, int64_t depth, const float* __restrict a, int64_t lda, const float* __restrict b,
                                      int64_t ldb, int64_t panel, float* __restrict c, int64_t ldc) {
    for (int64_t step = 0; step < steps; ++step, b += panel, c += NV * W) {
        vf acc[M][NV];
        SLIPSTREAM_TILE(M, NV) acc[r][n] = ZERO ? vf{} : load(c + r * ldc + n * W);
        if (!ZERO) SLIPSTREAM_TILE(M, 1) __builtin_prefetch(c + (M + r) * ldc + n);  // where the panel after this one adds to
        multiply_add<M, NV, COLUMNS>(acc, depth, a, lda, b, ldb);
        SLIPSTREAM_TILE(M, NV) store(c + r * ldc + n * W, acc[r][n]);
    }
}

typedef void (*Kernel)(int64_t, int64_t, const float*, int64_t, const float*, int64_t, int64_t, float*, int64_t);

template <int NV, bool COLUMNS, bool ZERO>
inline Kernel kernel_for(int rows) {
    static constexpr Kernel table[MR] = {micro_kernel<1, NV, COLUMNS, ZERO>, micro_kernel<2, NV, COLUMNS, ZERO>,
                                         micro_kernel<3, NV, COLUMNS, ZERO>, micro_kernel<4, NV, COLUMNS, ZERO>,
                                         micro_kernel<5, NV, COLUMNS, ZERO>, micro_kernel<6, NV, COLUMNS, ZERO>};
    return table[rows - 1];
}

// Rows of the next panel when `left` remain: MR, but the last two panels share evenly what would
// leave one to three rows to the last, too few to keep the multiply-add units busy.
inline int panel_rows(int64_t left) {
    return static_cast<int>(left > MR && left < MR + 4 ? (left + 1) / 2 : left < MR ? left : MR);
}

// One panel of at most MR rows against `columns` (a multiple of W) columns of B.
template <bool COLUMNS, bool ZERO>
inline void multiply_panel(int rows, int64_t columns, int64_t depth, const float* a, int64_t lda, const float* b, int64_t ldb,
                           int64_t panel, float* c, int64_t ldc) {
    const int64_t wide = columns / W2;
    if (wide) kernel_for<2, COLUMNS, ZERO>(rows)(wide, depth, a, lda, b, ldb, panel, c, ldc);
    if (columns % W2) kernel_for<1, COLUMNS, ZERO>(rows)(1, depth, a, lda, b + wide * panel, ldb, panel, c + wide * W2, ldc);
}

typedef float v8 __attribute__((vector_size(32)));
typedef float v8_any __attribute__((vector_size(32), aligned(4), may_alias));

// dst[c * ldd + r] = src[r * lds + c] for an 8 x 8 block.
inline void transpose_8x8(const float* src, int64_t lds, float* dst, int64_t ldd) {
    v8 x[8], y[8];
    for (int r = 0; r < 8; ++r) x[r] = *reinterpret_cast<const v8_any*>(src + r * lds);
    for (int r = 0; r < 8; r += 2) {
        y[r] = __builtin_shufflevector(x[r], x[r + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        y[r + 1] = __builtin_shufflevector(x[r], x[r + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    for (int r = 0; r < 8; r += 4)
        for (int s = 0; s < 2; ++s) {
            x[r + 2 * s] = __builtin_shufflevector(y[r + s], y[r + 2 + s], 0, 1, 8, 9, 4, 5, 12, 13);
            x[r + 2 * s + 1] = __builtin_shufflevector(y[r + s], y[r + 2 + s], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int r = 0; r < 4; ++r) {
        *reinterpret_cast<v8_any*>(dst + r * ldd) = __builtin_shufflevector(x[r], x[r + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        *reinterpret_cast<v8_any*>(dst + (r + 4) * ldd) = __builtin_shufflevector(x[r], x[r + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

// Panels of W2 source rows, transposed: dst[panel][column][row in panel], zero rows past the end.
SLIPSTREAM_NOINLINE static void pack_transposed(const float* src, int64_t stride, int64_t rows, int64_t columns, float* dst) {
    for (int64_t r0 = 0; r0 < rows; r0 += W2, dst += columns * W2) {
        for (int64_t r = 0; r < W2; r += 8) {
            const int64_t left = rows - r0 - r;
            const float* from = src + (r0 + r) * stride;
            int64_t c = 0;
            if (left >= 8)
                for (; c + 8 <= columns; c += 8) transpose_8x8(from + c, stride, dst + c * W2 + r, W2);
            for (; c < columns; ++c)
                for (int64_t i = 0; i < 8; ++i) dst[c * W2 + r + i] = i < left ? from[i * stride + c] : 0.0f;
        }
    }
}

// Prefetches rows of a strided matrix: a head's rows lie apart, which the hardware's own
// prefetching does not follow.
inline void prefetch_rows(const float* src, int64_t stride, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; ++r, src += stride)
        for (int64_t c = 0; c < columns; c += 16) __builtin_prefetch(src + c, 0, 2);
}

// to[c] = factor * from[c].
inline void scale_row(const float* __restrict from, int64_t columns, float factor, float* __restrict to) {
    int64_t c = 0;
    for (; c + W <= columns; c += W) store(to + c, load(from + c) * factor);
    for (; c < columns; ++c) to[c] = factor * from[c];
}

// Rows times `factor`, side by side in `padded` columns, zero-filled.
inline void pack_rows(const float* src, int64_t stride, int64_t rows, int64_t columns, float factor, float* dst, int64_t padded) {
    for (int64_t r = 0; r < rows; ++r, src += stride, dst += padded) {
        scale_row(src, columns, factor, dst);
        for (int64_t c = columns; c < padded; ++c) dst[c] = 0.0f;
    }
}

// Every head's rows of scratch, `step` apart from head to head, to where they stand in memory: row
// by row, so that writes run on.
__attribute__((unused)) SLIPSTREAM_NOINLINE static void unpack_heads(const float* src, int64_t step, int64_t padded, int64_t heads, int64_t rows, int64_t columns,
                                             float factor, float* dst, int64_t stride) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < heads; ++i) scale_row(src + i * step + r * padded, columns, factor, dst + r * stride + i * columns);
}

inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

}  // namespace slipstream
