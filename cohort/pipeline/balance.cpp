// For each number of stages and each last layer, the cutter finds the cut whose worst stage costs least. It
// tries every first layer of the last stage, and leaves out stages that pass their share of the memory. The
// cut is optimal for the measured layers; the step that it will take is simulated, not measured. tune()
// measures instead: it runs steps with each split size, and puts buffers and gradients back afterwards.
#include "cohort/pipeline/balance.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>

#include "cohort/base/placement.h"
#include "cohort/core/device.h"

namespace cohort::pipeline {
namespace {

using base::concat;
constexpr const char* kWhereBalance = "pipeline.balance";
constexpr double kInfinite = std::numeric_limits<double>::infinity();

template <typename... Args>
std::string format(const char* pattern, Args... args) {
  std::array<char, 256> text{};
  std::snprintf(text.data(), text.size(), pattern, args...);
  return text.data();
}

StageCosts costs_of(const std::vector<LayerProfile>& layers, std::size_t first, std::size_t last) {
  StageCosts costs{0, 0, 0, 0, 0, 0};
  for (std::size_t i = first; i < last; ++i) {
    costs.forward += layers[i].forward;
    costs.input_gradient += layers[i].input_gradient;
    costs.weight_gradient += layers[i].weight_gradient;
    costs.activation += static_cast<double>(layers[i].activation_bytes);
  }
  // Not measured separately: all of it counts as kept until the weights' gradient.
  costs.weight_part = costs.activation;
  return costs;
}

double time_of(const StageCosts& costs) {
  return costs.forward + costs.input_gradient + costs.weight_gradient;
}

class Cutter {
 public:
  Cutter(const std::vector<LayerProfile>& layers, const BalanceOptions& options)
      : layers_(layers), options_(options), schedule_(schedule_type(options.schedule)) {
    plan_.schedule = options.schedule;
    plan_.num_stages = options.num_stages;
    plan_.num_placements = options.num_placements == 0 ? options.num_stages : options.num_placements;
    plan_.num_micro_batches = options.num_micro_batches;
  }

  const PlanOptions& plan() const { return plan_; }

  // What the stage adds to its placement. Of several stages on one, each holds its share of the activations.
  double bytes(int stage, std::size_t first, std::size_t last) const {
    double parameters = 0;
    for (std::size_t i = first; i < last; ++i) parameters += static_cast<double>(layers_[i].parameter_bytes);
    const int chunks = plan_.num_stages / plan_.num_placements;
    const int placement = stage % plan_.num_placements;
    const double held = memory_formula(plan_, schedule_, placement, costs_of(layers_, first, last)) / chunks;
    // The parameter, its gradient, and what the optimizer keeps of it.
    return parameters * (2 + options_.optimizer_factor) + held;
  }

  // What the worst stage is to have least of.
  double cost(int stage, std::size_t first, std::size_t last) const {
    return options_.by_bytes ? bytes(stage, first, last) : time_of(costs_of(layers_, first, last));
  }

  // The least cost of the worst of stages [0, stage], which end before layer `last`; 0 and infinite limits.
  std::vector<std::size_t> cut(double limit) const {
    const std::size_t count = layers_.size();
    const auto stages = static_cast<std::size_t>(plan_.num_stages);
    std::vector<std::vector<double>> worst(stages + 1, std::vector<double>(count + 1, kInfinite));
    std::vector<std::vector<std::size_t>> from(stages + 1, std::vector<std::size_t>(count + 1, 0));
    worst[0][0] = 0;
    for (std::size_t stage = 1; stage <= stages; ++stage) {
      for (std::size_t last = stage; last <= count; ++last) {
        for (std::size_t first = stage - 1; first < last; ++first) {
          if (worst[stage - 1][first] == kInfinite) continue;
          const int number = static_cast<int>(stage) - 1;
          if (bytes(number, first, last) > limit) continue;
          const double most = std::max(worst[stage - 1][first], cost(number, first, last));
          // Of equal cuts the first one stays, so that a result repeats.
          if (most >= worst[stage][last]) continue;
          worst[stage][last] = most;
          from[stage][last] = first;
        }
      }
    }
    if (worst[stages][count] == kInfinite) return {};
    std::vector<std::size_t> cuts{count};
    for (std::size_t stage = stages; stage > 0; --stage) cuts.push_back(from[stage][cuts.back()]);
    std::reverse(cuts.begin(), cuts.end());
    return cuts;
  }

