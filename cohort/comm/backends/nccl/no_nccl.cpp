// In place of nccl.cpp where this build has no NCCL; COHORT_NO_NCCL says why.
#include "cohort/base/error.h"
#include "cohort/comm/internal/backend.h"

namespace cohort::comm {

std::string nccl_absent() {
  return COHORT_NO_NCCL;
}

BackendInstance make_nccl(const BackendOptions&) {
  throw UsageError(
      "comm.nccl", "backend nccl is not in this build: " + nccl_absent(),
      "gloo for tensors on the CPU; for GPUs build Cohort against LibTorch's CUDA wheel, with a CUDA toolkit "
      "and nccl.h (NCCL_ROOT=FOLDER)");
}

}  // namespace cohort::comm
