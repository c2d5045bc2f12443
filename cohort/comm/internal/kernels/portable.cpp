#define COHORT_KERNELS_ISA portable
#include "cohort/comm/internal/kernels/kernels.inl"
