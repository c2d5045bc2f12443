#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cohort/comm/call_types.h"
#include "cohort/comm/pending.h"

namespace c10d {
class ProcessGroup;  // <torch/csrc/distributed/c10d/ProcessGroup.hpp>, which takes 4 s to compile
class Store;
}  // namespace c10d

/// Process groups: the ranks of a job, or some of them, and their collectives.
///
///     auto group = comm::init_process_group();
///     auto pending = group.all_reduce(gradient, c10d::ReduceOp::AVG);
///     ...                                          // compute meanwhile
///     pending.wait();
///
/// Every rank of a group makes the same calls in the same order.
namespace cohort::comm {

struct GroupState;

/// What a subgroup has of its own.
struct SubgroupOptions {
  /// 0: as the parent's.
  std::chrono::milliseconds timeout{0};
  /// As the parent's if not given.
  std::optional<ConsistencyCheck> check_consistency = std::nullopt;
  /// As the parent's if empty: "shm" for the ranks of one host, under a parent over gloo.
  std::string backend = "";
};

/// The ranks of a job, or some of them, as this process sees them. Every call of an empty handle but the
/// test for one throws UsageError.
/// Ownership: copies share the group, which closes when the last one and all of its Pending are gone.
/// Threads: one caller at a time; two groups may be used at once.
class Group {
 public:
  using State = GroupState;
  /// No group: what subgroup() returns to ranks that are not in it.
  Group() = default;
  explicit Group(std::shared_ptr<State> state) : state_(std::move(state)) {}
  explicit operator bool() const { return state_ != nullptr; }
  /// For this module and its tests.
  const std::shared_ptr<State>& shared_state() const { return state_; }

  /// This process's number among the ranks of this group, 0 to size() - 1; not its rank in the job.
  int rank() const;
  int size() const;
  /// The name that c10d knows the group under; it stands in messages.
  const std::string& name() const;
  /// The registered name of the backend, "gloo"; never "auto".
  const std::string& backend() const;
  /// Of each call that names none.
  std::chrono::milliseconds timeout() const;
  /// Rank in the whole job of each rank of this group.
  const std::vector<int>& job_ranks() const;
  /// c10d's own. Once it was asked for, calls that are compared come back when every rank has made them, so
  /// that what is begun on it keeps its place among them on every rank.
  const c10::intrusive_ptr<c10d::ProcessGroup>& process_group() const;
  /// The host that connections of the backend must reach, rank 0's; 127.0.0.1 where all ranks are on one
  /// machine; empty: any.
  const std::string& reach() const;
  /// A store of this group's own.
  const c10::intrusive_ptr<c10d::Store>& store() const;

  /// Whether a sum's bits hang on the numbers of the ranks alone, and not on where in a tensor they lie, as
  /// in a ring of three ranks or more.
  bool deterministic_rank_order() const;

  /// Says that a step of training is over: see Check. On every rank, between the same calls, or on none.
  void step_done() const;

  /// By collective, as the method is called.
  std::map<std::string, CallCounters> counters() const;

  /// Returns a tensor, not initialised, in memory that this group's backend works on fastest: with shm that
  /// of shared_empty(). Throws: SystemError when there is no memory.
  at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options = {}) const;
  /// Whether the backend for `device` has memory that it is faster in than in any other: what empty() gives.
  /// Throws: UsageError where the backend carries no tensors on that kind of device.
  bool has_own_memory(c10::Device device) const;

  /// Makes a group of `ranks` (of this one, ascending). Collective over this group; ranks that are not in it
  /// get an empty handle. Throws: UsageError; RendezvousError.
  Group subgroup(const std::vector<int>& ranks, SubgroupOptions options = {}) const;

  /// Every rank's `tensor` becomes the sum (or another `op`) of all ranks' tensors. Shapes and types: the
  /// same on each rank. Throws, as each call below: UsageError here for arguments that this rank can judge;
  /// the rest from wait().
  Pending all_reduce(at::Tensor& tensor, ReduceOp op = ReduceOp::SUM, CallOptions options = {}) const;
  /// Tensors of one type and device, as one operation.
  Pending all_reduce(std::span<at::Tensor> tensors, ReduceOp op = ReduceOp::SUM,
                     CallOptions options = {}) const;
  /// Every rank's `tensor` becomes that of rank `root`.
  Pending broadcast(at::Tensor& tensor, int root, CallOptions options = {}) const;
  /// What the other ranks' tensors hold afterwards is undefined.
  Pending reduce(at::Tensor& tensor, int root, ReduceOp op = ReduceOp::SUM, CallOptions options = {}) const;
  /// Shapes: output.numel() == size() * input.numel(), rank 0's first.
  Pending all_gather(at::Tensor& output, const at::Tensor& input, CallOptions options = {}) const;
  /// Shapes: input.numel() == size() * output.numel(); part r goes to rank r.
  Pending reduce_scatter(at::Tensor& output, const at::Tensor& input, ReduceOp op = ReduceOp::SUM,
                         CallOptions options = {}) const;
  /// Shapes: dimension 0 is split into `output_rows` and `input_rows`, a number for each rank; empty:
  /// equally.
  Pending all_to_all(at::Tensor& output, const at::Tensor& input,
                     const std::vector<std::int64_t>& output_rows = {},
                     const std::vector<std::int64_t>& input_rows = {}, CallOptions options = {}) const;
  /// `outputs`: on the root a tensor like `input` for each rank, elsewhere empty.
  Pending gather(std::span<at::Tensor> outputs, const at::Tensor& input, int root,
                 CallOptions options = {}) const;
  /// `inputs`: on the root a tensor like `output` for each rank, elsewhere empty.
  Pending scatter(at::Tensor& output, std::span<const at::Tensor> inputs, int root,
                  CallOptions options = {}) const;
  /// Sends `tensor` to rank `to`, which calls recv() for it. Messages between two ranks are told apart by
  /// `tag`; a backend without tags takes 0 only. Throws: UsageError for this rank itself, and for a tag that
  /// the backend has not.
  Pending send(const at::Tensor& tensor, int to, int tag = 0, CallOptions options = {}) const;
  /// `tensor`, whose shape and type are those that were sent, becomes what rank `from` sends with `tag`.
  /// Throws: as send().
  Pending recv(at::Tensor& tensor, int from, int tag = 0, CallOptions options = {}) const;
  /// Blocks until every rank has come. Throws: TimeoutError naming the ranks that did not.
  void barrier(CallOptions options = {}) const;

 private:
  State& state() const;
  std::shared_ptr<State> state_;
};

/// Makes a group over a store that its ranks share already: ranks that are threads, stores of a user's own.
/// `reach`: an address of a host that the backend's connections must reach; empty: any.
Group make_group(c10::intrusive_ptr<c10d::Store> store, int rank, int size, const std::string& backend,
                 std::chrono::milliseconds timeout, const std::string& reach = "127.0.0.1",
                 ConsistencyCheck check_consistency = ConsistencyCheck::kFirst);

}  // namespace cohort::comm
