#include "cohort/parallel/reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/embedding.h>

#include <atomic>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "cohort/core/error.h"
#include "cohort/core/graph_part.h"
#include "cohort/core/timeline.h"
#include "cohort/parallel/gradient_buckets.h"

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

// Calls `body` when the backward that is running is over.
void after_backward(std::function<void()> body) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(body));
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
      : group(of), options(given), buckets(std::move(of), std::move(parameters), given) {}

  void attach();
  void detach();
  void arm(const std::optional<Contribution>& mine, std::span<const at::Tensor> outputs);
  void look_for_unreached(std::span<const at::Tensor> outputs);
  void finish_after(std::span<const at::Tensor> outputs, bool reaches_none);
  void open();
  void send_header();
  void settle();
  void on_gradient(std::size_t index, const variable_list& came);
  void take(std::size_t index, std::size_t owners);
  void mark_ready(std::size_t index, std::size_t owners = 1);
  void mark_rest();
  void finalize();
  at::Tensor used_here() const;
  [[noreturn]] void throw_left_out() const;

  // Whether this backward tells what all others will do.
  bool is_counting() const { return options.static_graph && !has_counted; }
  bool is_all_ready() const { return next_bucket == buckets.buckets.size() && missing_sparse == 0; }
  bool travels() const { return reduces && buckets.travel(); }

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
  std::optional<Contribution> contribution;
  std::vector<bool> is_reached;  // by the outputs, where that is looked for; else empty
  bool is_open = false;          // Note [Where a reduction begins]
  bool has_begun = false;        // a gradient came
  bool is_end_queued = false;
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
// forward was for a metric, perhaps on one rank alone. So prepare() only notes what the backward will need.
// Nothing travels, and no gradient is touched, before the first gradient of a backward comes, or finish().

void Reducer::State::arm(const std::optional<Contribution>& mine, std::span<const at::Tensor> outputs) {
  if (phase == Phase::kBroken) {
    throw UsageError("parallel.reduce", "a reduction failed before: ranks no longer agree", "a new Reducer");
  }
  if (silent > 0) return;
  if (phase == Phase::kArmed && has_begun) throw_left_out();
  if (mine) check_weight(*mine);
  contribution = mine;
  is_open = has_begun = is_end_queued = is_header_open = false;
  is_reached.clear();
  begin = Clock::now();
  phase = Phase::kArmed;
  if (outputs.empty() || !(options.find_unused_parameters || is_counting())) return;
  look_for_unreached(outputs);
  const bool reaches_none = std::ranges::find(is_reached, true) == is_reached.end();
  if (is_counting() || reaches_none) finish_after(outputs, reaches_none);
}

void Reducer::State::look_for_unreached(std::span<const at::Tensor> outputs) {
  is_reached.assign(buckets.gradients.size(), false);
  std::unordered_set<const Node*> seen;
  std::vector<Node*> open;
  const auto visit = [&](Node* node) {
    if (node == nullptr || !seen.insert(node).second) return;
    const auto found = by_accumulator.find(node);
    if (found == by_accumulator.end()) {
      open.push_back(node);
    } else {
      is_reached[found->second] = true;
    }
  };
  for (const at::Tensor& output : outputs) visit(core::edge_of(output).function.get());
  while (!open.empty()) {
    Node* const node = open.back();
    open.pop_back();
    for (const torch::autograd::Edge& edge : node->next_edges()) visit(edge.function.get());
  }
}

// Has the backward through `outputs` end with everything reduced, whatever came. The end is that of the
// outermost backward, where recomputation starts others within. torch::autograd::grad() through them is no
// such backward: no gradient comes.
void Reducer::State::finish_after(std::span<const at::Tensor> outputs, bool reaches_none) {
  for (const at::Tensor& output : outputs) {
    if (!core::needs_gradient(output)) continue;
    output.register_hook([weak = weak_from_this(), reaches_none](const at::Tensor& /*gradient*/) {
      const auto state = weak.lock();
      if (!state || state->silent > 0 || state->phase != Phase::kArmed || state->is_end_queued) return;
      state->is_end_queued = true;
      after_backward([weak, reaches_none] {
        const auto then = weak.lock();
        if (!then || then->phase != Phase::kArmed) return;
        if (!then->has_begun && !reaches_none) {
          then->is_end_queued = false;
          return;
        }
        then->open();
        then->mark_rest();
        then->finalize();
      });
    });
  }
}

// ------------------------------------------------------------------------------------- while it runs

