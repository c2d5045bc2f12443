// A hook on each parameter brings its gradient into a bucket, and complete buckets are launched while
// backward continues. Buckets are launched in the order of their index, so collectives meet whatever the
// order of gradients on a rank. At the end of the backward a callback waits for all buckets and gives the
// averages out. A reducer is idle, armed by prepare(), or done; after done a further backward is rejected.
// After a failure it is broken for good, because the ranks no longer agree on what comes next.
#include "cohort/parallel/reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <mutex>
#include <unordered_map>

#include "cohort/autograd/detached_graph.h"
#include "cohort/autograd/graph_walk.h"
#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/timeline.h"
#include "cohort/parallel/internal/gradient_buckets.h"

namespace cohort::parallel {
namespace {

using Clock = std::chrono::steady_clock;
using torch::autograd::Node;
using torch::autograd::Variable;
using torch::autograd::variable_list;
// An intrusive pointer from LibTorch 2.13 on, a shared one before.
using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<const Variable&>()));

// How many tensors share a gradient's memory if nobody but the parameter will read it. What came to it may be
// that memory, which the hook's caller still holds, and with it what it is a view of.
std::size_t owners_of(const at::Tensor& gradient, const at::Tensor& came) {
  if (!gradient.defined() || !gradient.has_storage() || !came.defined() || !came.has_storage()) return 1;
  if (!gradient.is_alias_of(came)) return 1;
  return came.is_view() && came._base().use_count() == 1 ? 3 : 2;
}

constexpr int kNoBackward = -1;

// Whether the backward that is running goes wherever its graph goes: not that of torch::autograd::grad(), or
// where inputs are named.
bool is_whole_backward() {
  const auto* const parts = torch::autograd::get_current_graph_task_exec_info();
  return parts == nullptr || parts->empty();
}

ReducerOptions with_own_hook(ReducerOptions options) {
  if (!options.make_hook) return options;
  if (options.hook) {
    throw UsageError("parallel.reduce", "ReducerOptions has both hook and make_hook", "make_hook alone");
  }
  options.hook = options.make_hook();
  return options;
}

}  // namespace

struct Reducer::State : std::enable_shared_from_this<Reducer::State> {
  enum class Phase {
    kIdle,    // hooks do nothing
    kArmed,   // the next backward reduces
    kDone,    // it has: another one would add this rank's gradients to averaged ones
    kBroken,  // ranks no longer agree
  };

  State(comm::Group of, std::vector<NamedParameter> parameters, const ReducerOptions& given)
      : group(of), options(with_own_hook(given)), buckets(std::move(of), std::move(parameters), options) {}

  void attach();
  void detach();
  void arm(const std::optional<StepInfo>& info, std::span<const at::Tensor> outputs);
  std::vector<bool> reached_from(std::span<const at::Tensor> outputs) const;
  std::vector<bool> reached_by_backward() const;
  void on_output(const std::vector<bool>& reached);
  void open(const std::vector<bool>& reached = {});
  void send_step_header();
  void receive_step_header();
  void on_gradient(std::size_t index, const variable_list& came);
  void take(std::size_t index, std::size_t owners);
  void mark_ready(std::size_t index, std::size_t owners = 1);
  void end_with_backward();
  void reduce_rest();
  void finalize();
  at::Tensor used_here() const;
  [[noreturn]] void throw_left_out() const;

  // Whether this backward tells what all others will do.
  bool is_counting() const { return options.static_graph && !has_counted; }
  bool is_all_ready() const { return next_bucket == buckets.buckets.size() && missing_sparse == 0; }
  bool sends_buckets() const { return reduces && buckets.is_distributed(); }
  bool may_leave_out() const { return options.find_unused_parameters || options.static_graph; }

  const comm::Group group;
  const ReducerOptions options;
  GradientBuckets buckets;
  std::vector<std::pair<NodePtr, std::uintptr_t>> hooks;  // of each gradient: where it hangs, and its key
  std::unordered_map<const Node*, std::size_t> by_accumulator;
  std::atomic<int> silent{0};  // NoSyncs that live
  bool has_counted = false;    // of a static graph: how often each gradient comes
  Companion companion;

  // Since prepare().
  std::mutex mutex;  // hooks run on the threads of devices
  std::atomic<Phase> phase{Phase::kIdle};
  std::optional<StepInfo> step_info;
  bool has_outputs = false;
  bool is_open = false;         // Note [Where a reduction begins]
  int ends_with = kNoBackward;  // the backward at whose end gradients are scattered to the parameters
  std::size_t next_bucket = 0;
  std::size_t missing_sparse = 0;
  Clock::time_point begin;
  at::Tensor header;
  comm::Pending header_pending;
  bool is_header_open = false;
  double weight = 1;
  double scale = 1;
  bool reduces = true;
  ReduceReport report;
};

