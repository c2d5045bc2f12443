// A call cuts the batch, makes a run of the plan, and hands each placement's thread its list of actions.
// Channels join the placements: queues within the process, sends and receives between ranks. The first
// failure ends the run; queues close, so that whoever waits there gives up. A thread that still does not come
// back is kept as late, and the next call waits for it. forward() keeps the batch with its graphs, and its
// backward is a second run, of the backward part of the plan.
#include "cohort/pipeline/pipeline.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/count_nonzero.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <map>
#include <optional>
#include <unordered_set>

#include "cohort/base/placement.h"
#include "cohort/parallel/placement_worker.h"
#include "cohort/pipeline/internal/batch.h"
#include "cohort/pipeline/internal/check.h"
#include "cohort/pipeline/internal/group_channel.h"
#include "cohort/pipeline/internal/pipeline_function.h"
#include "cohort/pipeline/internal/placement_run.h"
#include "cohort/pipeline/internal/run.h"

namespace cohort::pipeline {
namespace {

using base::concat;
using parallel::PlacementWorker;
constexpr std::chrono::microseconds kSpin{50};
// What other stages get to notice that one has failed, once the deadline of the run has passed.
constexpr std::chrono::milliseconds kGrace{200};

bool share_cores(const std::vector<base::Placement>& placements) {
  for (std::size_t i = 0; i < placements.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (!placements[i].is_cpu() || !placements[j].is_cpu()) continue;
      if (placements[i].cpus.intersects(placements[j].cpus)) return true;
    }
  }
  return false;
}

bool has_backward(const Plan& plan) {
  return std::ranges::any_of(plan.actions, [](const std::vector<Action>& actions) {
    return std::ranges::any_of(actions, [](const Action& action) {
      return action.computes() && action.kind != ActionKind::kForward;
    });
  });
}

}  // namespace

struct Pipeline::Impl : std::enable_shared_from_this<Pipeline::Impl> {
  PipelineOptions options;
  std::shared_ptr<Setup> setup = std::make_shared<Setup>();
  std::vector<std::shared_ptr<PlacementWorker>> workers;
  std::chrono::microseconds spin{0};
  std::map<int, Plan> plans;
  RunTimes times;
  Tensors outputs;

  int num_placements() const { return static_cast<int>(setup->placements.size()); }
  /// Whether this process runs it.
  bool is_here(int placement) const { return !options.group || options.group.rank() == placement; }

  bool trains() const {
    for (const Stage& stage : setup->stages) {
      for (const Stage::Layer& layer : stage.layers()) {
        // A function may draw, and nothing says whether it does.
        if (!layer.module || layer.module->is_training()) return true;
      }
    }
    return false;
  }

  const Plan& plan_of_step(int num_micro_batches) {
    // Kept, as the smaller last batch of an epoch comes again in each epoch.
    const auto found = plans.find(num_micro_batches);
    if (found != plans.end()) return found->second;
    PlanOptions of{options.schedule, static_cast<int>(setup->stages.size()), num_placements(),
                   num_micro_batches};
    return plans.emplace(num_micro_batches, make_plan(of)).first->second;
  }
  Plan plan_of_module(int num_micro_batches) const {
    return make_plan(
        {Schedule::kFillDrain, static_cast<int>(setup->stages.size()), num_placements(), num_micro_batches});
  }

  void make_channels(Run& run) const;
  void execute(const std::shared_ptr<Batch>& batch, const Plan& plan, const base::Deadline& deadline,
               bool with_gradients);
  at::Tensor sum_of_losses(const Tensors& losses, const base::Deadline& deadline) const;
  void leave_behind(const std::shared_ptr<Run>& run, std::vector<base::Future<void>>& pending);
  void wait_for_late(const base::Deadline& deadline);
  void check_late_gradients();
  base::Deadline begin(bool with_gradients);

  // A placement's part of a run that failed, and that has not come to its end.
  struct Late {
    std::shared_ptr<Run> run;
    base::Future<void> pending;
  };
  std::vector<Late> late;
  bool has_late_gradients = false;
};

