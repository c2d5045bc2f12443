#define COHORT_KERNELS_ISA portable
#include "cohort/comm/backends/kernels/kernels.inl"