void Reducer::State::attach() {
  for (std::size_t i = 0; i < buckets.gradients.size(); ++i) {
    NodePtr accumulator = torch::autograd::impl::grad_accumulator(buckets.gradients[i].parameter);
    by_accumulator[accumulator.get()] = i;
    const std::uintptr_t key =
        accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
            [weak = weak_from_this(), i](const variable_list& outputs, const variable_list& inputs) {
              if (const auto state = weak.lock()) state->on_gradient(i, inputs);
              return outputs;
            }));
    hooks.emplace_back(std::move(accumulator), key);
  }
}

void Reducer::State::detach() {
  for (const auto& [accumulator, key] : hooks) accumulator->del_post_hook(key);
}

// -------------------------------------------------------------------------------------- before backward

// Note [Where a reduction begins]
// prepare() follows each forward, and not each forward is followed by a backward: a batch is skipped, or the
// forward was for a metric, perhaps on one rank alone, and perhaps between another forward and its backward.
// So prepare() only notes what the backward will need, and a hook on its outputs what these reach. Nothing
// travels, and no gradient is touched, before a backward begins, or finish().
//
// Where ranks may use different parts, a backward begins at those outputs. The first gradient is too late:
// one rank's comes before, another's after a collective of the model's own, such as SyncBatchNorm's. Where
// all ranks use all parameters, it begins at the first gradient.

void Reducer::State::arm(const std::optional<StepInfo>& info, std::span<const at::Tensor> outputs) {
  const std::lock_guard lock(mutex);
  if (phase == Phase::kBroken) {
    throw UsageError("parallel.reduce", "a reduction failed before: ranks no longer agree", "a new Reducer");
  }
  if (silent > 0) return;
  if (phase == Phase::kArmed && is_open) throw_left_out();
  if (info) check_weight(*info);
  step_info = info;
  is_open = is_header_open = false;
  ends_with = kNoBackward;
  has_outputs = !outputs.empty();
  begin = Clock::now();
  phase = Phase::kArmed;
  if (!may_leave_out()) return;
  const auto reached = std::make_shared<std::vector<bool>>(buckets.gradients.size(), false);
  if (options.find_unused_parameters) *reached = reached_from(outputs);
  for (const at::Tensor& output : outputs) {
    // A leaf would keep the hook, for later backwards too. Where it is a parameter its own hook begins.
    if (!autograd::needs_gradient(output) || output.is_leaf()) continue;
    output.register_hook([weak = weak_from_this(), reached](const at::Tensor& /*gradient*/) {
      if (const auto state = weak.lock()) state->on_output(*reached);
    });
  }
}

// Which parameters `outputs` reach.
std::vector<bool> Reducer::State::reached_from(std::span<const at::Tensor> outputs) const {
  std::vector<bool> reached(buckets.gradients.size(), false);
  autograd::GraphWalk walk;
  for (const at::Tensor& output : outputs) walk.add(autograd::edge_of(output).function.get());
  while (Node* const node = walk.next()) {
    const auto found = by_accumulator.find(node);
    if (found != by_accumulator.end()) {
      reached[found->second] = true;
    } else {
      walk.add_next_nodes(*node);
    }
  }
  return reached;
}

// Which parameters the backward that is running will bring gradients to.
std::vector<bool> Reducer::State::reached_by_backward() const {
  const auto* const nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  const auto* const parts = torch::autograd::get_current_graph_task_exec_info();
  const auto will_run = [&](Node* node) {
    if (is_whole_backward()) return nodes != nullptr && nodes->contains(node);
    const auto found = parts->find(node);
    return found != parts->end() && found->second.needed_;
  };
  std::vector<bool> reached;
  for (const auto& hook : hooks) reached.push_back(will_run(hook.first.get()));
  return reached;
}

// ------------------------------------------------------------------------------------- while it runs

// A backward comes to an output of a forward, from which it may reach those parameters.
void Reducer::State::on_output(const std::vector<bool>& reached) {
  const std::lock_guard lock(mutex);
  if (silent > 0 || phase != Phase::kArmed || at::GradMode::is_enabled()) return;
  std::vector<bool> all = reached_by_backward();
  if (!is_whole_backward() && std::ranges::find(all, true) == all.end()) return;
  try {
    // Another backward may come to the rest of these; this one to what another forward reaches.
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = all[i] || reached[i];
    open(all);
  } catch (...) {
    phase = Phase::kBroken;
    throw;
  }
  end_with_backward();
}

