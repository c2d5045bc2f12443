#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "cohort/comm/internal/cpu_call.h"
#include "cohort/comm/internal/tensors.h"

namespace cohort::comm {

/// The base of backends of our own, for tensors on the CPU: c10d's overloads become calls of one form, with
/// their arguments checked. A backend says how such a call begins:
///
///     class MyBackend : public CpuBackend {
///      public:
///       MyBackend(int rank, int size) : CpuBackend("mine", rank, size, std::chrono::minutes(10)) {}
///
///      private:
///       WorkPtr begin(CpuCall&& call) override {
///         if (call.type != CallType::kBarrier) move_data(call);
///         return completed(call);
///       }
///     };
///
/// PREMUL_SUM arrives as the sum of scaled tensors. An average of integers, or a sum of complex numbers, is
/// what ReductionType says.
///
/// Threads: any may call; begin() may run on several at once.
/// Throws: c10::Error naming backend and call for arguments that do not fit, before anything travels and
/// before the call has a number: "Backend mine: broadcast: got rank 3, expected 0 to 2".
class CpuBackend : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  /// `name` lives as long as the program. `timeout`: of calls that give none.
  CpuBackend(const char* name, int rank, int size, std::chrono::milliseconds timeout);

  const std::string getBackendName() const final { return name_; }
  c10::intrusive_ptr<Options> getBackendOptions() final;
  /// Not beside a call.
  void setTimeout(std::chrono::milliseconds timeout) final { timeout_ = timeout; }
  void setSequenceNumberForGroup() final {}
  /// Returns how many calls this rank has begun, messages among them.
  std::uint64_t getSequenceNumberForGroup() final { return next_number_.load(); }

  /// `tensors` is one tensor. c10d's list is for tensors on several devices.
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) final;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) final;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) final;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) final;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) final;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) final;
  /// `outputs[rank][i]` becomes what `inputs[i]` is on that rank.
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) final;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) final;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) final;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) final;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) final;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) final;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) final;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_rows,
                        std::vector<std::int64_t>& input_rows, const c10d::AllToAllOptions& options) final;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) final;
  WorkPtr send(Tensors& tensors, int to, int tag) final;
  WorkPtr recv(Tensors& tensors, int from, int tag) final;
  WorkPtr recvAnysource(Tensors& tensors, int tag) final;
  WorkPtr barrier(const c10d::BarrierOptions& options) final;

 protected:
  /// Begins the call, and returns without waiting for other ranks.
  virtual WorkPtr begin(CpuCall&& call) = 0;
  /// Throws c10::Error for a call that this backend alone cannot do. `call.number` is not set yet.
  virtual void check(const CpuCall& /*call*/) const {}

  CallSite caller(CallType type) const { return {name_, name_of(type)}; }
  /// Returns the work of a call that is over.
  WorkPtr completed(const CpuCall& call) const;

 private:
  void check_own_part(const CpuCall& call) const;
  WorkPtr submit(CpuCall&& call);
  WorkPtr submit(CpuCall&& call, const c10d::ReduceOp& op);
  WorkPtr start(CpuCall&& call);

  const char* const name_;
  std::chrono::milliseconds timeout_;
  std::atomic<std::uint64_t> next_number_{0};
};

}  // namespace cohort::comm
