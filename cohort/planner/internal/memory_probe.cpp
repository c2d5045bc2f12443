// The live bytes after every allocation of a step are recorded for two small batches, and lines drawn through
// them (memory/step_memory.h). A first step does not count, because LibTorch makes some memory once.
#include "cohort/planner/internal/memory_probe.h"

#include "cohort/memory/allocation_profiler.h"
#include "cohort/models/observer.h"

namespace cohort::planner {
namespace {

using memory::Probe;
using memory::ProbedPart;

// Forward by layer, what comes after the last one, backward.
Probe run_probe(const torch::nn::Module& module, const std::function<at::Tensor(const at::Tensor&)>& loss_of,
                const at::Tensor& input) {
  Probe probe;
  memory::AllocationProfiler profiler;
  const auto note = [&](const std::string& name) {
    probe.push_back({name, profiler.total().now, profiler.curve()});
    profiler.begin();
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
  ProbedPart backward = std::move(probe.back());
  probe.pop_back();
  ProbedPart forward{.name = "", .held = probe.back().held, .curve = {}};
  for (const ProbedPart& part : probe) {
    forward.curve.insert(forward.curve.end(), part.curve.begin(), part.curve.end());
  }
  probe = {std::move(forward), std::move(backward)};
}

void drop_gradients(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) parameter.mutable_grad().reset();
}

}  // namespace

StepMemory probe_step(const torch::nn::Module& module,
                      const std::function<at::Tensor(const at::Tensor&)>& loss_of,
                      const std::function<at::Tensor(std::int64_t)>& input_of) {
  const auto probe = [&](std::int64_t samples) {
    drop_gradients(module.parameters());
    return run_probe(module, loss_of, input_of(samples));
  };
  probe(memory::kProbeSamples);  // what LibTorch makes once
  memory::ProbePair probes = memory::probe_twice(probe);
  const memory::LinearFit lines = probes.lines();
  Probe &few = probes.few, &more = probes.more;
  drop_gradients(module.parameters());
  // A model may call its layers more often for a larger batch. Then they have no pairs to draw lines through.
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

}  // namespace cohort::planner
