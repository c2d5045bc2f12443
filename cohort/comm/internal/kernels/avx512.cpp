#define COHORT_KERNELS_ISA avx512
#include "cohort/comm/internal/kernels/kernels.inl"
