// Parameters, buffers, gradients and the optimizer's state are counted exactly, of the whole model or of a
// part of it. Activations and peak come from the lines that two small steps gave.
#include "cohort/planner/internal/plain_memory.h"

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/parallel/device_mapped.h"
#include "cohort/parallel/virtual_ranks/virtual_rank_memory.h"

namespace cohort::planner {
namespace {

using IsWanted = std::function<bool(const std::string& name)>;

// Bytes of a model, or of a part of it.
struct ModelBytes {
  std::int64_t parameters = 0, buffers = 0, gradients = 0, optimizer = 0;
};

ModelBytes model_bytes(const PlannedModel& model, const IsWanted& is_wanted) {
  std::unordered_map<const void*, std::int64_t> states;
  for (const optim::ParamGroup& group : model.optimizer->param_groups()) {
    for (const at::Tensor& parameter : group.params) {
      // By identity of the tensor: groups have no names of parameters, the module has no groups.
      states[parameter.unsafeGetTensorImpl()] = model.optimizer->state_bytes(group, parameter);
    }
  }
  ModelBytes bytes;
  for (const auto& item : model.any.ptr()->named_parameters()) {
    if (!is_wanted(item.key())) continue;
    const auto size = static_cast<std::int64_t>(item.value().nbytes());
    bytes.parameters += size;
    if (!item.value().requires_grad()) continue;
    bytes.gradients += size;
    bytes.optimizer += states[item.value().unsafeGetTensorImpl()];
  }
  for (const auto& item : model.any.ptr()->named_buffers()) {
    if (is_wanted(item.key())) bytes.buffers += static_cast<std::int64_t>(item.value().nbytes());
  }
  return bytes;
}

MemoryUse part_of(const PlanInputs& in, const IsWanted& is_wanted) {
  const ModelBytes own = model_bytes(in.model, is_wanted);
  MemoryUse use{.model = own.parameters + own.buffers, .optimizer = own.optimizer};
  use.gradients = own.gradients;
  use.activations = 0;
  for (const auto& [name, line] : in.memory.layers) {
    if (is_wanted(name)) *use.activations += line.at(in.sizes.part);
  }
  return use;
}

// The most of any process.
std::int64_t virtual_rank_bytes(const PlannedModel& model, const PlannedVirtualRanks& planned) {
  std::vector<at::Tensor> parameters;
  for (const optim::ParamGroup& group : model.optimizer->param_groups()) {
    parameters.insert(parameters.end(), group.params.begin(), group.params.end());
  }
  const std::vector<parallel::NamedModule> modules{{"", model.any.ptr()}};
  std::int64_t most = 0;
  const auto add = [&](int num_processes) {
    for (int process = 0; process < num_processes; ++process) {
      most = std::max(
          most,
          parallel::plan_virtual_ranks(parameters, modules, planned.options, process, num_processes).total());
    }
  };
  if (!planned.is_elastic) {
    add(planned.num_processes);
    return most;
  }
  // With more processes a process has fewer sums, so few numbers of them decide.
  constexpr std::int64_t kMaxProcesses = 16;
  const std::int64_t v = planned.options.num_virtual_ranks;
  for (std::int64_t count = 1; count <= std::min(v, kMaxProcesses); ++count) add(static_cast<int>(count));
  return most;
}

}  // namespace

PlannedModel::PlannedModel(const train::ExampleStep& step,
                           const std::map<std::string, base::Placement>& place)
    : any(step.make_model()) {
  if (!place.empty()) parallel::apply_device_map(*any.ptr(), place);
  optimizer = step.make_optimizer(*any.ptr());
}

parallel::PlainMemory plain_memory(const MemoryPlan& plan, const std::shared_ptr<const PlanInputs>& inputs) {
  const PlanInputs& in = *inputs;
  const ModelBytes bytes = model_bytes(in.model, [](const std::string&) { return true; });
  const bool has_virtual_ranks = in.virtual_ranks.has_value();
  const bool ranks = in.gradient_sync.needs_group && !has_virtual_ranks;
  parallel::PlainMemory plain{
      .parameters = bytes.parameters,
      .buffers = bytes.buffers,
      .samples = in.sizes.part,
      .activations = [inputs](std::int64_t samples) { return inputs->memory.activations(samples); },
      .peak = [inputs](std::int64_t samples) { return inputs->memory.peak(samples); },
      .adds_gradients = in.sizes.part < in.sizes.step,
      .part = [inputs](const IsWanted& is_wanted) { return part_of(*inputs, is_wanted); },
      .model = in.model.any,
      .step =
          [inputs](const parallel::ModelRunner& runner, std::int64_t samples) {
            const train::ExampleStep& step = inputs->step;
            step.run(runner, step.input(samples), step.target(samples));
          },
      .batch_bytes = [inputs](std::int64_t samples) { return inputs->step.batch_bytes(samples); }};
  if (has_virtual_ranks && in.virtual_ranks->is_elastic) {
    plain.place = "each process";
  } else if (plan.num_ranks > 1) {
    plain.place = base::concat("each of ", plan.num_ranks, " ranks");
  }
  MemoryUse& use = plain.use;
  use.model = bytes.parameters + bytes.buffers;
  use.optimizer = bytes.optimizer;
  use.batch = in.step.batch_bytes(in.sizes.loaded);
  // A part of a step at a time: what the forward of one part keeps is gone before the next begins.
  use.activations = in.memory.activations(in.sizes.part);
  use.gradients = bytes.gradients;
  use.peak = *use.model + *use.optimizer + *use.batch + in.memory.peak(in.sizes.part);
  // While later parts are computed the gradients of the first are there.
  if (plain.adds_gradients) *use.peak += bytes.gradients;
  // The buckets of ddp are the gradients, and stay; the chunks of average are copies.
  if (ranks && in.gradient_sync.copies_gradients) use.averages = bytes.gradients;
  if (ranks) *use.peak += bytes.gradients;
  // They stay from step to step, beside the gradients that backward makes.
  if (has_virtual_ranks) {
    use.virtual_ranks = virtual_rank_bytes(in.model, *in.virtual_ranks);
    *use.peak += *use.virtual_ranks;
  }
  return plain;
}

}  // namespace cohort::planner
