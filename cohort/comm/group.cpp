#include "cohort/comm/group.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "cohort/comm/state.h"
#include "cohort/core/error.h"
#include "cohort/core/exception_text.h"
#include "cohort/core/log.h"
#include "cohort/core/torch_compat.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;
using Work = c10::intrusive_ptr<c10d::Work>;

std::string shapes(std::span<const at::Tensor> tensors) {
  std::string text;
  for (std::size_t i = 0; i < tensors.size() && i < 3; ++i) {
    text += core::concat(i == 0 ? "" : ", ", tensors[i].dtype().name(), tensors[i].sizes());
  }
  if (tensors.size() > 3) text += core::concat(" and ", tensors.size() - 3, " more");
  return text;
}

[[noreturn]] void refuse(const std::string& what, const std::string& hint = "") {
  throw UsageError("comm.group", what, hint);
}

// Numbers that only move need not be known to the backend: Gloo has no code for complex ones.
at::Tensor as_numbers(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

void check_rank(const char* what, int rank, int size) {
  if (rank < 0 || rank >= size) refuse(core::concat(what, " is ", rank, ", expected 0 to ", size - 1));
}

void check_numel(const char* call, const at::Tensor& big, const at::Tensor& small, int size) {
  if (big.scalar_type() != small.scalar_type() || big.numel() != small.numel() * size) {
    refuse(core::concat(call, ": got ", big.dtype().name(), big.sizes(), " and ", small.dtype().name(),
                        small.sizes(), ", expected one type, and ", size,
                        " times as many numbers in the first"));
  }
}

}  // namespace

// A collective that is under way. `sent` are the tensors that the backend has; where one is a copy of a view,
// `returns` copies it back.
struct Pending::State {
  std::shared_ptr<Group::State> group;
  std::string call;
  std::int64_t number = 0;
  core::Deadline deadline;
  std::vector<at::Tensor> tensors;
  std::vector<std::pair<at::Tensor, at::Tensor>> returns;  // (view, its contiguous copy)
  Work work;

  State(std::shared_ptr<Group::State> of, const char* name, milliseconds timeout)
      : group(std::move(of)), call(name), deadline(timeout.count() == 0 ? group->timeout : timeout) {
    if (timeout.count() < 0) refuse(core::concat(name, ": timeout is ", timeout.count(), " ms"));
    group->check_usable();
    number = group->calls.fetch_add(1);
  }

  // A contiguous tensor to give to the backend in place of `tensor`.
  at::Tensor in(const at::Tensor& tensor) {
    tensors.push_back(tensor.contiguous());
    return tensors.back();
  }
  at::Tensor out(const at::Tensor& tensor, bool reads) {
    if (tensor.requires_grad() && tensor.is_leaf() && at::GradMode::is_enabled()) {
      refuse(call + ": a tensor that requires grad would be changed in place",
             "at::NoGradGuard, or detach()");
    }
    if (tensor.is_contiguous()) {
      tensors.push_back(tensor);
      return tensor;
    }
    at::Tensor copy = reads ? tensor.contiguous() : at::empty_like(tensor, at::MemoryFormat::Contiguous);
    tensors.push_back(copy);
    returns.emplace_back(tensor, copy);
    return copy;
  }

  milliseconds left() const { return milliseconds(std::max(1, deadline.remaining_ms())); }

  std::string describe() const {
    return core::concat(call, " ", number, " of group '", group->name, "' (rank ", group->rank, "/",
                        group->size, ", ", shapes(tensors), ", ",
                        std::chrono::duration_cast<milliseconds>(deadline.elapsed()).count(), " ms)");
  }

  [[noreturn]] void fail(const std::exception& error) {
    std::string what = describe();
    // Gloo refuses a type it has no code for when it runs, on every rank, before anything travels.
    if (std::string_view(error.what()).find("Invalid scalar type") != std::string_view::npos) {
      throw UsageError("comm.group", core::concat(what, ": ", core::message_of(error)));
    }
    group->mark_broken(what + ": " + core::message_of(error));
    what += group->silent_ranks();
    throw_as_ours(error, "comm.group", what);
  }

