#define COHORT_SHM_ISA avx512
#include "cohort/comm/shm/kernels.inl"
