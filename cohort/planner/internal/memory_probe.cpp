// The live bytes after every allocation of a step are recorded for two small batches. A line is drawn through
// each moment's two values, and the peak at any size is the highest line there. A line through the two peaks
// would not do: at another size another moment may have the peak. A first step does not count, because
// LibTorch makes some memory once. Where the two steps took other kernels, larger batches are used; see Note
// [Two probes of the same kernels].
#include "cohort/planner/internal/memory_probe.h"

#include <algorithm>
#include <cmath>
#include <thread>

#include "cohort/base/error.h"
#include "cohort/memory/allocation_profiler.h"
#include "cohort/models/observer.h"
#include "cohort/planner/internal/memory_model.h"

namespace cohort::planner {
namespace {

// One sample alone is none to batch norm.
constexpr std::int64_t kProbeSamples = 2;

// A part of a step.
struct ProbedAction {
  std::string name;
  std::int64_t held = 0;            // at its end
  std::vector<std::int64_t> curve;  // within it
};
using Probe = std::vector<ProbedAction>;

std::int64_t most_of(const std::vector<std::int64_t>& curve) {
  return curve.empty() ? 0 : *std::max_element(curve.begin(), curve.end());
}

std::int64_t most_at(const std::vector<MemoryLine>& lines, std::int64_t samples) {
  std::int64_t most = 0;
  for (const MemoryLine& line : lines) most = std::max(most, line.at(samples));
  return most;
}

// Whether every part of one allocates as often as that of the other: the same kernels, on more samples.
bool are_alike(const Probe& one, const Probe& other) {
  return std::equal(
      one.begin(), one.end(), other.begin(), other.end(),
      [](const ProbedAction& a, const ProbedAction& b) { return a.curve.size() == b.curve.size(); });
}

// Through what probes of two batches took.
class LinearFit {
 public:
  LinearFit(std::int64_t samples_of_few, std::int64_t samples_of_more)
      : few_(samples_of_few), more_(samples_of_more) {}

  MemoryLine through(std::int64_t few, std::int64_t more) const {
    const double per_sample = double(more - few) / double(more_ - few_);
    return {double(few) - double(few_) * per_sample, per_sample};
  }
  void add_curve(std::vector<MemoryLine>& lines, const ProbedAction& few, const ProbedAction& more) const {
    if (few.curve.empty() || more.curve.empty()) return;
    if (few.curve.size() != more.curve.size()) {
      lines.push_back(through(most_of(few.curve), most_of(more.curve)));
      return;
    }
    for (std::size_t i = 0; i < few.curve.size(); ++i) {
      lines.push_back(through(few.curve[i], more.curve[i]));
    }
  }

 private:
  std::int64_t few_, more_;
};

// Note [Two probes of the same kernels]
// Between two probes whose blocks are the same ones each block grows along its own line, so that whichever
// moment of the step has the peak at the size that is planned, its line is there. LibTorch takes other
// kernels for the smallest batches (oneDNN: a convolution's backward in bf16, 2 samples or 4); then the probe
// of more is the smaller one of the next two.
struct Probes {
  std::int64_t samples_of_few, samples_of_more;
  Probe few, more;

  LinearFit lines() const { return {samples_of_few, samples_of_more}; }
};

// `probe(samples)` of `samples_of(n)`, n in each forward.
template <typename ProbeOf, typename SamplesOf>
Probes probe_twice(const ProbeOf& probe, const SamplesOf& samples_of) {
  const std::int64_t few = samples_of(kProbeSamples), more = samples_of(2 * kProbeSamples),
                     most = samples_of(4 * kProbeSamples);
  Probes probes{few, more, probe(few), probe(more)};
  if (are_alike(probes.few, probes.more)) return probes;
  return {more, most, std::move(probes.more), probe(most)};
}

// Forward by layer, what comes after the last one, backward.
Probe run_probe(const torch::nn::Module& module, const std::function<at::Tensor(const at::Tensor&)>& loss_of,
                const at::Tensor& input) {
  Probe probe;
  memory::AllocationProfiler watch;
  const auto note = [&](const std::string& name) {
    probe.push_back({name, watch.total().now, watch.curve()});
    watch.begin();
  };
  at::Tensor loss;
  {
    const models::LayerObserver observer(
        module, [&](const std::string& name, const torch::nn::Module& /*layer*/, const at::Tensor& /*input*/,
                    const at::Tensor& /*output*/) { note(name); });
    loss = loss_of(input);
  }
  note("");
  loss.backward();
  note("backward");
  return probe;
}

// The whole forward as one part.
void join_layers(Probe& probe) {
  ProbedAction backward = std::move(probe.back());
  probe.pop_back();
  ProbedAction forward{.name = "", .held = probe.back().held, .curve = {}};
  for (const ProbedAction& part : probe) {
    forward.curve.insert(forward.curve.end(), part.curve.begin(), part.curve.end());
  }
  probe = {std::move(forward), std::move(backward)};
}

void drop_gradients(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) parameter.mutable_grad().reset();
}

void drop_gradients(const train::PipelineParts& parts) {
  for (const pipeline::Stage& stage : parts.stages) drop_gradients(stage.parameters());
}

// One step, by action: what `thread` holds, that of the placement that is ahead. Behind it the most that the
// calling thread holds.
Probe run_probe(train::PipelineParts parts, const std::function<void(const parallel::ModelRunner&)>& step,
                std::thread::id thread) {
  Probe probe;
  memory::AllocationProfiler watch;
  const int placement = parts.options.run_ahead, count = int(parts.options.placements.size());
  const std::int64_t before = gradient_bytes(parts, placement);
  const auto caller = std::this_thread::get_id();
  std::int64_t most = 0;
  parts.options.on_action = [&, parts](const pipeline::Action& action) {
    ProbedAction part{.name = pipeline::to_string(action), .curve = watch.curve_of(thread)};
    most = std::max(most, watch.made_by(caller).peak);
    watch.begin();
    if (action.stage % count == placement && action.kind == pipeline::ActionKind::kForward) {
      part.held = watch.made_by(thread).now - (gradient_bytes(parts, placement) - before);
    }
    probe.push_back(std::move(part));
  };
  step(train::run_pipeline(std::move(parts), at::kCPU));
  probe.push_back({.name = "caller", .curve = {std::max(most, watch.made_by(caller).peak)}});
  return probe;
}

}  // namespace

