// Each method checks what the caller gave, and hands the call to PendingState with a body that calls c10d.
// That of a collective owns copies of its tensors and settings, since it may run later, on the group's
// thread. A complex tensor that only moves goes as real numbers, as Gloo has no code for complex numbers.
// Always: every rank counts calls, barriers and subgroups alike, also ranks outside a new subgroup. So the
// names that they derive from these counts agree.
#include "cohort/comm/group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/log.h"
#include "cohort/base/text/format_list.h"
#include "cohort/comm/internal/deadline_store.h"
#include "cohort/comm/internal/pending_state.h"
#include "cohort/comm/store_adapter.h"
#include "cohort/core/torch_compat.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;

// Numbers that only move need not be known to the backend: Gloo has no code for complex ones.
at::Tensor as_numbers(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

void check_rank(const char* what, int rank, int size) {
  if (rank < 0 || rank >= size) reject(base::concat(what, " is ", rank, ", expected 0 to ", size - 1));
}

void check_numel(const char* call, const at::Tensor& big, const at::Tensor& small, int size) {
  if (big.scalar_type() != small.scalar_type() || big.numel() != small.numel() * size) {
    reject(base::concat(call, ": got ", big.dtype().name(), big.sizes(), " and ", small.dtype().name(),
                        small.sizes(), ", expected one type, and ", size,
                        " times as many numbers in the first"));
  }
}

// A group for GPUs sends tensors on the CPU over gloo, which has tags.
void check_tag(const GroupState& state, const char* call, const at::Tensor& tensor, int tag) {
  if (tag == 0 || state.no_message_tags.empty() || tensor.device().type() != state.device) return;
  reject(base::concat(call, ": tag is ", tag, ", and ", state.no_message_tags,
                      ": it would take messages in the order in which they were sent"),
         "tag 0, and messages in the same order on both ends; or tensors on the CPU");
}

}  // namespace

GroupState& Group::state() const {
  if (state_ == nullptr) reject("this process is not in the group", "test the handle first: if (group) ...");
  return *state_;
}

int Group::rank() const {
  return state().rank;
}
int Group::size() const {
  return state().size;
}
const std::string& Group::name() const {
  return state().name;
}
const std::string& Group::backend() const {
  return state().backend;
}
milliseconds Group::timeout() const {
  return state().timeout;
}
const std::vector<int>& Group::job_ranks() const {
  return state().job_ranks;
}
const c10::intrusive_ptr<c10d::ProcessGroup>& Group::process_group() const {
  state().share_with_c10d();
  return state().group;
}

const std::string& Group::reach() const {
  return state().reach;
}

const c10::intrusive_ptr<c10d::Store>& Group::store() const {
  return state().store;
}

bool Group::deterministic_rank_order() const {
  // a + b is b + a, so the sum of two ranks has one order only.
  return state().deterministic_rank_order || state().size <= 2;
}

void Group::step_done() const {
  state().steps.fetch_add(1);
}

std::map<std::string, CallCounters> Group::counters() const {
  return state().counters();
}

at::Tensor Group::empty(at::IntArrayRef sizes, const at::TensorOptions& options) const {
  // NCCL's allocator needs a communicator, which the first collective on a GPU creates.
  const bool is_too_early =
      !options.device().is_cpu() && (!state().has_begun_on_gpu.load() || !state().is_queue_empty());
  if (is_too_early || !has_own_memory(options.device())) return at::empty(sizes, options);
  const auto backend = state().group->getBackend(options.device().type());
  return backend->allocateTensor(c10::multiply_integers(sizes), options).view(sizes);
}

bool Group::has_own_memory(c10::Device device) const {
  state().check_carries(device);
  const auto index = device.has_index() ? device.index() : c10::DeviceIndex(0);
  return state().group->getBackend(device.type())->supportsTensorAlloc(index);
}

