#pragma once

#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

/// A backend for tests: any world size in one process, nothing travels, and every call is recorded.
///
///     auto group = comm::make_group(c10::make_intrusive<c10d::HashStore>(), 3, 64, "fake", 1s);
///     ...
///     comm::FakeBackend::of(group).calls()
///
/// The numbers are those of a group whose other ranks hold what this one holds: a sum over 64 ranks is 64
/// times the tensor, an average the tensor itself. recv() leaves its tensor alone.
namespace cohort::comm {

class Group;

class FakeBackend : public c10d::Backend {
 public:
  struct RecordedCall {
    std::string name;  ///< as Group's method
    std::vector<std::vector<std::int64_t>> shapes;
    at::ScalarType dtype = at::kFloat;
    int peer = -1;  ///< root or peer, where there is one
  };
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  FakeBackend(int rank, int size) : Backend(rank, size) {}
  /// Throws: UsageError if the group's backend is another.
  static FakeBackend& of(const Group& group);
  std::vector<RecordedCall> calls() const;

  const std::string getBackendName() const override { return "fake"; }
  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(std::vector<at::Tensor>& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_rows,
                        std::vector<std::int64_t>& input_rows, const c10d::AllToAllOptions& options) override;
  WorkPtr gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr send(std::vector<at::Tensor>& tensors, int to, int tag) override;
  WorkPtr recv(std::vector<at::Tensor>& tensors, int from, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

 private:
  WorkPtr record(const char* name, const std::vector<at::Tensor>& tensors, c10d::OpType type, int peer = -1);
  void reduce_alike(at::Tensor& tensor, const c10d::ReduceOp& op) const;

  mutable std::mutex mutex_;
  std::vector<RecordedCall> calls_;
};

}  // namespace cohort::comm
