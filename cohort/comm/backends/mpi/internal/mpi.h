#pragma once

#include "cohort/comm/backends/mpi/internal/steps.h"
#include "cohort/comm/internal/cpu_backend.h"

/// c10d's backend over MPI.
namespace cohort::comm::mpi {

class MpiBackend : public CpuBackend {
 public:
  MpiBackend(Engine& engine, CommunicatorsPtr comms, std::chrono::milliseconds timeout);

 private:
  WorkPtr begin(CpuCall&& call) override;
  void check(const CpuCall& call) const override;
  void add_steps(Steps& steps, const CpuCall& call, std::size_t i) const;

  Engine& engine_;
  const CommunicatorsPtr comms_;
};

/// Makes the communicators of a group: `members` are its ranks as MPI knows them, `rank` is this one's place
/// among them. Collective over the group. Throws: TimeoutError.
CommunicatorsPtr make_communicators(Engine& engine, const std::vector<int>& members, int rank,
                                    base::Deadline deadline);

}  // namespace cohort::comm::mpi