std::int64_t MemoryLine::at(std::int64_t samples) const {
  return std::llround(fixed + per_sample * double(samples));
}

std::int64_t StepMemory::activations(std::int64_t samples) const {
  return most_at(held, samples);
}

std::int64_t StepMemory::peak(std::int64_t samples) const {
  return most_at(curve, samples);
}

StepMemory probe_step(const torch::nn::Module& module,
                      const std::function<at::Tensor(const at::Tensor&)>& loss_of,
                      const std::function<at::Tensor(std::int64_t)>& input_of) {
  const auto probe = [&](std::int64_t samples) {
    drop_gradients(module.parameters());
    return run_probe(module, loss_of, input_of(samples));
  };
  probe(kProbeSamples);  // what LibTorch makes once
  Probes probes = probe_twice(probe, [](std::int64_t samples) { return samples; });
  const LinearFit lines = probes.lines();
  Probe &few = probes.few, &more = probes.more;
  drop_gradients(module.parameters());
  if (few.size() != more.size()) {
    join_layers(few);
    join_layers(more);
  }

  StepMemory memory;
  const std::size_t num_layers = few.size() - 1;  // the last is backward
  for (std::size_t i = 0; i < few.size(); ++i) lines.add_curve(memory.curve, few[i], more[i]);
  for (std::size_t i = 0; i < num_layers; ++i) {
    const auto kept = [&](const Probe& of) { return of[i].held - (i > 0 ? of[i - 1].held : 0); };
    memory.layers.emplace_back(few[i].name, lines.through(kept(few), kept(more)));
  }
  memory.held.push_back(lines.through(few[num_layers - 1].held, more[num_layers - 1].held));
  return memory;
}

std::int64_t gradient_bytes(const train::PipelineParts& parts, int placement) {
  const auto count = parts.options.placements.size();
  std::int64_t bytes = 0;
  for (auto stage = static_cast<std::size_t>(placement); stage < parts.stages.size(); stage += count) {
    for (const at::Tensor& parameter : parts.stages[stage].parameters()) {
      const at::Tensor& gradient = parameter.grad();
      if (gradient.defined()) bytes += static_cast<std::int64_t>(gradient.nbytes());
    }
  }
  return bytes;
}

std::vector<StepMemory> probe_pipeline(
    const train::PipelineParts& given,
    const std::function<void(const parallel::ModelRunner&, std::int64_t)>& step, std::int64_t samples,
    bool again) {
  train::PipelineParts parts = given;
  pipeline::PipelineOptions& options = parts.options;
  const auto count = std::min<std::int64_t>(options.num_micro_batches, samples);
  options.num_micro_batches = static_cast<int>(count);
  for (std::size_t i = 0; i < options.placements.size(); ++i) {
    if (options.placements[i].is_cpu()) continue;
    options.placements[i] = base::Placement::parse(base::concat("cpu:0/placement", i));
  }
  const PlacementThreads placement_threads(options.placements);
  const std::vector<std::thread::id>& threads = placement_threads.ids();
  // With the same rest, each micro-batch grows with the batch along a straight line of its own.
  const auto samples_of = [&](std::int64_t each) { return each * count + samples % count; };
  const auto probe = [&](std::int64_t of) {
    if (!again) drop_gradients(parts);
    const auto thread = threads[static_cast<std::size_t>(options.run_ahead)];
    return run_probe(parts, [&](const parallel::ModelRunner& call) { step(call, of); }, thread);
  };
  std::vector<StepMemory> memories(threads.size() + 1);
  drop_gradients(parts);
  options.run_ahead = 0;
  probe(samples_of(kProbeSamples));  // what LibTorch makes once, and the gradients of a step before
  for (std::size_t placement = 0; placement < threads.size(); ++placement) {
    options.run_ahead = static_cast<int>(placement);
    const Probes probes = probe_twice(probe, samples_of);
    const LinearFit lines = probes.lines();
    for (std::size_t i = 0; i + 1 < probes.few.size(); ++i) {
      lines.add_curve(memories[placement].curve, probes.few[i], probes.more[i]);
      memories[placement].held.push_back(lines.through(probes.few[i].held, probes.more[i].held));
    }
    lines.add_curve(memories.back().curve, probes.few.back(), probes.more.back());
  }
  drop_gradients(parts);
  return memories;
}

}  // namespace cohort::planner
