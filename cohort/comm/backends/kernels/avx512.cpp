#define COHORT_KERNELS_ISA avx512
#include "cohort/comm/backends/kernels/kernels.inl"
