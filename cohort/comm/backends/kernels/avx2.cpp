#define COHORT_KERNELS_ISA avx2
#include "cohort/comm/backends/kernels/kernels.inl"