// What begins on every rank before the first bucket is complete. `reached`: the parameters whose gradients
// will come, where that is known.
void Reducer::State::open(const std::vector<bool>& reached) {
  if (is_open) return;
  if (companion.begin) companion.begin();
  buckets.begin_backward();
  next_bucket = missing_sparse = 0;
  reduces = true;
  scale = 1.0 / group.size();
  report = {};
  report.weight = group.size();
  if (step_info) send_step_header();
  for (GradientBuckets::Bucket& bucket : buckets.buckets) bucket.missing = bucket.gradients.size();
  for (std::size_t i = 0; i < buckets.gradients.size(); ++i) {
    Gradient& gradient = buckets.gradients[i];
    const bool is_unreached = options.find_unused_parameters && !reached.empty() && !reached[i];
    gradient.is_used = gradient.has_arrived = false;
    if (is_counting()) gradient.expected = 0;
    gradient.missing = is_counting() ? 1 : options.static_graph ? gradient.expected : is_unreached ? 0 : 1;
    if (gradient.is_sparse) ++missing_sparse;
  }
  // What backward will not come to is ready as it is.
  for (std::size_t i = 0; i < buckets.gradients.size(); ++i) {
    if (buckets.gradients[i].missing == 0) mark_ready(i);
  }
  is_open = true;
}

void Reducer::State::send_step_header() {
  weight = step_info->weight;
  header = make_step_header(group, *step_info);
  is_header_open = true;
  if (group.size() > 1) header_pending = group.all_reduce(header, comm::ReduceOp::SUM, {options.timeout});
}

// Learns from the step headers of all ranks what this one's gradients count.
void Reducer::State::receive_step_header() {
  if (!is_header_open) return;
  is_header_open = false;
  header_pending.wait();
  static_cast<AverageReport&>(report) = read_step_header(header, group.size());
  reduces = report.ok() && report.weight > 0;
  scale = reduces ? weight / report.weight : 0;
}

void Reducer::State::on_gradient(std::size_t index, const variable_list& came) {
  const std::lock_guard lock(mutex);
  Gradient& gradient = buckets.gradients[index];
  const bool has_come = came[0].defined();  // not of a node of several results that the loss does not use
  if (silent > 0 || phase == Phase::kIdle) gradient.is_accumulated = gradient.is_accumulated || has_come;
  if (silent > 0 || phase == Phase::kIdle || phase == Phase::kBroken) return;
  if (phase == Phase::kDone) {
    throw UsageError("parallel.reduce",
                     base::concat("a second backward reached ", gradient.name,
                                  " after the gradients were averaged: it would add this rank's alone"),
                     "no_sync() around all backwards of a step but the last, or a forward before each");
  }
  if (at::GradMode::is_enabled()) {
    throw UsageError("parallel.reduce",
                     "backward with create_graph: averaged gradients cannot be gone back through",
                     "torch::autograd::grad, which reduces nothing");
  }
  try {
    if (!is_open) open(has_outputs ? reached_by_backward() : std::vector<bool>());
    gradient.is_used = gradient.is_used || has_come;  // open() has cleared it
    take(index, owners_of(gradient.parameter.grad(), came[0]));
  } catch (...) {
    phase = Phase::kBroken;
    throw;
  }
}

void Reducer::State::take(std::size_t index, std::size_t owners) {
  Gradient& gradient = buckets.gradients[index];
  if (!std::exchange(gradient.has_arrived, true)) {
    buckets.record_ready(index, std::chrono::duration<double>(Clock::now() - begin).count());
  }
  if (is_counting()) {
    ++gradient.expected;
    return;
  }
  if (gradient.missing == 0) {
    throw UsageError("parallel.reduce",
                     base::concat("the gradient of ", gradient.name,
                                  " came twice in one backward, or came although it was taken for unused"),
                     "static_graph, if every step does the same");
  }
  if (--gradient.missing > 0) return;
  mark_ready(index, owners);
  if (is_all_ready()) end_with_backward();
}

void Reducer::State::mark_ready(std::size_t index, std::size_t owners) {
  receive_step_header();
  Gradient& gradient = buckets.gradients[index];
  if (gradient.is_sparse) {
    --missing_sparse;
    return;
  }
  if (sends_buckets()) buckets.put(gradient, scale, owners);
  std::vector<GradientBuckets::Bucket>& list = buckets.buckets;
  --list[gradient.bucket].missing;
  // In the order of their index on every rank, whatever the order of gradients.
  for (; next_bucket < list.size() && list[next_bucket].missing == 0; ++next_bucket) {
    if (options.overlap && sends_buckets()) buckets.launch(next_bucket);
  }
}

// ------------------------------------------------------------------------------------------- after it

// Has the backward that is running end with the gradients scattered, if all have come by then.
void Reducer::State::end_with_backward() {
  const int running = torch::autograd::get_current_graph_task_id();
  if (std::exchange(ends_with, running) == running) return;
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    const auto state = weak.lock();
    if (!state || state->phase != Phase::kArmed) return;
    if (state->is_counting()) {
      state->reduce_rest();
    } else if (state->is_all_ready()) {
      state->finalize();
    }
  });
}