// What begins on every rank before the first bucket is complete.
void Reducer::State::open() {
  if (std::exchange(is_open, true)) return;
  if (companion.begin) companion.begin();
  buckets.regroup();
  next_bucket = missing_sparse = 0;
  reduces = true;
  scale = 1.0 / group.size();
  report = {};
  report.weight = group.size();
  if (contribution) send_header();
  for (GradientBuckets::Bucket& bucket : buckets.buckets) bucket.missing = bucket.gradients.size();
  for (std::size_t i = 0; i < buckets.gradients.size(); ++i) {
    Gradient& gradient = buckets.gradients[i];
    const bool is_unreached = options.find_unused_parameters && !is_reached.empty() && !is_reached[i];
    gradient.is_used = false;
    if (is_counting()) gradient.expected = 0;
    gradient.missing = is_counting() ? 1 : options.static_graph ? gradient.expected : is_unreached ? 0 : 1;
    if (gradient.is_sparse) ++missing_sparse;
  }
  // What backward will not come to is ready as it is.
  for (std::size_t i = 0; i < buckets.gradients.size(); ++i) {
    if (buckets.gradients[i].missing == 0) mark_ready(i);
  }
}

void Reducer::State::send_header() {
  weight = contribution->weight;
  header = header_of(group, *contribution);
  is_header_open = true;
  if (group.size() > 1) header_pending = group.all_reduce(header, comm::ReduceOp::SUM, {options.timeout});
}

// Learns from the other ranks' contributions what this one's gradients count.
void Reducer::State::settle() {
  if (!is_header_open) return;
  is_header_open = false;
  header_pending.wait();
  static_cast<AverageReport&>(report) = read_header(header, group.size());
  reduces = report.ok() && report.weight > 0;
  scale = reduces ? weight / report.weight : 0;
}

void Reducer::State::on_gradient(std::size_t index, const variable_list& came) {
  if (silent > 0) return;
  const Phase now = phase;
  if (now == Phase::kDone) {
    throw UsageError("parallel.reduce",
                     core::concat("a second backward reached ", buckets.gradients[index].name,
                                  " after the gradients were averaged: it would add this rank's alone"),
                     "no_sync() around all backwards of a step but the last, or a forward before each");
  }
  if (now != Phase::kArmed) return;
  if (at::GradMode::is_enabled()) {
    throw UsageError("parallel.reduce",
                     "backward with create_graph: averaged gradients cannot be gone back through",
                     "torch::autograd::grad, which reduces nothing");
  }
  const std::lock_guard lock(mutex);
  try {
    open();
    take(index, owners_of(buckets.gradients[index].parameter.grad(), came[0]));
  } catch (...) {
    phase = Phase::kBroken;
    throw;
  }
}

void Reducer::State::take(std::size_t index, std::size_t owners) {
  Gradient& gradient = buckets.gradients[index];
  has_begun = true;
  if (!gradient.is_used) {
    buckets.note_arrival(index, std::chrono::duration<double>(Clock::now() - begin).count());
  }
  gradient.is_used = true;
  if (is_counting()) {
    ++gradient.expected;
    return;
  }
  if (gradient.missing == 0) {
    throw UsageError("parallel.reduce",
                     core::concat("the gradient of ", gradient.name,
                                  " came twice in one backward, or came although it was taken for unused"),
                     "static_graph, if every step does the same");
  }
  if (--gradient.missing > 0) return;
  mark_ready(index, owners);
  if (!is_all_ready() || is_end_queued) return;
  is_end_queued = true;
  after_backward([weak = weak_from_this()] {
    if (const auto state = weak.lock()) state->finalize();
  });
}

void Reducer::State::mark_ready(std::size_t index, std::size_t owners) {
  settle();
  Gradient& gradient = buckets.gradients[index];
  if (gradient.is_sparse) {
    --missing_sparse;
    return;
  }
  if (travels()) buckets.put(gradient, scale, owners);
  std::vector<GradientBuckets::Bucket>& list = buckets.buckets;
  --list[gradient.bucket].missing;
  // In the order of their index on every rank, whatever the order of gradients.
  for (; next_bucket < list.size() && list[next_bucket].missing == 0; ++next_bucket) {
    if (options.overlap && travels()) buckets.launch(next_bucket);
  }
}

// ------------------------------------------------------------------------------------------- after it

void Reducer::State::mark_rest() {
  for (std::size_t i = 0; i < buckets.gradients.size(); ++i) {
    if (std::exchange(buckets.gradients[i].missing, 0) != 0) mark_ready(i);
  }
}

