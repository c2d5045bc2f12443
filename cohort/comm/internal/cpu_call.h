#pragma once

#include <c10/util/SmallVector.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "cohort/comm/internal/profiled_call.h"
#include "cohort/comm/internal/tensors.h"

/// What CpuBackend hands to a backend, and the work that a backend hands back.
namespace cohort::comm {

/// With `size` ranks, the tensors of a call are:
///
///     type            outputs                            inputs
///     kAllReduce      any number, reduced in place       none
///     kBroadcast      one, in place                      none
///     kReduce         one, in place                      none
///     kAllGather      of each input one, or `size`       any number
///     kGather         `size` on the root, else none      one
///     kScatter        one                                `size` on the root, else none
///     kReduceScatter  any number                         of each output one, or `size`
///     kAllToAll       those of CpuCall::received         those of CpuCall::sent
///     kSend           none                               one
///     kRecv           one                                none
///     kBarrier        none                               none
///
/// "One, or `size`": one tensor that holds the ranks' parts one after the other, or a tensor for each rank.
enum class CallType : std::uint8_t {
  kAllReduce,
  kBroadcast,
  kReduce,
  kAllGather,
  kGather,
  kScatter,
  kReduceScatter,
  kAllToAll,
  kSend,
  kRecv,
  kBarrier,
};

/// Of each type, as Group's method.
inline constexpr std::array<const char*, 11> kCallNames = {
    "all_reduce",     "broadcast",  "reduce", "all_gather", "gather", "scatter",
    "reduce_scatter", "all_to_all", "send",   "recv",       "barrier"};

/// Returns "all_reduce" and the like, which live as long as the program.
inline const char* name_of(CallType type) {
  return kCallNames[static_cast<std::size_t>(type)];
}

/// A call whose arguments have been checked: tensors are dense, contiguous and on the CPU, and their types
/// and sizes fit each other. Several tensors of one call go one after the other, with one deadline.
/// Ownership: a backend keeps the call until its memory is neither read nor written any more. It then lets go
/// of `inputs` and `profiled`, whether the work still lives or not.
struct CpuCall {
  CallType type = CallType::kBarrier;
  c10d::OpType op_type = c10d::OpType::UNKNOWN;  ///< of the work
  std::chrono::milliseconds timeout{0};          ///< above 0
  std::uint64_t number = 0;                      ///< of this rank's calls of the backend, from 0
  Tensors outputs = {};                          ///< written; the results of the work
  Tensors inputs = {};                           ///< read
  int peer = -1;                                 ///< root, receiver or sender; -1: a message from any rank
  int tag = 0;                                   ///< of a message
  c10::SmallVector<ReductionType, 1> reductions = {};  ///< of each output, where the call reduces
  std::vector<Span> received = {};              ///< kAllToAll: memory for what each rank sends, of any size
  std::vector<Span> sent = {};                  ///< kAllToAll: memory that each rank receives
  std::shared_ptr<ProfiledCall> profiled = {};  ///< ends with the call; null where nobody profiles

  bool is_message() const { return type == CallType::kSend || type == CallType::kRecv; }
  /// Returns how many collectives on one tensor follow each other.
  std::size_t num_collectives() const;
  /// Of kAllGather and kReduceScatter: one tensor holds the parts of all ranks.
  bool is_whole() const { return outputs.size() == inputs.size(); }
  /// Returns a place for each rank: of `inputs[i]` that is gathered, or of `outputs[i]` that is scattered.
  /// Empty on ranks that are not the root.
  std::vector<std::byte*> output_parts(std::size_t i, int size) const;
  std::vector<std::byte*> input_parts(std::size_t i, int size) const;
};

/// A call that has begun, for c10d. Threads: any.
class CpuWork : public c10d::Work {
 public:
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

  CpuWork(int rank, c10d::OpType type, Tensors results);

  std::vector<at::Tensor> result() override { return results_; }
  void synchronize() override {}
  /// Returns the future of the results. It is made at the first call.
  FuturePtr getFuture() override;
  /// The call is over, and failed if `error` is given: who waits returns, and then the future is complete. A
  /// callback of the future may wait for the work. Once.
  void end(std::exception_ptr error = nullptr);

 protected:
  static FuturePtr make_future();
  static void complete(c10::ivalue::Future& future, const std::exception_ptr& error, const Tensors& results);

  const Tensors results_;
  FuturePtr future_;  // under mutex_; null until somebody asks
};

}  // namespace cohort::comm