Group Group::subgroup(const std::vector<int>& ranks, SubgroupOptions options) const {
  State& parent = state();
  parent.check_usable();
  if (ranks.empty()) reject("a subgroup needs at least one rank");
  if (std::adjacent_find(ranks.begin(), ranks.end(), std::greater_equal<>()) != ranks.end()) {
    reject(base::concat("ranks of a subgroup must ascend without repeats, got ",
                        base::format_list("rank", ranks)));
  }
  check_rank("first rank of the subgroup", ranks.front(), parent.size);
  check_rank("last rank of the subgroup", ranks.back(), parent.size);
  // Before ranks outside leave: they count this subgroup too.
  const std::string number = base::concat(".", parent.subgroups.fetch_add(1));
  const auto place = std::find(ranks.begin(), ranks.end(), parent.rank);
  if (place == ranks.end()) return {};
  std::vector<int> job_ranks;
  for (const int rank : ranks) job_ranks.push_back(parent.job_ranks[static_cast<std::size_t>(rank)]);
  // Connections are the parent's, so that a subgroup opens none of its own.
  return Group(make_state({.store = parent.store,
                           .connections = parent.connections,
                           .prefix = parent.prefix,
                           .name = parent.name + number,
                           .title = parent.title + number,
                           .job_ranks = std::move(job_ranks),
                           .rank = static_cast<int>(place - ranks.begin()),
                           .backend = options.backend.empty() ? parent.backend : options.backend,
                           .timeout = options.timeout.count() == 0 ? parent.timeout : options.timeout,
                           .reach = parent.reach,
                           .is_kept_by_rank = parent.is_kept_by_rank,
                           .check_consistency = options.check_consistency.value_or(parent.check_consistency),
                           .registry = parent.registry,
                           .owner = parent.owner}));
}

Pending Group::all_reduce(at::Tensor& tensor, ReduceOp op, CallOptions options) const {
  return all_reduce(std::span(&tensor, 1), std::move(op), options);
}

Pending Group::all_reduce(std::span<at::Tensor> tensors, ReduceOp op, CallOptions options) const {
  state();
  if (tensors.empty()) return {};
  auto pending = std::make_shared<Pending::State>(state_, "all_reduce", options.timeout);
  std::vector<at::Tensor> list;
  for (const at::Tensor& tensor : tensors) list.push_back(pending->out(tensor, true));
  c10d::AllreduceCoalescedOptions settings;
  settings.reduceOp = op;
  pending->begin({.tensors = list, .op = op_name(op)}, [group = state_->group, list,
                                                        settings](milliseconds left) mutable {
    settings.timeout = left;
    return list.size() == 1 ? group->allreduce(list, settings) : group->allreduce_coalesced(list, settings);
  });
  return Pending(std::move(pending));
}

Pending Group::broadcast(at::Tensor& tensor, int root, CallOptions options) const {
  check_rank("root", root, size());
  auto pending = std::make_shared<Pending::State>(state_, "broadcast", options.timeout);
  std::vector<at::Tensor> list{pending->out(tensor, true)};
  c10d::BroadcastOptions settings;
  settings.rootRank = root;
  pending->begin({.tensors = list, .direction = "from", .peer = root},
                 [group = state_->group, list, settings](milliseconds left) mutable {
                   settings.timeout = left;
                   return group->broadcast(list, settings);
                 });
  return Pending(std::move(pending));
}

Pending Group::reduce(at::Tensor& tensor, int root, ReduceOp op, CallOptions options) const {
  check_rank("root", root, size());
  auto pending = std::make_shared<Pending::State>(state_, "reduce", options.timeout);
  std::vector<at::Tensor> list{pending->out(tensor, true)};
  c10d::ReduceOptions settings;
  settings.reduceOp = op;
  settings.rootRank = root;
  pending->begin({.tensors = list, .op = op_name(op), .direction = "to", .peer = root},
                 [group = state_->group, list, settings](milliseconds left) mutable {
                   settings.timeout = left;
                   return group->reduce(list, settings);
                 });
  return Pending(std::move(pending));
}