// Note [After a timeout]
// A stage that let the deadline pass cannot be stopped. While it runs it may add to gradients, and write to
// buffers, so the next run waits until it has ended. A caller that clears gradients frees memory that the
// stage may be adding to, so it waits before it does so: wait_for_late_stages(). Where it did not, nobody
// knows what the stage has added to after that, parameters of the loss among them: the next run rejects,
// once.
void Pipeline::Impl::wait_for_late(const base::Deadline& deadline) {
  for (const Late& each : late) {
    if (!each.pending.wait(deadline)) {
      throw TimeoutError(
          "pipeline.step",
          concat("waited ", options.timeout.count(), " ms for an earlier step: ", each.run->who_computes()),
          "again when that has ended, or a new process if it never does");
    }
    has_late_gradients |= has_backward(each.run->plan);
  }
  late.clear();
}

void Pipeline::Impl::check_late_gradients() {
  if (!std::exchange(has_late_gradients, false)) return;
  throw UsageError("pipeline.step", "an earlier step may have added to gradients after it threw",
                   "zero_grad(), and then step() again; wait_for_late_stages() before it next time");
}

// The deadline of a run that begins now; what it waits for before counts.
base::Deadline Pipeline::Impl::begin(bool with_gradients) {
  const base::Deadline deadline(options.timeout);
  wait_for_late(deadline);
  if (with_gradients) check_late_gradients();
  return deadline;
}

void Pipeline::Impl::make_channels(Run& run) const {
  // As many as wait at once in the simulated plan: with fewer, a sender would wait.
  const int capacity = channel_capacity(run.plan);
  for (const auto& actions : run.plan.actions) {
    for (const Action& action : actions) {
      const bool gradient = action.kind == ActionKind::kReceiveGradient;
      if (!gradient && action.kind != ActionKind::kReceiveActivation) continue;
      const int to = setup->placement_of(action.stage),
                from = setup->placement_of(action.stage + (gradient ? 1 : -1));
      auto& channel = run.channels[{action.stage, gradient}];
      if (channel || (!is_here(to) && !is_here(from))) continue;
      if (options.group) {
        // A tag for each edge: two ranks may have several edges between them.
        const int tag = 2 * action.stage + (gradient ? 1 : 0);
        channel =
            std::make_unique<GroupChannel>(options.group, is_here(to) ? from : to, tag, capacity,
                                           setup->devices[static_cast<std::size_t>(options.group.rank())]);
      } else {
        channel = std::make_unique<ThreadChannel>(capacity, spin);
      }
    }
  }
  // Edges between other ranks have no end here.
  std::erase_if(run.channels, [](const auto& entry) { return entry.second == nullptr; });
}

void Pipeline::Impl::execute(const std::shared_ptr<Batch>& batch, const Plan& plan,
                             const base::Deadline& deadline, bool with_gradients) {
  const auto run = std::make_shared<Run>(setup, batch, plan, options.timeout, deadline);
  make_channels(*run);
  run->on_action = options.on_action;
  if (options.run_ahead >= 0) {
    run->serialized.emplace(serialized_order(plan, options.run_ahead, channel_capacity(plan)));
  }
  std::vector<base::Future<void>> pending;
  try {
    for (int placement = 0; placement < num_placements(); ++placement) {
      if (!is_here(placement)) continue;
      pending.push_back(
          workers[static_cast<std::size_t>(placement)]->submit("pipeline", [run, placement, with_gradients] {
            const at::AutoGradMode mode(with_gradients);
            run_placement(*run, placement);
          }));
      // One that is dropped before it begins ends the run: the others would wait for what it computes.
      // It does not keep the run, whose tensors go when the step ends.
      pending.back().on_ready([of = std::weak_ptr<Run>(run), result = pending.back()]() mutable {
        try {
          result.get(base::Deadline::never());
        } catch (...) {
          if (const auto failed = of.lock()) failed->fail(std::current_exception());
        }
      });
    }
    for (base::Future<void>& each : pending) {
      if (!each.wait(run->deadline)) {
        // Closes the channels, so that the others end too.
        run->time_out();
        break;
      }
      each.get(run->deadline);
    }
  } catch (
      ...) {  // a placement's thread could not be made, or was given up for another pipeline's late stage
    run->fail(std::current_exception());
  }
  if (run->failed()) leave_behind(run, pending);
  times = run->take_times();
  if (run->failed()) std::rethrow_exception(run->error());
}

