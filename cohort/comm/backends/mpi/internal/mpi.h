#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "cohort/comm/backends/mpi/internal/steps.h"

/// c10d's backend over MPI. Tensors are contiguous and on the CPU; what there is no code for is refused by
/// name, as c10::Error, before anything travels.
namespace cohort::comm::mpi {

class MpiBackend : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  MpiBackend(Engine& engine, CommunicatorsPtr comms, std::chrono::milliseconds timeout);

  const std::string getBackendName() const override { return "mpi"; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return number_.load(); }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_rows,
                        std::vector<std::int64_t>& input_rows, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

 private:
  WorkPtr submit(const char* name, c10d::OpType type, Tensors results, Steps steps,
                 std::chrono::milliseconds timeout);
  WorkPtr submit_message(const char* name, c10d::OpType type, Tensors results, Steps steps);
  WorkPtr reduce_all(Tensors& tensors, const c10d::ReduceOp& op, std::chrono::milliseconds timeout);
  void add_gather_to_all(Steps& steps, const Tensors& outputs, const at::Tensor& input) const;
  int check_tag(const CallSite& who, int tag) const;

  Engine& engine_;
  const CommunicatorsPtr comms_;
  std::chrono::milliseconds timeout_;
  std::atomic<std::uint64_t> number_{0};
};

/// Makes the communicators of a group: `members` are its ranks as MPI knows them, `rank` is this one's place
/// among them. Collective over the group. Throws: TimeoutError.
CommunicatorsPtr make_communicators(Engine& engine, const std::vector<int>& members, int rank,
                                    base::Deadline deadline);

}  // namespace cohort::comm::mpi