void Reducer::State::finalize() {
  phase = Phase::kBroken;  // unless all goes well
  const auto start = Clock::now();
  settle();
  if (travels()) {
    core::TimelineScope scope("wait for gradients");
    const at::NoGradGuard no_grad;
    for (std::size_t b = 0; !options.overlap && b < buckets.buckets.size(); ++b) buckets.launch(b);
    at::Tensor used;
    comm::Pending used_pending;
    if (options.find_unused_parameters || options.static_graph) {
      used = used_here();
      used_pending = group.all_reduce(used, comm::ReduceOp::SUM, {options.timeout});
    }
    buckets.reduce_sparse_ones(scale);
    buckets.wait_for_all();
    used_pending.wait();
    buckets.give_out(used, report);
  }
  if (companion.end) companion.end();
  report.exposed = Clock::now() - start;
  if (reduces) buckets.note_backward();
  has_counted = has_counted || has_begun;
  has_begun = false;
  phase = Phase::kDone;
}

// 1 for each gradient that this rank has, from this backward or from silent ones before.
at::Tensor Reducer::State::used_here() const {
  at::Tensor used = at::zeros({static_cast<std::int64_t>(buckets.gradients.size())}, at::kInt);
  auto* flags = used.mutable_data_ptr<int>();
  for (const Gradient& gradient : buckets.gradients) {
    *flags++ = gradient.is_used || gradient.parameter.grad().defined() ? 1 : 0;
  }
  return used;
}

void Reducer::State::throw_left_out() const {
  constexpr int kMost = 10;
  std::string names;
  int count = 0;
  for (const Gradient& gradient : buckets.gradients) {
    if (!gradient.is_used && count++ < kMost) names += (names.empty() ? "" : ", ") + gradient.name;
  }
  if (count > kMost) names += core::concat(" and ", count - kMost, " more");
  throw UsageError("parallel.reduce",
                   core::concat("backward left ", count, " of ", buckets.gradients.size(),
                                " parameters without a gradient, so not all were averaged: ", names),
                   options.find_unused_parameters || options.static_graph
                       ? "prepare(outputs), or finish() after backward"
                       : "find_unused_parameters, if they take no part in the loss");
}

// ------------------------------------------------------------------------------------------------ public

namespace {

std::unordered_set<const at::TensorImpl*> sparse_weights(const torch::nn::Module& module) {
  std::unordered_set<const at::TensorImpl*> weights;
  const auto look = [&](const torch::nn::Module& part) {
    const auto* const embedding = part.as<torch::nn::EmbeddingImpl>();
    const auto* const bag = part.as<torch::nn::EmbeddingBagImpl>();
    if (embedding != nullptr && embedding->options.sparse()) {
      weights.insert(embedding->weight.unsafeGetTensorImpl());
    }
    if (bag != nullptr && bag->options.sparse()) weights.insert(bag->weight.unsafeGetTensorImpl());
  };
  look(module);
  for (const auto& part : module.modules(/*include_self=*/false)) look(*part);
  return weights;
}

}  // namespace

std::vector<NamedParameter> parameters_to_reduce(const torch::nn::Module& module,
                                                 const std::vector<std::string>& ignored) {
  std::vector<NamedParameter> list;
  std::unordered_set<const at::TensorImpl*> seen;
  std::unordered_set<std::string> left(ignored.begin(), ignored.end());
  const std::unordered_set<const at::TensorImpl*> sparse = sparse_weights(module);
  for (const auto& entry : module.named_parameters()) {
    const at::TensorImpl* const tensor = entry.value().unsafeGetTensorImpl();
    const bool is_ignored = left.erase(entry.key()) > 0;
    if (!entry.value().requires_grad() || !seen.insert(tensor).second) continue;
    if (!is_ignored) list.push_back({entry.key(), entry.value(), sparse.contains(tensor)});
  }
  for (const auto& entry : module.named_buffers()) left.erase(entry.key());
  if (!left.empty()) {
    throw UsageError("parallel.reduce", core::concat("there is no \"", *left.begin(), "\" to ignore"));
  }
  return list;
}

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

void Reducer::prepare(const Contribution& mine, std::span<const at::Tensor> outputs) {
  state_->arm(mine, outputs);
}

bool Reducer::is_prepared() const {
  return state_->phase == State::Phase::kArmed || state_->phase == State::Phase::kDone;
}

ReduceReport Reducer::finish() {
  State& state = *state_;
  if (state.phase == State::Phase::kArmed) {
    const bool may_leave_out = state.options.find_unused_parameters || state.options.static_graph;
    if (state.has_begun && !may_leave_out) state.throw_left_out();
    state.phase = State::Phase::kBroken;  // unless all goes well
    state.open();
    state.mark_rest();
    state.finalize();
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
