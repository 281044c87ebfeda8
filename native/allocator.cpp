// Keeps freed memory in the process, so that the large tensors of the next step find their pages
// already mapped.
#include "kernels.h"
#if defined(__GLIBC__)
#include <malloc.h>
#endif

// Returns 1 where the allocator accepted the setting, 0 where it has none.
SLIPSTREAM_API int32_t ss_keep_freed_memory(int64_t trim_above) {
#if defined(__GLIBC__)
    const int limit = trim_above > 0x7fffffff ? 0x7fffffff : static_cast<int>(trim_above);
    return mallopt(M_MMAP_MAX, 0) && mallopt(M_TRIM_THRESHOLD, limit) && mallopt(M_TOP_PAD, 64 << 20);
#else
    (void)trim_above;
    return 0;
#endif
}
