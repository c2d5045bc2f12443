#pragma once

#include <memory>

#include "cohort/comm/backends/shm/internal/engine.h"
#include "cohort/comm/internal/cpu_backend.h"

namespace cohort::comm::shm {

/// What shm.h makes.
class ShmBackend : public CpuBackend {
 public:
  ShmBackend(std::unique_ptr<Communicator> ranks, std::chrono::milliseconds timeout);

  void abort() override;
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

 private:
  WorkPtr begin(CpuCall&& call) override;
  void check(const CpuCall& call) const override;

  std::shared_ptr<Engine> engine_;
};

}  // namespace cohort::comm::shm
