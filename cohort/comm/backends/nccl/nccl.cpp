// LibTorch's NCCL backend: a library of its own, see load.cpp.
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "cohort/comm/internal/backend.h"

extern "C" __attribute__((visibility("default"))) void cohort_make_nccl(
    const cohort::comm::BackendOptions& options, cohort::comm::BackendInstance& made) {
  auto settings = c10d::ProcessGroupNCCL::Options::create();
  settings->timeout = options.timeout;
  made.backend =
      c10::make_intrusive<c10d::ProcessGroupNCCL>(options.store, options.rank, options.size, settings);
  made.type = c10d::ProcessGroup::BackendType::NCCL;
  made.device = c10::kCUDA;
  made.no_message_tags = "NCCL has no tags";  // it matches messages by their order alone
}