  void finish() {
    const Work running = work;
    try {
      if (!running->wait(left())) throw std::runtime_error("it was aborted");
    } catch (const std::exception& error) {
      // Timed out here means that the backend goes on: it keeps the tensors, and the group is not used again.
      fail(error);
    }
    const at::NoGradGuard no_grad;
    for (auto& [view, copy] : returns) view.copy_(copy);
    returns.clear();
  }
};

Pending::Pending() = default;
Pending::Pending(std::unique_ptr<State> state) : state_(std::move(state)) {}
Pending::Pending(Pending&&) noexcept = default;
Pending& Pending::operator=(Pending&& other) noexcept {
  std::swap(state_, other.state_);
  return *this;
}

Pending::~Pending() {
  if (state_ == nullptr) return;
  try {
    state_->finish();
  } catch (const std::exception& error) {
    core::log_warning(core::concat("nobody waited for a collective that failed: ", error.what()));
  }
}

void Pending::wait() {
  if (state_ == nullptr) return;
  const std::unique_ptr<State> state = std::move(state_);
  state->finish();
}

bool Pending::done() const {
  return state_ == nullptr || state_->work->isCompleted();
}

const c10::intrusive_ptr<c10d::Work>& Pending::work() const {
  static const c10::intrusive_ptr<c10d::Work> none;
  return state_ == nullptr ? none : state_->work;
}

Group::State& Group::state() const {
  if (state_ == nullptr) refuse("this process is not in the group", "test the handle first: if (group) ...");
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
  return state().group;
}
const c10::intrusive_ptr<c10d::Store>& Group::store() const {
  return state().store;
}

Group Group::subgroup(const std::vector<int>& ranks, SubgroupOptions options) const {
  State& parent = state();
  parent.check_usable();
  if (ranks.empty()) refuse("a subgroup needs at least one rank");
  if (std::adjacent_find(ranks.begin(), ranks.end(), std::greater_equal<>()) != ranks.end()) {
    refuse(core::concat("ranks of a subgroup must ascend without repeats, got ", list_ranks(ranks)));
  }
  check_rank("first rank of the subgroup", ranks.front(), parent.size);
  check_rank("last rank of the subgroup", ranks.back(), parent.size);
  const std::string child = core::concat(parent.name, ".", parent.subgroups.fetch_add(1));
  const auto place = std::find(ranks.begin(), ranks.end(), parent.rank);
  if (place == ranks.end()) return {};
  std::vector<int> job_ranks;
  for (const int rank : ranks) job_ranks.push_back(parent.job_ranks[static_cast<std::size_t>(rank)]);
  return Group(make_state(parent.store, child, std::move(job_ranks), static_cast<int>(place - ranks.begin()),
                          parent.backend, options.timeout.count() == 0 ? parent.timeout : options.timeout,
                          parent.reach));
}

namespace {

// Hands `body` to the backend and wraps what it returns.
template <typename Body>
void begin(auto& pending, const Body& body) {
  const at::NoGradGuard no_grad;
  try {
    pending.work = body();
  } catch (const c10::Error& error) {
    // Refused before anything travelled: a type or an operation that the backend does not know.
    throw UsageError("comm.group", core::concat(pending.describe(), ": ", error.what_without_backtrace()));
  } catch (const std::exception& error) {
    pending.fail(error);
  }
}

}  // namespace

Pending Group::all_reduce(at::Tensor& tensor, ReduceOp op, CallOptions options) const {
  return all_reduce(std::span(&tensor, 1), std::move(op), options);
}

Pending Group::all_reduce(std::span<at::Tensor> tensors, ReduceOp op, CallOptions options) const {
  state();
  if (tensors.empty()) return {};
  auto pending = std::make_unique<Pending::State>(state_, "all_reduce", options.timeout);
  std::vector<at::Tensor> list;
  for (const at::Tensor& tensor : tensors) list.push_back(pending->out(tensor, true));
  begin(*pending, [&] {
    if (list.size() == 1) {
      c10d::AllreduceOptions settings;
      settings.reduceOp = std::move(op);
      settings.timeout = pending->left();
      return state_->group->allreduce(list, settings);
    }
    c10d::AllreduceCoalescedOptions settings;
    settings.reduceOp = std::move(op);
    settings.timeout = pending->left();
    return state_->group->allreduce_coalesced(list, settings);
  });
  return Pending(std::move(pending));
}

