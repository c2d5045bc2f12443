#define COHORT_SHM_ISA portable
#include "cohort/comm/shm/kernels.inl"