Pending Group::all_gather(at::Tensor& output, const at::Tensor& input, CallOptions options) const {
  check_numel("all_gather", output, input, size());
  auto pending = std::make_shared<Pending::State>(state_, "all_gather", options.timeout);
  at::Tensor from = as_numbers(pending->in(input)).view({-1}),
             to = as_numbers(pending->out(output, false)).view({-1});
  c10d::AllgatherOptions settings;
  // The input alone: the output has size() times as many numbers, as check_numel() has seen.
  pending->begin({.tensors = std::span(&pending->tensors[0], 1)},
                 [group = state_->group, to, from, settings](milliseconds left) mutable {
                   settings.timeout = left;
                   return group->COHORT_C10D_ALL_GATHER(to, from, settings);
                 });
  return Pending(std::move(pending));
}

Pending Group::reduce_scatter(at::Tensor& output, const at::Tensor& input, ReduceOp op,
                              CallOptions options) const {
  check_numel("reduce_scatter", input, output, size());
  auto pending = std::make_shared<Pending::State>(state_, "reduce_scatter", options.timeout);
  at::Tensor from = pending->in(input).view({-1}), to = pending->out(output, false).view({-1});
  c10d::ReduceScatterOptions settings;
  settings.reduceOp = op;
  // The output alone, as in all_gather.
  pending->begin({.tensors = std::span(&pending->tensors[1], 1), .op = op_name(op)},
                 [group = state_->group, to, from, settings](milliseconds left) mutable {
                   settings.timeout = left;
                   return group->COHORT_C10D_REDUCE_SCATTER(to, from, settings);
                 });
  return Pending(std::move(pending));
}

Pending Group::all_to_all(at::Tensor& output, const at::Tensor& input,
                          const std::vector<std::int64_t>& output_rows,
                          const std::vector<std::int64_t>& input_rows, CallOptions options) const {
  const auto check = [&](const char* what, const at::Tensor& tensor, const std::vector<std::int64_t>& rows) {
    if (tensor.dim() == 0) reject(base::concat("all_to_all: the ", what, " has no dimension to split"));
    const std::int64_t have = tensor.size(0);
    if (rows.empty()) {
      if (have % size() == 0) return;
      reject(base::concat("all_to_all: ", have, " rows of ", what, " do not divide by ", size(), " ranks"),
             "say how many rows go to each");
    }
    if (static_cast<int>(rows.size()) != size() || std::ranges::any_of(rows, [](auto n) { return n < 0; }) ||
        std::accumulate(rows.begin(), rows.end(), std::int64_t{0}) != have) {
      reject(base::concat("all_to_all: rows of ", what, " must be ", size(), " numbers whose sum is ", have));
    }
  };
  check("input", input, input_rows);
  check("output", output, output_rows);
  auto pending = std::make_shared<Pending::State>(state_, "all_to_all", options.timeout);
  at::Tensor from = as_numbers(pending->in(input)), to = as_numbers(pending->out(output, false));
  std::vector<std::int64_t> to_rows = output_rows, from_rows = input_rows;
  c10d::AllToAllOptions settings;
  // Row numbers are written out where none were given, so that ranks with and without numbers can be
  // compared.
  const auto rows = [&](const std::vector<std::int64_t>& given, const at::Tensor& tensor) {
    const auto n = static_cast<std::size_t>(size());
    return given.empty() ? std::vector<std::int64_t>(n, tensor.size(0) / size()) : given;
  };
  // Dimension 0 differs between ranks. Its rows are compared by what each rank sends and receives.
  pending->begin({.tensors = pending->tensors,
                  .from_dim = 1,
                  .in_rows = rows(input_rows, input),
                  .out_rows = rows(output_rows, output)},
                 [group = state_->group, to, from, to_rows, from_rows, settings](milliseconds left) mutable {
                   settings.timeout = left;
                   return group->COHORT_C10D_ALL_TO_ALL(to, from, to_rows, from_rows, settings);
                 });
  return Pending(std::move(pending));
}