at::Tensor Pipeline::Impl::sum_of_losses(const Tensors& losses, const base::Deadline& deadline) const {
  at::Tensor sum = losses.front();
  for (std::size_t m = 1; m < losses.size() && sum.defined(); ++m) sum = sum + losses[m];
  if (!options.group) return sum;
  // The number and its type, from the rank that has it.
  at::Tensor message = at::zeros({2}, at::kDouble);
  if (sum.defined()) {
    // A double holds every loss in float or half exactly.
    message[0] = sum.item<double>();
    message[1] = static_cast<double>(sum.scalar_type());
  }
  const int last = setup->placement_of(static_cast<int>(setup->stages.size()) - 1);
  try {
    options.group.broadcast(message, last, until(deadline)).wait();
  } catch (const TimeoutError& error) {
    throw TimeoutError("pipeline.step",
                       concat("waited ", options.timeout.count(), " ms for a step: the loss of ",
                              setup->placements[static_cast<std::size_t>(last)],
                              " has not come to every rank: ", error.what()));
  }
  return message[0].to(static_cast<at::ScalarType>(message[1].item<double>()));
}

// Of a run that failed: leaves behind the threads that do not come back, and then throws.
void Pipeline::Impl::leave_behind(const std::shared_ptr<Run>& run, std::vector<base::Future<void>>& pending) {
  const base::Deadline grace(kGrace);
  bool is_late = false;
  for (base::Future<void>& each : pending) {
    if (!each.valid()) continue;
    try {
      each.get(grace);
    } catch (const std::exception&) {  // reported by the run, by stage
      if (each.ready()) continue;
      late.push_back({run, std::move(each)});
      is_late = true;
    }
  }
  if (is_late) std::rethrow_exception(run->error());
}

Pipeline::Pipeline(std::vector<Stage> stages, PipelineOptions options) : impl_(std::make_shared<Impl>()) {
  check_options(stages, options);
  check_distinct(options);
  Impl& impl = *impl_;
  const std::vector<base::Placement>& placements = options.placements;
  for (std::size_t i = 0; i < placements.size(); ++i) {
    const bool is_mine = !options.group || options.group.rank() == static_cast<int>(i);
    impl.workers.push_back(is_mine ? PlacementWorker::of(placements[i]) : nullptr);
    impl.setup->placements.push_back(options.group ? concat("rank ", i, ", ", placements[i].name)
                                                   : placements[i].name);
    impl.setup->devices.push_back(is_mine ? impl.workers.back()->device() : c10::Device(c10::kCPU));
  }
  // On a shared core, who spins keeps the other stage from running.
  impl.spin = share_cores(placements) ? std::chrono::microseconds(0) : kSpin;
  impl.setup->stages = std::move(stages);
  std::uint64_t layer = 0;
  for (const Stage& stage : impl.setup->stages) {
    impl.setup->first_layers.push_back(layer);
    layer += stage.layers().size();
  }
  impl.setup->skips = options.skips;
  impl.options = std::move(options);
  impl.plan_of_step(1);  // finds numbers of stages and placements that do not go together
  for (std::size_t stage = 0; stage < impl.setup->stages.size(); ++stage) {
    const int placement = impl.setup->placement_of(static_cast<int>(stage));
    if (impl.is_here(placement)) {
      impl.setup->stages[stage].to(impl.setup->devices[static_cast<std::size_t>(placement)]);
    }
  }
  check_tied(*impl.setup);
}

double RunTimes::bubble() const {
  double busy = 0, begin = time;
  for (const auto& list : actions) {
    for (const TimedAction& timed : list) {
      busy += timed.end - timed.begin;
      begin = std::min(begin, timed.begin);
    }
  }
  return time > begin ? 1 - busy / ((time - begin) * static_cast<double>(actions.size())) : 0;
}

Pipeline::~Pipeline() = default;
Pipeline::Pipeline(Pipeline&&) noexcept = default;

