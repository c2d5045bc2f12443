// An allocation profiler counts live bytes of all threads, and of each placement's thread, between the phases
// of a step. The differences are what model, batch, gradients, activations and the optimizer's state hold. Of
// a pipeline the activations are read after each forward, less the gradients that are there, and the most
// counts. In a placement's peak its model and optimizer are the plan's, since another thread made them; see
// Note [What is measured].
#include "cohort/planner/internal/memory_measure.h"

#include <algorithm>
#include <memory>
#include <thread>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/memory/allocation_profiler.h"
#include "cohort/parallel/placement_worker.h"
#include "cohort/planner/internal/plain_memory.h"

namespace cohort::planner {
namespace {

constexpr const char* kWhereMeasure = "planner.plan_memory";

// The placements whose threads are looked at, by place.
std::vector<base::Placement> placements_of(const parallel::RunnerMemory& planned) {
  std::vector<base::Placement> placements;
  for (const parallel::PlannedPlace& place : planned.places) {
    if (place.placement) placements.push_back(*place.placement);
  }
  return placements;
}

// Throws: UsageError for a placement without what is added to its peak.
void check_adds_to_peak(const MemoryPlan& plan, const parallel::RunnerMemory& planned) {
  if (!planned.measured->adds_model_to_peak) return;
  for (const parallel::PlannedPlace& place : planned.places) {
    if (!place.placement || (place.use.model && place.use.optimizer)) continue;
    throw UsageError(kWhereMeasure,
                     base::concat(plan.runner,
                                  " adds the model to measured peaks, and does not say what of model and "
                                  "optimizer is on ",
                                  place.name),
                     "MemoryUse::model and optimizer of each place, or adds_model_to_peak = false");
  }
}

// Note [What is measured]
// Two steps as ClassificationTask makes them: the first has the optimizer make its state, the second is the
// one that is counted. Activations and gradients are of the thread that asked for them.
class Measurement {
 public:
  Measurement(MemoryPlan& plan, const MeasureInputs& inputs)
      : plan_(plan),
        inputs_(inputs),
        measured_(*inputs.planned.measured),
        sync_(inputs.virtual_ranks),
        placement_threads_(placements_of(inputs.planned)) {}

  void run() {
    const train::BatchPlan& sizes = inputs_.sizes;
    const PlannedModel model(inputs_.step, inputs_.place);
    MemoryUse& all = plan_.places.back().measured;
    all.model = profiler_.total().now;
    activations_ = counts();  // a runner may run a forward while it is made
    const parallel::ModelRunner call = call_of(model);
    const at::Tensor input = inputs_.step.input(sizes.loaded), target = inputs_.step.target(sizes.loaded);
    all.batch = profiler_.total().now - *all.model;
    activations_ = counts();
    if (sync_) {
      sync_->begin({.modules = {{"", model.any.ptr()}}, .optimizers = {{"", model.optimizer, nullptr}}});
    }
    step(model, call, input, target);
    all.optimizer = optimizer_bytes_;
    model.optimizer->zero_grad();
    if (sync_) all.virtual_ranks = profiler_.total().now - *all.model - *all.batch - *all.optimizer;
    profiler_.begin();
    before_ = counts();
    activations_ = before_;
    step(model, call, input, target);
    all.peak = profiler_.total().peak;
    all.gradients = gradients_[0] - before_[0];
    all.activations = measured_.calls_after_forward ? 0 : activations_[0] - before_[0];
    std::size_t thread = 0;
    for (std::size_t i = 0; i < inputs_.planned.places.size(); ++i) {
      if (!inputs_.planned.places[i].placement) continue;
      note(plan_.places[i], thread);
      if (measured_.calls_after_forward) *all.activations += activations_of(thread);
      ++thread;
    }
  }

 private:
  // Of all, then of each thread.
  std::vector<std::int64_t> counts() const {
    std::vector<std::int64_t> counts{profiler_.total().now};
    for (const auto thread : threads_) counts.push_back(profiler_.made_by(thread).now);
    return counts;
  }
  std::int64_t activations_of(std::size_t i) const { return activations_[i + 1] - before_[i + 1]; }

  void note(PlaceMemory& place, std::size_t i) const {
    MemoryUse& use = place.measured;
    use.activations = activations_of(i);
    if (measured_.has_gradients) use.gradients = gradients_[i + 1] - before_[i + 1];
    const std::int64_t peak = profiler_.made_by(threads_[i]).peak;
    if (measured_.has_peak) use.peak = peak;
    // This thread made neither its part of the model nor the optimizer's state, which are exact.
    if (measured_.adds_model_to_peak) {
      use.peak = peak - before_[i + 1] + *place.predicted.model + *place.predicted.optimizer;
    }
  }

  parallel::ModelRunner call_of(const PlannedModel& model) {
    if (!measured_.make) return parallel::make_model_runner(model.any, inputs_.step.runner_options());
    return measured_.make(model.any, [this](std::size_t place, std::int64_t gradient_bytes) {
      if (place >= threads_.size()) {
        throw UsageError(kWhereMeasure, base::concat(plan_.runner, " told of a forward on placement ", place,
                                                     ", and planned ", threads_.size()));
      }
      const std::int64_t held = profiler_.made_by(threads_[place]).now - gradient_bytes;
      activations_[place + 1] = std::max(activations_[place + 1], held);
    });
  }

  void step(const PlannedModel& model, const parallel::ModelRunner& call, const at::Tensor& input,
            const at::Tensor& target) {
    const auto samples = static_cast<double>(inputs_.sizes.step);
    const std::int64_t shares = sync_ ? sync_->num_virtual_ranks() : 1;
    model.optimizer->zero_grad();
    if (sync_) sync_->begin_step();
    for (std::int64_t share = 0; share < shares; ++share) {
      if (sync_) sync_->begin_share(share, inputs_.sizes.step);
      compute_share(call, input, target, share == 0);
    }
    gradients_ = counts();
    if (sync_) {
      sync_->end_shares();
      sync_->average(*model.optimizer, samples, true);
    }
    optimizer_bytes_ -= profiler_.total().now;
    model.optimizer->step();
    optimizer_bytes_ += profiler_.total().now;
  }

  void compute_share(const parallel::ModelRunner& call, const at::Tensor& input, const at::Tensor& target,
                     bool is_first) {
    const train::BatchPlan& sizes = inputs_.sizes;
    for (std::int64_t begin = 0; begin < sizes.step; begin += sizes.part) {
      const std::int64_t count = std::min(sizes.part, sizes.step - begin);
      const std::int64_t from = begin % sizes.loaded;  // each part is a batch of its own, or lies in the one
      inputs_.step.run(call, input.narrow(0, from, count), target.narrow(0, from, count), [&] {
        if (is_first && begin == 0) activations_ = counts();
      });
    }
  }

  MemoryPlan& plan_;
  const MeasureInputs& inputs_;
  const parallel::MeasuredRun& measured_;
  const std::shared_ptr<parallel::VirtualRankSync> sync_;  // null: there are no virtual ranks
  const parallel::PlacementThreads placement_threads_;
  const std::vector<std::thread::id>& threads_ = placement_threads_.ids();
  std::vector<std::int64_t> before_, activations_, gradients_;
  std::int64_t optimizer_bytes_ = 0;
  memory::AllocationProfiler profiler_;
};

}  // namespace

void measure(MemoryPlan& plan, const MeasureInputs& inputs) {
  check_adds_to_peak(plan, inputs.planned);
  Measurement(plan, inputs).run();
}

}  // namespace cohort::planner
