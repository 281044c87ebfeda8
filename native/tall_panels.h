// Panels of more rows than matrix_tiles.h has, where the registers hold their sums: taller panels
// read B less often, which is what limits a product whose B does not stay in the first cache.
#pragma once
#include <algorithm>

#include "matrix_tiles.h"

namespace slipstream {

#if defined(__AVX512F__)
constexpr int TALL = 2 * MR;
#else
constexpr int TALL = MR;
#endif

// One panel of at most TALL rows; otherwise as multiply_panel.
template <bool COLUMNS, bool ZERO>
void multiply_tall(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t panel,
                   float* c, int64_t ldc) {
    if (TALL > MR && rows == TALL && columns % W2 == 0) {
        micro_kernel<TALL, 2, COLUMNS, ZERO>(columns / W2, depth, a, lda, b, ldb, panel, c, ldc);
        return;
    }
    for (int64_t r = 0; r < rows; r += MR)
        multiply_panel<COLUMNS, ZERO>(static_cast<int>(std::min<int64_t>(MR, rows - r)), columns, depth, a + r * (COLUMNS ? 1 : lda), lda, b,
                                      ldb, panel, c + r * ldc, ldc);
}

}  // namespace slipstream
