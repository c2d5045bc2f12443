#define COHORT_KERNELS_ISA avx2
#include "cohort/comm/internal/kernels/kernels.inl"