// What has not come is ready as it stands.
void Reducer::State::reduce_rest() {
  phase = Phase::kBroken;  // unless all goes well
  open();
  for (std::size_t i = 0; i < buckets.gradients.size(); ++i) {
    if (std::exchange(buckets.gradients[i].missing, 0) != 0) mark_ready(i);
  }
  finalize();
}

void Reducer::State::finalize() {
  phase = Phase::kBroken;  // unless all goes well
  const auto start = Clock::now();
  receive_step_header();
  if (sends_buckets()) {
    base::TimelineScope scope("wait for gradients");
    const at::NoGradGuard no_grad;
    for (std::size_t b = 0; !options.overlap && b < buckets.buckets.size(); ++b) buckets.launch(b);
    at::Tensor used;
    comm::Pending used_pending;
    if (may_leave_out()) {
      used = used_here();
      used_pending = group.all_reduce(used, comm::ReduceOp::SUM, {options.timeout});
    }
    buckets.reduce_sparse_ones(scale);
    buckets.wait_for_all();
    used_pending.wait();
    buckets.scatter_to_grads(used, report);
  }
  if (companion.end) companion.end();
  report.exposed = Clock::now() - start;
  for (Gradient& gradient : buckets.gradients) {
    has_counted = has_counted || gradient.is_used;
    gradient.is_accumulated = !reduces && (gradient.is_accumulated || gradient.is_used);
  }
  if (reduces) buckets.note_backward();
  // Here all ranks are, and no thread of a device has a gradient under way.
  buckets.regroup();
  phase = Phase::kDone;
}

// 1 for each gradient that came on this rank, in this backward or in those that were not reduced before.
at::Tensor Reducer::State::used_here() const {
  at::Tensor used = at::zeros({static_cast<std::int64_t>(buckets.gradients.size())}, at::kInt);
  auto* flags = used.mutable_data_ptr<int>();
  for (const Gradient& gradient : buckets.gradients) {
    const bool came = gradient.is_used || gradient.is_accumulated;
    *flags++ = came && gradient.parameter.grad().defined() ? 1 : 0;
  }
  return used;
}

void Reducer::State::throw_left_out() const {
  constexpr int kMax = 10;
  base::TextList names;
  int count = 0;
  for (const Gradient& gradient : buckets.gradients) {
    if (!gradient.is_used && count++ < kMax) names.add(gradient.name);
  }
  const std::string more = count > kMax ? base::concat(" and ", count - kMax, " more") : "";
  throw UsageError(
      "parallel.reduce",
      base::concat("backward left ", count, " of ", buckets.gradients.size(),
                   " parameters without a gradient, so not all were averaged: ", names.text(), more),
      may_leave_out() ? "prepare(outputs), or finish() after backward"
                      : "find_unused_parameters, if they take no part in the loss");
}

// ------------------------------------------------------------------------------------------------ public

Reducer::Reducer(comm::Group group, std::vector<NamedParameter> parameters, const ReducerOptions& options)
    : state_(std::make_shared<State>(std::move(group), std::move(parameters), options)) {
  state_->attach();
}

Reducer::~Reducer() {
  state_->detach();
}

void Reducer::set_companion(Companion companion) {
  state_->companion = std::move(companion);
}

void Reducer::prepare(std::span<const at::Tensor> outputs) {
  state_->arm(std::nullopt, outputs);
}

void Reducer::prepare(const StepInfo& info, std::span<const at::Tensor> outputs) {
  state_->arm(info, outputs);
}

bool Reducer::is_prepared() const {
  return state_->phase == State::Phase::kArmed || state_->phase == State::Phase::kDone;
}

ReduceReport Reducer::finish() {
  State& state = *state_;
  if (state.silent > 0) {
    throw UsageError("parallel.reduce", "finish() while a NoSync lives, under which nothing is reduced");
  }
  if (state.phase == State::Phase::kArmed) {
    if (state.is_open && !state.may_leave_out()) state.throw_left_out();
    state.reduce_rest();
  }
  if (state.phase != State::Phase::kDone) {
    throw UsageError("parallel.reduce", state.phase == State::Phase::kBroken
                                            ? "a reduction failed before: ranks no longer agree"
                                            : "finish() without a prepare() before it");
  }
  state.phase = State::Phase::kIdle;
  return state.report;
}

Reducer::NoSync::NoSync(Reducer& reducer) : reducer_(reducer) {
  ++reducer_.state_->silent;
}

Reducer::NoSync::~NoSync() {
  --reducer_.state_->silent;
}

bool Reducer::is_silent() const {
  return state_->silent > 0;
}

const comm::Group& Reducer::group() const {
  return state_->group;
}

std::vector<std::vector<std::string>> Reducer::buckets() const {
  return state_->buckets.names();
}

}  // namespace cohort::parallel
