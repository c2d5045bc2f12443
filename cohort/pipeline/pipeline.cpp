#include "cohort/pipeline/pipeline.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <map>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "cohort/core/placement.h"
#include "cohort/parallel/placement_worker.h"
#include "cohort/pipeline/batch.h"
#include "cohort/pipeline/module_node.h"
#include "cohort/pipeline/run.h"

namespace cohort::pipeline {
namespace {

using core::concat;
using parallel::PlacementWorker;
constexpr const char* kWhere = "pipeline.Pipeline";
constexpr std::chrono::microseconds kSpin{50};
// What other stages get to notice that one has failed, once the deadline of the run has passed.
constexpr std::chrono::milliseconds kGrace{200};

core::Placement parse_placement(const std::vector<std::string>& placements, std::size_t index,
                                std::size_t num_stages) {
  try {
    return core::Placement::parse(placements[index]);
  } catch (const ConfigError& error) {
    std::string stages;
    for (std::size_t stage = index; stage < num_stages; stage += placements.size()) {
      stages += concat(stages.empty() ? "" : ", ", stage);
    }
    throw ConfigError(kWhere,
                      concat("placement \"", placements[index], "\" of stage ", stages, ": ", error.what()));
  }
}

void check_options(const std::vector<Stage>& stages, const PipelineOptions& options) {
  if (stages.empty()) throw UsageError(kWhere, "got no stages, expected at least one");
  if (options.placements.empty()) {
    throw UsageError(kWhere, "got no placements, expected one for each stage",
                     "{.placements = {\"cpu:0\", \"cpu:1\"}}");
  }
  if ((options.num_micro_batches > 0) == (options.split_size > 0)) {
    throw UsageError(kWhere,
                     concat("got num_micro_batches = ", options.num_micro_batches,
                            " and split_size = ", options.split_size, ", expected one of them above 0"));
  }
  for (const Skip& skip : options.skips) {
    const int num_stages = static_cast<int>(stages.size());
    if (skip.from < 0 || skip.output < 0 || skip.to >= num_stages || skip.to < skip.from + 2) {
      throw UsageError(kWhere,
                       concat("got a skip of output ", skip.output, " from stage ", skip.from, " to stage ",
                              skip.to, ", expected one that passes a stage, of ", num_stages));
    }
  }
  if (options.schedule != Schedule::kZeroBubble) return;
  for (std::size_t i = 0; i < stages.size(); ++i) {
    const Stage& stage = stages[i];
    if (!stage.is_list()) {
      throw UsageError(kWhere,
                       concat("stage ", i, " (", stage.name(),
                              ") is no list of layers, so zb_h1 cannot take its "
                              "input and weight gradients apart"),
                       "a torch::nn::Sequential as the stage, or schedule 1f1b");
    }
    if (stage.recomputes()) {
      throw UsageError(
          kWhere, concat("stage ", i, " (", stage.name(), ") is recomputed, so zb_h1 would run it twice"),
          "schedule 1f1b with recomputation");
    }
  }
}

bool share_cores(const std::vector<core::Placement>& placements) {
  std::unordered_set<int> seen;
  for (const core::Placement& placement : placements) {
    for (const int id : placement.cpus.ids()) {
      if (placement.is_cpu() && !seen.insert(id).second) return true;
    }
  }
  return false;
}

// A parameter of two stages must be one tensor for both.
void check_tied(const Setup& setup) {
  std::unordered_map<const at::TensorImpl*, int> owner;
  for (int stage = 0; stage < static_cast<int>(setup.stages.size()); ++stage) {
    for (const at::Tensor& parameter : setup.stages[static_cast<std::size_t>(stage)].parameters()) {
      const auto [found, fresh] = owner.emplace(parameter.unsafeGetTensorImpl(), stage);
      const auto device = [&](int of) {
        return setup.devices[static_cast<std::size_t>(setup.placement_of(of))];
      };
      if (fresh || device(found->second) == device(stage)) continue;
      throw UsageError(kWhere,
                       concat("stages ", found->second, " and ", stage, " share a parameter, but are on ",
                              device(found->second), " and ", device(stage)),
                       "placements of one device for stages with tied parameters");
    }
  }
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

  const Plan& plan_of_step(int num_micro_batches) {
    const auto found = plans.find(num_micro_batches);
    if (found != plans.end()) return found->second;
    PlanOptions of{options.schedule, static_cast<int>(setup->stages.size()), static_cast<int>(workers.size()),
                   num_micro_batches};
    return plans.emplace(num_micro_batches, make_plan(of)).first->second;
  }
  Plan plan_of_module(int num_micro_batches) const {
    return make_plan({Schedule::kFillDrain, static_cast<int>(setup->stages.size()),
                      static_cast<int>(workers.size()), num_micro_batches});
  }

  void execute(const std::shared_ptr<Batch>& batch, const Plan& plan, bool with_gradients);
  [[noreturn]] void give_up(Run& run, std::vector<core::Pending<void>>& pending);
};

void Pipeline::Impl::execute(const std::shared_ptr<Batch>& batch, const Plan& plan, bool with_gradients) {
  const auto run = std::make_shared<Run>(setup, batch, plan, core::Deadline(options.timeout));
  const int capacity = channel_capacity(plan);
  for (const auto& actions : plan.actions) {
    for (const Action& action : actions) {
      const bool gradient = action.kind == ActionKind::kReceiveGradient;
      if (!gradient && action.kind != ActionKind::kReceiveActivation) continue;
      auto& channel = run->channels[{action.stage, gradient}];
      if (!channel) channel = std::make_unique<ThreadChannel>(capacity, spin);
    }
  }
  std::vector<core::Pending<void>> pending;
  for (std::size_t placement = 0; placement < workers.size(); ++placement) {
    pending.push_back(workers[placement]->submit("pipeline", [run, placement, with_gradients] {
      const at::AutoGradMode mode(with_gradients);
      run->work(static_cast<int>(placement));
    }));
  }
  for (core::Pending<void>& each : pending) {
    if (!each.wait(run->deadline)) give_up(*run, pending);
    each.get(run->deadline);
  }
  times = run->take_times();
  if (run->failed()) std::rethrow_exception(run->error());
}

// Names who was in what, and leaves behind the threads that do not come back.
void Pipeline::Impl::give_up(Run& run, std::vector<core::Pending<void>>& pending) {
  run.fail(std::make_exception_ptr(TimeoutError(
      "pipeline.step", concat("waited ", options.timeout.count(), " ms for a step: ", run.who_computes()),
      "a longer timeout where that is slow and not stuck")));
  const core::Deadline grace(kGrace);
  for (core::Pending<void>& each : pending) {
    if (!each.valid()) continue;
    try {
      each.get(grace);
    } catch (const TimeoutError&) {  // said above, by stage
    }
  }
  std::rethrow_exception(run.error());
}

Pipeline::Pipeline(std::vector<Stage> stages, PipelineOptions options) : impl_(std::make_shared<Impl>()) {
  check_options(stages, options);
  Impl& impl = *impl_;
  std::vector<core::Placement> placements;
  for (std::size_t i = 0; i < options.placements.size(); ++i) {
    placements.push_back(parse_placement(options.placements, i, stages.size()));
    for (std::size_t before = 0; before < i; ++before) {
      if (!(placements[before] == placements[i])) continue;
      throw UsageError(
          kWhere, concat("placement ", placements[i].name, " stands twice, for one thread"),
          concat(placements[i].name, "/a and ", placements[i].name, "/b, which share the cores"));
    }
  }
  for (const core::Placement& placement : placements) {
    impl.workers.push_back(PlacementWorker::of(placement));
    impl.setup->placements.push_back(placement.name);
    impl.setup->devices.push_back(impl.workers.back()->device());
  }
  impl.spin = share_cores(placements) ? std::chrono::microseconds(0) : kSpin;
  impl.setup->stages = std::move(stages);
  impl.setup->skips = options.skips;
  impl.options = std::move(options);
  impl.plan_of_step(1);  // finds numbers of stages and placements that do not go together
  for (std::size_t stage = 0; stage < impl.setup->stages.size(); ++stage) {
    impl.setup->stages[stage].to(impl.setup->devices[stage % impl.workers.size()]);
  }
  check_tied(*impl.setup);
}

Pipeline::~Pipeline() = default;
Pipeline::Pipeline(Pipeline&&) noexcept = default;

at::Tensor Pipeline::step(const Tensors& inputs, const Tensors& targets, const Loss& loss, double scale) {
  if (c10::InferenceMode::is_enabled())
    throw UsageError("pipeline.step", "called in inference mode, which has no gradients");
  Impl& impl = *impl_;
  const auto sizes = split_sizes(inputs, targets, impl.options);
  const auto batch = make_batch(*impl.setup, inputs, sizes);
  batch->loss = loss;
  batch->keep_outputs = impl.options.keep_outputs;
  batch->split = impl.options.schedule == Schedule::kZeroBubble;
  batch->targets = split(targets, sizes);
  const double all = static_cast<double>(num_samples(sizes));
  for (const std::int64_t size : sizes) batch->weights.push_back(scale * static_cast<double>(size) / all);
  impl.execute(batch, impl.plan_of_step(static_cast<int>(sizes.size())), true);
  impl.outputs = impl.options.keep_outputs ? join(batch->outputs) : Tensors();
  hand_back(inputs, join_gradients(batch->input_gradients, inputs, sizes));
  at::Tensor sum = batch->losses.front();
  for (std::size_t m = 1; m < batch->losses.size(); ++m) sum = sum + batch->losses[m];
  return sum;
}

Tensors Pipeline::forward(const Tensors& inputs) {
  Impl& impl = *impl_;
  const auto sizes = split_sizes(inputs, {}, impl.options);
  const auto batch = make_batch(*impl.setup, inputs, sizes);
  const Plan plan = impl.plan_of_module(static_cast<int>(sizes.size()));
  const bool with_gradients = at::GradMode::is_enabled();
  impl.execute(batch, forward_part(plan), with_gradients);
  if (!with_gradients) return join(batch->outputs);
  return attach(inputs, batch, sizes, [self = impl_, plan](const std::shared_ptr<Batch>& of) {
    self->execute(of, backward_part(plan), false);
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