at::Tensor Pipeline::step(const Tensors& inputs, const Tensors& targets, const Loss& loss, double scale) {
  if (c10::InferenceMode::is_enabled())
    throw UsageError("pipeline.step", "called in inference mode, which has no gradients");
  Impl& impl = *impl_;
  const base::Deadline deadline = impl.begin(/*with_gradients=*/true);
  const auto sizes = split_sizes(inputs, targets, impl.options);
  const auto batch = make_batch(*impl.setup, inputs, sizes);
  batch->loss = loss;
  batch->keep_outputs = impl.options.keep_outputs;
  batch->random = core::RandomKey::draw();
  batch->targets = split(targets, sizes, &batch->counts);
  // A micro-batch counts by its samples, since the last ones may be smaller.
  const double all = static_cast<double>(num_samples(sizes));
  for (const std::int64_t size : sizes) batch->weights.push_back(scale * static_cast<double>(size) / all);
  const Plan& plan = impl.plan_of_step(static_cast<int>(sizes.size()));
  batch->split = plan.splits_backward;
  impl.execute(batch, plan, deadline, true);
  publish_versions(*batch);
  impl.outputs =
      impl.options.keep_outputs && !batch->outputs.front().empty() ? join(batch->outputs) : Tensors();
  // After all else of the batch: it runs the caller's own graph, whose hooks may do anything.
  hand_back(inputs, join_gradients(batch->input_gradients, inputs, sizes));
  return impl.sum_of_losses(batch->losses, deadline);
}

Tensors Pipeline::forward(const Tensors& inputs) {
  Impl& impl = *impl_;
  if (impl.options.group) throw UsageError("pipeline.forward", "called on a pipeline over ranks", "step()");
  const bool with_gradients = at::GradMode::is_enabled();
  const base::Deadline deadline = impl.begin(with_gradients);
  const auto sizes = split_sizes(inputs, {}, impl.options);
  const auto batch = make_batch(*impl.setup, inputs, sizes);
  const Plan plan = impl.plan_of_module(static_cast<int>(sizes.size()));
  if (impl.trains()) batch->random = core::RandomKey::draw();
  impl.execute(batch, forward_part(plan), deadline, with_gradients);
  publish_versions(*batch);
  if (!with_gradients) return join(batch->outputs);
  return attach(inputs, batch, sizes, [self = impl_, plan](const std::shared_ptr<Batch>& of) {
    const base::Deadline own = self->begin(/*with_gradients=*/true);
    self->execute(of, backward_part(plan), own, false);
  });
}

at::Tensor Pipeline::forward(const at::Tensor& input) {
  const Tensors outputs = forward(Tensors{input});
  if (outputs.size() != 1) {
    throw UsageError("pipeline.forward",
                     concat("the last stage returned ", outputs.size(), " tensors, expected one"),
                     "forward(Tensors{input})");
  }
  return outputs.front();
}

void Pipeline::wait_for_late_stages() {
  impl_->wait_for_late(base::Deadline(impl_->options.timeout));
  impl_->has_late_gradients = false;  // what they have added the caller finds now
}

Tensors Pipeline::parameters() const {
  Tensors all;
  std::unordered_set<const at::TensorImpl*> seen;
  for (const Stage& stage : impl_->setup->stages) {
    for (const at::Tensor& parameter : stage.parameters()) {
      if (seen.insert(parameter.unsafeGetTensorImpl()).second) all.push_back(parameter);
    }
  }
  return all;
}

void Pipeline::train(bool on) {
  for (const Stage& stage : impl_->setup->stages) {
    for (const Stage::Layer& layer : stage.layers()) {
      if (layer.module) layer.module->train(on);
    }
  }
}

const Plan& Pipeline::plan(int num_micro_batches) const {
  return impl_->plan_of_step(num_micro_batches);
}
int Pipeline::num_micro_batches(std::int64_t num_samples) const {
  return static_cast<int>(split_sizes(num_samples, impl_->options).size());
}
const std::vector<Stage>& Pipeline::stages() const {
  return impl_->setup->stages;
}
const PipelineOptions& Pipeline::options() const {
  return impl_->options;
}
const RunTimes& Pipeline::last_run() const {
  return impl_->times;
}
const Tensors& Pipeline::outputs() const {
  return impl_->outputs;
}

}  // namespace cohort::pipeline
