#define COHORT_SHM_ISA avx2
#include "cohort/comm/shm/kernels.inl"
