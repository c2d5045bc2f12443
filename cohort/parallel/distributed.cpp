// The Reducer averages gradients; buffers travel as its companion, begun before the first bucket and ended
// after the last. A forward makes no collective, so a rank may make it alone; within join() it asks who
// continues. A rank that has ended makes the same collectives as the rest, without gradients, until all have
// ended. Then the rank with most steps gives its parameters and buffers to all.
#include "cohort/parallel/distributed.h"

#include <algorithm>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/comm/text_collectives.h"
#include "cohort/parallel/broadcast.h"

namespace cohort::parallel {
namespace {

// Before the module's parameters are looked at: what differs is named as the user knows it.
std::shared_ptr<torch::nn::Module> made_alike(std::shared_ptr<torch::nn::Module> module,
                                              const comm::Group& group, const DistributedOptions& options) {
  if (!group) throw UsageError("parallel.DistributedDataParallel", "this process is not in the group");
  if (options.init_sync && group.size() > 1)
    broadcast_module(group, *module, {.ignored = options.ignored, .timeout = options.timeout});
  return module;
}

}  // namespace

Distributed::Distributed(std::shared_ptr<torch::nn::Module> module, comm::Group group,
                         DistributedOptions options)
    : module_(made_alike(std::move(module), group, options)),
      options_(options),
      reducer_(std::move(group), parameters_to_reduce(*module_, options.ignored), options),
      buffers_(reducer_.group(), *module_, {.ignored = options.ignored, .timeout = options.timeout}) {
  if (sends_buffers() && !options_.init_sync) {
    broadcast_buffers(reducer_.group(), *module_, {.ignored = options.ignored, .timeout = options.timeout});
  }
  reducer_.set_companion({.begin =
                              [this] {
                                if (std::exchange(has_stepped_, true)) reducer_.group().step_done();
                                if (sends_buffers()) buffers_.begin();
                              },
                          .end =
                              [this] {
                                if (sends_buffers()) buffers_.end();
                              }});
}

void Distributed::before_forward() {
  // The forwards that after_forward() prepares a reduction for.
  const bool reduces = at::GradMode::is_enabled() && !reducer_.is_silent();
  if (reducer_.group().size() == 1 || !reduces || !joining_) return;
  const std::vector<std::int64_t> continuing = who_continues(true);
  buffers_.set_root(static_cast<int>(std::ranges::find(continuing, 1) - continuing.begin()));
  ++joined_steps_;
  const auto ended = std::ranges::find(continuing, 0);
  if (joining_->throw_on_early_termination && ended != continuing.end()) {
    throw UsageError("parallel.join", base::concat("rank ", ended - continuing.begin(), " of ",
                                                   continuing.size(), " has no more samples"));
  }
}

void Distributed::after_forward(std::span<const at::Tensor> outputs) {
  if (!at::GradMode::is_enabled() || reducer_.is_silent()) return;
  // While ranks may have ended each says what it brings; otherwise only where they weigh differently.
  if (weight_ || joining_) {
    prepare(StepInfo{.weight = weight_.value_or(1)}, outputs);
  } else {
    prepare(std::nullopt, outputs);
  }
}

void Distributed::prepare(const std::optional<StepInfo>& info, std::span<const at::Tensor> outputs) {
  if (sends_buffers()) buffers_.stage();
  info ? reducer_.prepare(*info, outputs) : reducer_.prepare(outputs);
}

void Distributed::synchronize_buffers() {
  broadcast_buffers(reducer_.group(), *module_, {.ignored = options_.ignored, .timeout = options_.timeout});
}

void Distributed::step_without_samples() {
  if (reducer_.is_silent()) return;  // a part without samples adds nothing
  prepare(StepInfo{.weight = 0}, {});
  reducer_.finish();
}

// 1 for each rank that has samples, 0 for those that have ended.
std::vector<std::int64_t> Distributed::who_continues(bool has_samples) const {
  return comm::all_gather_number(reducer_.group(), has_samples ? 1 : 0, {options_.timeout});
}

void Distributed::join(const std::function<void()>& loop, const JoinOptions& options) {
  // Also where something throws: which ranks' buffers count then is not what they agree on.
  struct End {
    Distributed& of;
    ~End() {
      of.joining_.reset();
      of.buffers_.set_root(0);
    }
  } const end{*this};
  joining_ = options;
  joined_steps_ = 0;
  loop();
  if (reducer_.group().size() > 1) shadow();
}

// What the other ranks do in a step, without samples; then the state of who had samples for longest.
void Distributed::shadow() {
  const comm::Group& group = reducer_.group();
  for (;;) {
    const std::vector<std::int64_t> continuing = who_continues(false);
    const auto first = std::ranges::find(continuing, 1);
    if (first == continuing.end()) break;
    if (joining_->throw_on_early_termination) {
      throw UsageError("parallel.join", base::concat("rank ", group.rank(), " of ", group.size(),
                                                     " has no more samples, and others have"));
    }
    buffers_.set_root(static_cast<int>(first - continuing.begin()));
    const bool counts = joining_->divide_by_initial_world_size && !weight_;
    // Without gradients: what is left of the last step is not to be averaged again.
    for (at::Tensor& parameter : module_->parameters()) parameter.mutable_grad() = at::Tensor();
    prepare(StepInfo{.weight = counts ? 1.0 : 0.0}, {});
    reducer_.finish();
  }
  const std::vector<std::int64_t> steps = comm::all_gather_number(group, joined_steps_, {options_.timeout});
  const auto root = static_cast<int>(std::ranges::max_element(steps) - steps.begin());
  broadcast_module(group, *module_, {.ignored = options_.ignored, .root = root, .timeout = options_.timeout});
}

}  // namespace cohort::parallel