Pending Group::gather(std::span<at::Tensor> outputs, const at::Tensor& input, int root,
                      CallOptions options) const {
  check_rank("root", root, size());
  const int expected = rank() == root ? size() : 0;
  if (static_cast<int>(outputs.size()) != expected) {
    reject(
        base::concat("gather: got ", outputs.size(), " outputs on rank ", rank(), ", expected ", expected));
  }
  for (const at::Tensor& output : outputs) check_numel("gather", output, input, 1);
  auto pending = std::make_shared<Pending::State>(state_, "gather", options.timeout);
  std::vector<at::Tensor> from{pending->in(input)};
  std::vector<std::vector<at::Tensor>> to;
  if (rank() == root) {
    to.emplace_back();
    for (const at::Tensor& output : outputs) to.back().push_back(pending->out(output, false));
  }
  c10d::GatherOptions settings;
  settings.rootRank = root;
  // What only the root has cannot be compared.
  pending->begin({.tensors = from, .direction = "to", .peer = root},
                 [group = state_->group, to, from, settings](milliseconds left) mutable {
                   settings.timeout = left;
                   return group->gather(to, from, settings);
                 });
  return Pending(std::move(pending));
}

Pending Group::scatter(at::Tensor& output, std::span<const at::Tensor> inputs, int root,
                       CallOptions options) const {
  check_rank("root", root, size());
  const int expected = rank() == root ? size() : 0;
  if (static_cast<int>(inputs.size()) != expected) {
    reject(base::concat("scatter: got ", inputs.size(), " inputs on rank ", rank(), ", expected ", expected));
  }
  for (const at::Tensor& input : inputs) check_numel("scatter", input, output, 1);
  auto pending = std::make_shared<Pending::State>(state_, "scatter", options.timeout);
  std::vector<at::Tensor> to{pending->out(output, false)};
  std::vector<std::vector<at::Tensor>> from;
  if (rank() == root) {
    from.emplace_back();
    for (const at::Tensor& input : inputs) from.back().push_back(pending->in(input));
  }
  c10d::ScatterOptions settings;
  settings.rootRank = root;
  // As in gather: the list of inputs is the root's alone.
  pending->begin({.tensors = to, .direction = "from", .peer = root},
                 [group = state_->group, to, from, settings](milliseconds left) mutable {
                   settings.timeout = left;
                   return group->scatter(to, from, settings);
                 });
  return Pending(std::move(pending));
}

Pending Group::send(const at::Tensor& tensor, int to, int tag, CallOptions options) const {
  check_rank("receiver", to, size());
  if (to == rank()) reject("send: a rank cannot send to itself");
  check_tag(*state_, "send", tensor, tag);
  auto pending = std::make_shared<Pending::State>(state_, "send", options.timeout);
  std::vector<at::Tensor> list{pending->in(tensor)};
  // A message begins on this thread and at once, so its body may hold references.
  pending->begin_message({.tensors = list, .direction = "to", .peer = to},
                         [&](milliseconds) { return state_->group->send(list, to, tag); });
  return Pending(std::move(pending));
}

Pending Group::recv(at::Tensor& tensor, int from, int tag, CallOptions options) const {
  check_rank("sender", from, size());
  if (from == rank()) reject("recv: a rank cannot receive from itself");
  check_tag(*state_, "recv", tensor, tag);
  auto pending = std::make_shared<Pending::State>(state_, "recv", options.timeout);
  std::vector<at::Tensor> list{pending->out(tensor, false)};
  pending->begin_message({.tensors = list, .direction = "from", .peer = from},
                         [&](milliseconds) { return state_->group->recv(list, from, tag); });
  return Pending(std::move(pending));
}