 private:
  const std::vector<LayerProfile>& layers_;
  const BalanceOptions& options_;
  const ScheduleType schedule_;  // asked for once: the registry copies it under a lock
  PlanOptions plan_;
};

// Those that this process computes on.
std::vector<c10::Device> devices_of(const PipelineOptions& options) {
  std::vector<c10::Device> devices;
  for (std::size_t i = 0; i < options.placements.size(); ++i) {
    if (options.group && options.group.rank() != static_cast<int>(i)) continue;
    devices.push_back(core::device_of(options.placements[i]));
  }
  return devices;
}

// A step that throws leaves no stage behind that still adds to gradients, if that ends within the timeout.
void step_to_the_end(Pipeline& pipe, const Tensors& inputs, const Tensors& targets, const Loss& loss) {
  try {
    pipe.step(inputs, targets, loss);
  } catch (...) {
    try {
      pipe.wait_for_late_stages();
    } catch (const TimeoutError&) {  // the step's own error says more
    }
    throw;
  }
}

}  // namespace

Balance balance(const std::vector<LayerProfile>& layers, const BalanceOptions& options) {
  const Cutter cutter(layers, options);
  const Plan plan = make_plan(cutter.plan());
  if (layers.size() < static_cast<std::size_t>(options.num_stages)) {
    throw UsageError(kWhereBalance,
                     concat("got ", layers.size(), " layers for ", options.num_stages, " stages"));
  }
  Balance result;
  // Stages of one placement share its memory, each an equal part of the limit.
  const double chunks = plan.num_chunks();
  result.cuts =
      cutter.cut(options.max_bytes > 0 ? static_cast<double>(options.max_bytes) / chunks : kInfinite);
  if (result.cuts.empty()) {
    double least = 0;
    const auto any = cutter.cut(kInfinite);
    for (std::size_t stage = 0; stage + 1 < any.size(); ++stage) {
      least = std::max(least, cutter.bytes(static_cast<int>(stage), any[stage], any[stage + 1]) * chunks);
    }
    throw UsageError(
        kWhereBalance,
        concat("no cut fits into ", options.max_bytes, " bytes per placement; the most even one needs ",
               static_cast<std::int64_t>(least)),
        "more placements, smaller micro-batches, or recomputation");
  }
  result.placement_bytes.resize(static_cast<std::size_t>(plan.num_placements()));
  std::vector<double> busy(result.placement_bytes.size());
  for (int stage = 0; stage < plan.num_stages(); ++stage) {
    const auto first = result.cuts[static_cast<std::size_t>(stage)],
               last = result.cuts[static_cast<std::size_t>(stage) + 1];
    const auto placement = static_cast<std::size_t>(plan.placement_of(stage));
    result.costs.push_back(costs_of(layers, first, last));
    result.placement_bytes[placement] += cutter.bytes(stage, first, last);
    busy[placement] += time_of(result.costs.back());
  }
  double sum = 0, most = 0;
  for (const double each : busy) sum += each, most = std::max(most, each);
  const Simulation simulation = simulate(plan, {.costs = result.costs});
  result.step = simulation.time;
  result.bubble = simulation.bubble;
  // 1 where all placements are equally busy.
  result.evenness = most > 0 ? sum / (most * static_cast<double>(busy.size())) : 1;
  return result;
}

std::vector<Stage> Balance::stages(const Stage& model) const {
  std::vector<Stage> result;
  for (std::size_t stage = 0; stage + 1 < cuts.size(); ++stage)
    result.push_back(model.part(cuts[stage], cuts[stage + 1]));
  return result;
}

std::string Balance::text() const {
  std::string text;
  for (std::size_t stage = 0; stage < costs.size(); ++stage) {
    text +=
        format("stage %zu: layers %zu to %zu, forward %.3f ms, backward %.3f ms, activations %.2f MiB\n",
               stage, cuts[stage], cuts[stage + 1] - 1, costs[stage].forward,
               costs[stage].input_gradient + costs[stage].weight_gradient, costs[stage].activation / 1048576);
  }
  for (std::size_t i = 0; i < placement_bytes.size(); ++i) {
    text += format("placement %zu: %.2f MiB\n", i, placement_bytes[i] / 1048576);
  }
  return text + format("predicted step %.3f ms, idle %.1f %%, evenness %.3f\n", step, 100 * bubble, evenness);
}

TuneResult tune(const std::vector<Stage>& stages, PipelineOptions pipeline, const Tensors& inputs,
                const Tensors& targets, const Loss& loss, const TuneOptions& options) {
  if (inputs.empty() || !inputs.front().defined()) throw UsageError("pipeline.tune", "got no input");
  if (options.repeats < 1)
    throw UsageError("pipeline.tune", concat("got ", options.repeats, " repeats, expected at least 1"));
  // Its steps must not train: buffers and gradients come back.
  const KeepState keep(stages);
  std::vector<std::int64_t> sizes = options.split_sizes;
  for (std::int64_t size = 1; options.split_sizes.empty() && size <= inputs.front().size(0); size *= 2)
    sizes.push_back(size);
  TuneResult result;
  pipeline.num_micro_batches = 0;
  for (const std::int64_t size : sizes) {
    pipeline.split_size = size;
    Pipeline pipe(stages, pipeline);
    const OwnNumbers numbers(devices_of(pipeline));
    std::vector<double> times;
    for (int repeat = 0; repeat <= options.repeats; ++repeat) {  // the first does not count
      const auto begin = std::chrono::steady_clock::now();
      step_to_the_end(pipe, inputs, targets, loss);
      const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
      if (repeat > 0) times.push_back(took.count());
    }
    std::sort(times.begin(), times.end());
    result.points.push_back({size, times[times.size() / 2]});
  }
  const auto faster = [](const TunePoint& a, const TunePoint& b) { return a.milliseconds < b.milliseconds; };
  result.best = std::min_element(result.points.begin(), result.points.end(), faster)->split_size;
  return result;
}

std::string TuneResult::text() const {
  std::string text;
  for (const TunePoint& point : points) {
    text += format("split size %4lld: %10.3f ms%s\n", static_cast<long long>(point.split_size),
                   point.milliseconds, point.split_size == best ? "  best" : "");
  }
  return text;
}

}  // namespace cohort::pipeline