Pending Group::broadcast(at::Tensor& tensor, int root, CallOptions options) const {
  check_rank("root", root, size());
  auto pending = std::make_unique<Pending::State>(state_, "broadcast", options.timeout);
  std::vector<at::Tensor> list{pending->out(tensor, true)};
  c10d::BroadcastOptions settings;
  settings.rootRank = root;
  settings.timeout = pending->left();
  begin(*pending, [&] { return state_->group->broadcast(list, settings); });
  return Pending(std::move(pending));
}

Pending Group::reduce(at::Tensor& tensor, int root, ReduceOp op, CallOptions options) const {
  check_rank("root", root, size());
  auto pending = std::make_unique<Pending::State>(state_, "reduce", options.timeout);
  std::vector<at::Tensor> list{pending->out(tensor, true)};
  c10d::ReduceOptions settings;
  settings.reduceOp = std::move(op);
  settings.rootRank = root;
  settings.timeout = pending->left();
  begin(*pending, [&] { return state_->group->reduce(list, settings); });
  return Pending(std::move(pending));
}

Pending Group::all_gather(at::Tensor& output, const at::Tensor& input, CallOptions options) const {
  check_numel("all_gather", output, input, size());
  auto pending = std::make_unique<Pending::State>(state_, "all_gather", options.timeout);
  at::Tensor from = as_numbers(pending->in(input)).view({-1}),
             to = as_numbers(pending->out(output, false)).view({-1});
  c10d::AllgatherOptions settings;
  settings.timeout = pending->left();
  begin(*pending, [&] { return state_->group->COHORT_C10D_ALL_GATHER(to, from, settings); });
  return Pending(std::move(pending));
}

Pending Group::reduce_scatter(at::Tensor& output, const at::Tensor& input, ReduceOp op,
                              CallOptions options) const {
  check_numel("reduce_scatter", input, output, size());
  auto pending = std::make_unique<Pending::State>(state_, "reduce_scatter", options.timeout);
  at::Tensor from = pending->in(input).view({-1}), to = pending->out(output, false).view({-1});
  c10d::ReduceScatterOptions settings;
  settings.reduceOp = std::move(op);
  settings.timeout = pending->left();
  begin(*pending, [&] { return state_->group->COHORT_C10D_REDUCE_SCATTER(to, from, settings); });
  return Pending(std::move(pending));
}

Pending Group::all_to_all(at::Tensor& output, const at::Tensor& input,
                          const std::vector<std::int64_t>& output_rows,
                          const std::vector<std::int64_t>& input_rows, CallOptions options) const {
  const auto check = [&](const char* what, const at::Tensor& tensor, const std::vector<std::int64_t>& rows) {
    if (tensor.dim() == 0) refuse(core::concat("all_to_all: the ", what, " has no dimension to split"));
    const std::int64_t have = tensor.size(0);
    if (rows.empty()) {
      if (have % size() == 0) return;
      refuse(core::concat("all_to_all: ", have, " rows of ", what, " do not divide by ", size(), " ranks"),
             "say how many rows go to each");
    }
    if (static_cast<int>(rows.size()) != size() || std::ranges::any_of(rows, [](auto n) { return n < 0; }) ||
        std::accumulate(rows.begin(), rows.end(), std::int64_t{0}) != have) {
      refuse(core::concat("all_to_all: rows of ", what, " must be ", size(), " numbers whose sum is ", have));
    }
  };
  check("input", input, input_rows);
  check("output", output, output_rows);
  auto pending = std::make_unique<Pending::State>(state_, "all_to_all", options.timeout);
  at::Tensor from = as_numbers(pending->in(input)), to = as_numbers(pending->out(output, false));
  std::vector<std::int64_t> to_rows = output_rows, from_rows = input_rows;
  c10d::AllToAllOptions settings;
  settings.timeout = pending->left();
  begin(*pending,
        [&] { return state_->group->COHORT_C10D_ALL_TO_ALL(to, from, to_rows, from_rows, settings); });
  return Pending(std::move(pending));
}