namespace {

constexpr milliseconds kTableTime(300);  // that a barrier's error waits for the table of all ranks

// What a barrier came to: an error of the store, the ranks that have not come, or neither.
struct BarrierResult {
  std::string error;
  bool is_silent = false;  // the store
  std::vector<int> missing;
};

BarrierResult run_barrier(GroupState& state, std::int64_t number, base::Deadline deadline) {
  const auto key_of = [](std::int64_t barrier) { return base::concat("barrier/", barrier); };
  BarrierResult result;
  try {
    // Later than the deadline, since the store is then asked who is missing.
    const StoreDeadline until(deadline.later(kLastAnswerTime));
    StoreAdapter kv_store = store_adapter_of(state);
    base::StoreBarrier barrier(kv_store, key_of(number), state.rank, state.size);
    barrier.arrive();
    if (!barrier.wait(deadline)) result.missing = barrier.missing();
    // All have come to this one, so nobody waits at the one before.
    if (result.missing.empty() && state.rank == 0 && number > 0) {
      base::StoreBarrier(kv_store, key_of(number - 1), state.rank, state.size).remove();
    }
  } catch (const std::exception& failure) {
    result.error = base::message_of(failure);
    result.is_silent = dynamic_cast<const TimeoutError*>(&failure) != nullptr;
  }
  if (result.error.empty() && result.missing.empty()) leave_key(state, key_of(number), deadline);
  return result;
}

}  // namespace

// Over the store and not over the backend: the store knows who came, and works in a group that is broken.
void Group::barrier(CallOptions options) const {
  State& group_state = state();
  group_state.check_owner();
  Signature signature("barrier", {});
  signature.number = group_state.barriers.fetch_add(1);
  // A barrier has a position, as every rank makes it: it shows who is behind.
  const std::uint64_t ticket = group_state.flight.begin(signature, group_state.positions.fetch_add(1));
  if (!group_state.is_distributed) {
    group_state.group->barrier({});
    group_state.flight.set(ticket, CallState::kDone);
    return;
  }
  group_state.flight.set(ticket, CallState::kWaiting);
  const base::Deadline deadline(options.timeout.count() == 0 ? group_state.timeout : options.timeout);
  const BarrierResult result = run_barrier(group_state, signature.number, deadline);
  if (result.error.empty() && result.missing.empty()) {
    group_state.flight.set(ticket, CallState::kDone);
    group_state.count("barrier", {.calls = 1, .waiting = deadline.elapsed(), .total = deadline.elapsed()});
    return;
  }
  group_state.flight.set(ticket, CallState::kFailed);
  group_state.throw_if_ended();
  const auto waited = std::chrono::duration_cast<milliseconds>(deadline.elapsed()).count();
  const std::string where =
      base::concat("barrier/", signature.number, " of group '", group_state.name, "' (rank ",
                   group_state.rank, "/", group_state.size, ", ", waited, " ms)");
  const auto who = base::concat(base::format_list("rank", result.missing),
                                result.missing.size() == 1 ? " has" : " have", " not come");
  if (const auto hang_detector = group_state.registry->hang_detector()) {
    hang_detector->failed(base::concat(where, ": ", result.error.empty() ? who : result.error));
    // The table of all ranks is logged before the error, if the store still answers.
    if (!result.is_silent) hang_detector->wait_for_table(base::Deadline(kTableTime));
  }
  if (result.error.empty()) {
    const bool is_own = options.timeout.count() == 0 || group_state.shares_time;
    if (is_own) group_state.give_up(result.missing, deadline, where);
    throw TimeoutError("comm.group", base::concat(where, ": ", who),
                       "look at what they were doing, or raise the timeout");
  }
  if (result.is_silent) {
    throw TimeoutError("comm.group", base::concat(where, ": ", result.error),
                       "look at the rank that keeps the store, rank 0 as a rule");
  }
  const PeerError lost("comm.group", base::concat(where, ": the store cannot be reached: ", result.error),
                       "look at the rank that keeps it, rank 0 as a rule");
  group_state.throw_if_ending(lost);
  throw PeerError(lost);
}

Group make_group(c10::intrusive_ptr<c10d::Store> store, int rank, int size, const std::string& backend,
                 milliseconds timeout, const std::string& reach, ConsistencyCheck check) {
  return Group(make_state({.store = std::move(store),
                           .job_ranks = all_ranks(size),
                           .rank = rank,
                           .backend = backend,
                           .timeout = timeout,
                           .reach = reach,
                           .check_consistency = check}));
}

}  // namespace cohort::comm
