// An allocation profiler counts live bytes of all threads, and of each placement's thread, between the phases
// of a step. The differences are what model, batch, gradients, activations and the optimizer's state hold. Of
// a pipeline the activations are read after each forward, less the gradients that are there, and the most
// counts. In a placement's peak its model and optimizer are the plan's, since another thread made them; see
// Note [What is measured].
#include <algorithm>
#include <thread>

#include "cohort/memory/allocation_profiler.h"
#include "cohort/models/layers.h"
#include "cohort/pipeline/memory_probe.h"
#include "cohort/planner/internal/memory_model.h"
#include "cohort/planner/internal/memory_probe.h"
#include "cohort/planner/internal/runner_plan.h"

namespace cohort::planner {
namespace {

// The same cut of another copy of the model.
pipeline::PipelineParts parts_like(const pipeline::PipelineParts& of, const PlannedModel& model) {
  const pipeline::Stage whole(models::layers_of(model.any.ptr()));
  pipeline::PipelineParts parts{.stages = {}, .options = of.options};
  std::size_t first = 0;
  for (const pipeline::Stage& stage : of.stages) {
    parts.stages.push_back(whole.part(first, first + stage.layers().size()));
    first += stage.layers().size();
  }
  return parts;
}

// Note [What is measured]
// Two steps as ClassificationTask makes them: the first has the optimizer make its state, the second is the
// one that is counted. Activations and gradients are of the thread that asked for them.
class Measurement {
 public:
  explicit Measurement(const MeasureInputs& inputs)
      : inputs_(inputs),
        measured_(inputs.runner.measured()),
        pipeline_(inputs.runner.pipeline()),
        placement_threads_(inputs.placements) {}

  void run(MemoryPlan& plan) {
    const train::BatchPlan& sizes = inputs_.sizes;
    const PlannedModel model(inputs_.step, inputs_.place);
    MemoryUse& all = plan.places.back().measured;
    all.model = watch_.total().now;
    const parallel::ModelRunner call = call_of(model);
    const at::Tensor input = model.input(sizes.loaded), target = model.target(sizes.loaded);
    all.batch = watch_.total().now - *all.model;
    activations_ = counts();
    step(model, call, input, target);
    all.optimizer = optimizer_bytes_;
    model.optimizer->zero_grad();
    watch_.begin();
    before_ = counts();
    activations_ = before_;
    step(model, call, input, target);
    all.peak = watch_.total().peak;
    all.gradients = gradients_[0] - before_[0];
    if (pipeline_ == nullptr) all.activations = activations_[0] - before_[0];
    for (std::size_t i = 0; i < threads_.size(); ++i) {
      const auto place = std::find_if(plan.places.begin(), plan.places.end(), [&](const PlaceMemory& each) {
        const std::string& name = inputs_.placements[i].name;
        return each.name == name || each.name.ends_with(" on " + name);
      });
      if (place != plan.places.end()) note(*place, i);
      if (pipeline_ != nullptr) all.activations = all.activations.value_or(0) + activations_of(i);
    }
  }

 private:
  // Of all, then of each thread.
  std::vector<std::int64_t> counts() const {
    std::vector<std::int64_t> counts{watch_.total().now};
    for (const auto thread : threads_) counts.push_back(watch_.made_by(thread).now);
    return counts;
  }
  std::int64_t activations_of(std::size_t i) const { return activations_[i + 1] - before_[i + 1]; }

  void note(PlaceMemory& place, std::size_t i) const {
    MemoryUse& use = place.measured;
    use.activations = activations_of(i);
    if (measured_.gradients) use.gradients = gradients_[i + 1] - before_[i + 1];
    const std::int64_t peak = watch_.made_by(threads_[i]).peak;
    if (measured_.peak) use.peak = peak;
    // This thread made neither its part of the model nor the optimizer's state, which are exact.
    if (measured_.adds_model_to_peak) {
      use.peak = peak - before_[i + 1] + *place.predicted.model + *place.predicted.optimizer;
    }
  }

  parallel::ModelRunner call_of(const PlannedModel& model) {
    if (pipeline_ == nullptr) {
      return train::make_model_runner(inputs_.distributed, model.any, at::kCPU, inputs_.step.layers);
    }
    pipeline::PipelineParts parts = parts_like(*pipeline_, model);
    parts.options.on_action = [this, parts](const pipeline::Action& action) {
      if (action.kind != pipeline::ActionKind::kForward) return;
      const auto placement = static_cast<std::size_t>(action.stage) % threads_.size();
      const std::int64_t held = watch_.made_by(threads_[placement]).now -
                                pipeline::gradient_bytes(parts, static_cast<int>(placement));
      activations_[placement + 1] = std::max(activations_[placement + 1], held);
    };
    return pipeline::run_pipeline(std::move(parts), at::kCPU);
  }

  void step(const PlannedModel& model, const parallel::ModelRunner& call, const at::Tensor& input,
            const at::Tensor& target) {
    const train::BatchPlan& sizes = inputs_.sizes;
    model.optimizer->zero_grad();
    for (std::int64_t begin = 0; begin < sizes.step; begin += sizes.part) {
      const std::int64_t count = std::min(sizes.part, sizes.step - begin);
      const std::int64_t from = begin % sizes.loaded;  // each part is a batch of its own, or lies in the one
      model.step(call, input.narrow(0, from, count), target.narrow(0, from, count), [&] {
        if (begin == 0) activations_ = counts();
      });
    }
    gradients_ = counts();
    optimizer_bytes_ -= watch_.total().now;
    model.optimizer->step();
    optimizer_bytes_ += watch_.total().now;
  }

  const MeasureInputs& inputs_;
  const RunnerPlan::Measured measured_;
  const pipeline::PipelineParts* pipeline_;
  const parallel::PlacementThreads placement_threads_;
  const std::vector<std::thread::id>& threads_ = placement_threads_.ids();
  std::vector<std::int64_t> before_, activations_, gradients_;
  std::int64_t optimizer_bytes_ = 0;
  memory::AllocationProfiler watch_;
};

}  // namespace

void measure(MemoryPlan& plan, const MeasureInputs& inputs) {
  Measurement(inputs).run(plan);
}

}  // namespace cohort::planner