Pending Group::gather(std::span<at::Tensor> outputs, const at::Tensor& input, int root,
                      CallOptions options) const {
  check_rank("root", root, size());
  const int expected = rank() == root ? size() : 0;
  if (static_cast<int>(outputs.size()) != expected) {
    refuse(
        core::concat("gather: got ", outputs.size(), " outputs on rank ", rank(), ", expected ", expected));
  }
  for (const at::Tensor& output : outputs) check_numel("gather", output, input, 1);
  auto pending = std::make_unique<Pending::State>(state_, "gather", options.timeout);
  std::vector<at::Tensor> from{pending->in(input)};
  std::vector<std::vector<at::Tensor>> to;
  if (rank() == root) {
    to.emplace_back();
    for (const at::Tensor& output : outputs) to.back().push_back(pending->out(output, false));
  }
  c10d::GatherOptions settings;
  settings.rootRank = root;
  settings.timeout = pending->left();
  begin(*pending, [&] { return state_->group->gather(to, from, settings); });
  return Pending(std::move(pending));
}

Pending Group::scatter(at::Tensor& output, std::span<const at::Tensor> inputs, int root,
                       CallOptions options) const {
  check_rank("root", root, size());
  const int expected = rank() == root ? size() : 0;
  if (static_cast<int>(inputs.size()) != expected) {
    refuse(core::concat("scatter: got ", inputs.size(), " inputs on rank ", rank(), ", expected ", expected));
  }
  for (const at::Tensor& input : inputs) check_numel("scatter", input, output, 1);
  auto pending = std::make_unique<Pending::State>(state_, "scatter", options.timeout);
  std::vector<at::Tensor> to{pending->out(output, false)};
  std::vector<std::vector<at::Tensor>> from;
  if (rank() == root) {
    from.emplace_back();
    for (const at::Tensor& input : inputs) from.back().push_back(pending->in(input));
  }
  c10d::ScatterOptions settings;
  settings.rootRank = root;
  settings.timeout = pending->left();
  begin(*pending, [&] { return state_->group->scatter(to, from, settings); });
  return Pending(std::move(pending));
}

Pending Group::send(const at::Tensor& tensor, int to, int tag, CallOptions options) const {
  check_rank("receiver", to, size());
  if (to == rank()) refuse("send: a rank cannot send to itself");
  auto pending = std::make_unique<Pending::State>(state_, "send", options.timeout);
  std::vector<at::Tensor> list{pending->in(tensor)};
  begin(*pending, [&] { return state_->group->send(list, to, tag); });
  return Pending(std::move(pending));
}

Pending Group::recv(at::Tensor& tensor, int from, int tag, CallOptions options) const {
  check_rank("sender", from, size());
  if (from == rank()) refuse("recv: a rank cannot receive from itself");
  auto pending = std::make_unique<Pending::State>(state_, "recv", options.timeout);
  std::vector<at::Tensor> list{pending->out(tensor, false)};
  begin(*pending, [&] { return state_->group->recv(list, from, tag); });
  return Pending(std::move(pending));
}

// Over the store and not over the backend: the store knows who came, and works in a group that is broken.
void Group::barrier(CallOptions options) const {
  State& mine = state();
  if (!mine.has_peers) {
    mine.group->barrier({});
    return;
  }
  const core::Deadline deadline(options.timeout.count() == 0 ? mine.timeout : options.timeout);
  const std::string key = core::concat("barrier/", mine.barriers.fetch_add(1));
  std::string error;
  try {
    mine.store->set(core::concat(key, "/", mine.rank), std::string("1"));
  } catch (const std::exception& failure) {
    error = core::message_of(failure);
  }
  std::vector<int> missing;
  if (error.empty()) missing = missing_ranks(*mine.store, key, mine.size, deadline, error);
  const auto waited = std::chrono::duration_cast<milliseconds>(deadline.elapsed()).count();
  const std::string where = core::concat(key, " of group '", mine.name, "' (rank ", mine.rank, "/", mine.size,
                                         ", ", waited, " ms)");
  if (!error.empty()) {
    throw PeerError("comm.group", core::concat(where, ": the store cannot be reached: ", error),
                    "look at the rank that keeps it, rank 0 as a rule");
  }
  if (!missing.empty()) {
    throw TimeoutError("comm.group",
                       core::concat(where, ": ", missing.size() == 1 ? "rank " : "ranks ",
                                    list_ranks(missing), missing.size() == 1 ? " has" : " have", " not come"),
                       "look at what they were doing, or raise the timeout");
  }
}

}  // namespace cohort::comm
