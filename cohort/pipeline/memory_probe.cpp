// Steps of the real pipeline are probed, one placement running ahead in each. Each micro-batch has a few
// samples, so what a thread holds grows along a line with the samples of the step. A first step does not
// count: LibTorch makes some memory once, and gradients of a step before are to be there.
#include "cohort/pipeline/memory_probe.h"

#include <algorithm>
#include <map>
#include <string>
#include <thread>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/text/layer_entry.h"
#include "cohort/memory/allocation_profiler.h"
#include "cohort/parallel/placement_worker.h"
#include "cohort/pipeline/internal/batch.h"
#include "cohort/pipeline/internal/check.h"

namespace cohort::pipeline {
namespace {

using memory::Probe;
using memory::ProbedPart;

void drop_gradients(const PipelineParts& parts) {
  for (const Stage& stage : parts.stages) {
    for (const at::Tensor& parameter : stage.parameters()) parameter.mutable_grad().reset();
  }
}

// One step, by action: what `thread` holds, that of the placement that is ahead. After it, the most that the
// calling thread holds.
Probe run_probe(PipelineParts parts, const std::function<void(const parallel::ModelRunner&)>& step,
                std::thread::id thread) {
  Probe probe;
  memory::AllocationProfiler profiler;
  const int placement = parts.options.run_ahead, count = int(parts.options.placements.size());
  const std::int64_t before = gradient_bytes(parts, placement);
  const auto caller = std::this_thread::get_id();
  std::int64_t most = 0;
  parts.options.on_action = [&, parts](const Action& action) {
    ProbedPart part{.name = to_string(action), .curve = profiler.curve_of(thread)};
    most = std::max(most, profiler.made_by(caller).peak);
    profiler.begin();
    if (action.stage % count == placement && action.kind == ActionKind::kForward) {
      part.held = profiler.made_by(thread).now - (gradient_bytes(parts, placement) - before);
    }
    probe.push_back(std::move(part));
  };
  step(run_pipeline(std::move(parts), at::kCPU));
  probe.push_back({.name = "caller", .curve = {std::max(most, profiler.made_by(caller).peak)}});
  return probe;
}

}  // namespace

std::int64_t gradient_bytes(const PipelineParts& parts, int placement) {
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

std::vector<memory::StepMemory> probe_memory(
    const PipelineParts& given, const std::function<void(const parallel::ModelRunner&, std::int64_t)>& step,
    std::int64_t samples, bool again) {
  check_options(given.stages, given.options);
  PipelineParts parts = given;
  PipelineOptions& options = parts.options;
  const std::int64_t count = std::ssize(split_sizes(samples, options));
  options.num_micro_batches = static_cast<int>(count);
  options.split_size = 0;  // the probes have fewer samples, in as many micro-batches
  // A pipeline over GPUs is measured on the CPU. Each placement needs a thread of its own there, since blocks
  // are counted by thread.
  for (std::size_t i = 0; i < options.placements.size(); ++i) {
    if (options.placements[i].is_cpu()) continue;
    options.placements[i] = base::Placement::parse(base::concat("cpu:0/placement", i));
  }
  const parallel::PlacementThreads placement_threads(options.placements);
  const std::vector<std::thread::id>& threads = placement_threads.ids();
  // With the same rest, each micro-batch grows with the batch along a straight line of its own.
  const auto samples_of = [&](std::int64_t each) { return each * count + samples % count; };
  const auto probe = [&](std::int64_t of) {
    if (!again) drop_gradients(parts);
    const auto thread = threads[static_cast<std::size_t>(options.run_ahead)];
    return run_probe(parts, [&](const parallel::ModelRunner& call) { step(call, of); }, thread);
  };
  std::vector<memory::StepMemory> memories(threads.size() + 1);
  drop_gradients(parts);
  options.run_ahead = 0;
  probe(samples_of(memory::kProbeSamples));
  for (std::size_t placement = 0; placement < threads.size(); ++placement) {
    options.run_ahead = static_cast<int>(placement);
    const memory::ProbePair probes = memory::probe_twice(probe, samples_of);
    const memory::LinearFit lines = probes.lines();
    for (std::size_t i = 0; i + 1 < probes.few.size(); ++i) {
      lines.add_curve(memories[placement].curve, probes.few[i], probes.more[i]);
      memories[placement].held.push_back(lines.through(probes.few[i].held, probes.more[i].held));
    }
    lines.add_curve(memories.back().curve, probes.few.back(), probes.more.back());
  }
  drop_gradients(parts);
  return memories;
}

parallel::RunnerMemory plan_memory(const parallel::PlainMemory& plain, const PipelineParts& parts,
                                   std::int64_t micro_batch_size) {
  const std::vector<memory::StepMemory> memories =
      probe_memory(parts, plain.step, plain.samples, plain.adds_gradients);
  const auto& placements = parts.options.placements;
  std::map<std::string, std::size_t> placement_of_layer;
  for (std::size_t stage = 0; stage < parts.stages.size(); ++stage) {
    for (const auto& layer : parts.stages[stage].layers()) {
      placement_of_layer[layer.name] = stage % placements.size();
    }
  }
  parallel::MemoryUse all{
      .model = plain.use.model, .optimizer = plain.use.optimizer, .batch = plain.use.batch};
  all.gradients = plain.use.gradients;
  // The thread that calls the step made the part's batch, and little more.
  all.peak = *all.batch - plain.batch_bytes(plain.samples) + memories.back().peak(plain.samples);
  all.activations = 0;
  parallel::RunnerMemory memory({});
  for (std::size_t i = 0; i < placements.size(); ++i) {
    parallel::PlannedPlace place{.name = placements[i].name,
                                 .samples = micro_batch_size,
                                 .use = plain.part([&](const std::string& name) {
                                   const auto* const entry = base::entry_of_layer(placement_of_layer, name);
                                   return entry != nullptr && entry->second == i;
                                 }),
                                 .placement = placements[i]};
    parallel::MemoryUse& use = place.use;
    use.activations = memories[i].activations(plain.samples);
    use.peak = *use.model + *use.optimizer + memories[i].peak(plain.samples) +
               (plain.adds_gradients ? *use.gradients : 0);
    *all.activations += *use.activations;
    *all.peak += *use.peak;
    memory.places.push_back(std::move(place));
  }
  memory.all = {.name = "all", .samples = plain.samples, .use = all};
  return memory;
}

}  // namespace cohort::pipeline
