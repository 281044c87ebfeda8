// OpenMP's thread number where the compiler has OpenMP; the one thread there is where it has not.
// Without OpenMP every `#pragma omp` is ignored, so the kernels compute the same on one thread.
#pragma once
#if defined(_OPENMP)
#include <omp.h>
#else
static inline int omp_get_thread_num() { return 0; }
static inline int omp_get_num_threads() { return 1; }
#endif
