#define COHORT_KERNELS_ISA portable
#include "cohort/comm/kernels/kernels.inl"
