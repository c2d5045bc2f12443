// What schedules do, apart from what a machine does: four stages that sleep, and what is idle of their time,
// beside each schedule's formula. Then what a hand-over between two stages costs.
//
//   Run:  pipeline_schedules [MICRO_BATCHES = 8] [MILLISECONDS = 10] [STEPS = 5]
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "cohort/core/cpu.h"
#include "cohort/pipeline/pipeline.h"
#include "cohort/pipeline/synthetic.h"

namespace {

using namespace cohort;
using namespace cohort::pipeline;

std::vector<std::string> placements(int count) {
  const int cores = core::CpuSet::of_process().size();
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) names.push_back(core::concat("cpu:", i % cores, "/p", i));
  return names;
}

struct Sorted {
  explicit Sorted(std::vector<double> given) : values(std::move(given)) {
    std::sort(values.begin(), values.end());
  }
  double min() const { return values.front(); }
  double median() const { return values[values.size() / 2]; }
  double p99() const { return values[values.size() * 99 / 100]; }
  std::vector<double> values;
};

void schedule(Schedule of, int chunks, int micro_batches, double ms, int steps) {
  const int placements_count = 4;
  // All stages of a placement together take as long in every schedule.
  const auto time = std::chrono::microseconds(static_cast<std::int64_t>(ms * 1000 / chunks));
  std::vector<Stage> stages;
  for (int i = 0; i < placements_count * chunks; ++i) {
    stages.emplace_back(torch::nn::Sequential(SleepingLayer(SleepTimes{time, time, time})));
  }
  PipelineOptions options;
  options.placements = placements(placements_count);
  options.num_micro_batches = micro_batches;
  options.schedule = of;
  Pipeline pipe(stages, options);
  const at::Tensor input = torch::zeros({micro_batches, 1}).requires_grad_();
  const auto loss = [](const at::Tensor& output, const at::Tensor&) { return output.sum(); };
  std::vector<double> bubbles, times;
  for (int step = 0; step <= steps; ++step) {
    pipe.step(input, input.detach(), loss);
    if (step == 0) continue;
    bubbles.push_back(100 * pipe.last_run().bubble());
    times.push_back(pipe.last_run().time);
  }
  const double formula = 100 * bubble_formula(pipe.plan(micro_batches).options);
  const Sorted bubble(bubbles), took(times);
  std::printf(
      "%-18s formula %6.2f %%  idle: min %6.2f  median %6.2f  p99 %6.2f %%  ratio %.3f  step %8.2f ms\n",
      to_string(of), formula, bubble.min(), bubble.median(), bubble.p99(), bubble.median() / formula,
      took.median());
}

// From the end of a forward in one stage to the begin of the next stage's: what a micro-batch waits.
void hand_over(const std::vector<std::string>& on, const char* what) {
  const Stage nothing([](const Tensors& in) { return Tensors{in.at(0)}; }, {});
  PipelineOptions options;
  options.placements = on;
  options.num_micro_batches = 1;
  Pipeline pipe({nothing, nothing}, options);
  const torch::NoGradGuard no_grad;
  const at::Tensor input = torch::zeros({1, 1});
  std::vector<double> waits, steps;
  for (int i = 0; i < 5000; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    pipe.forward(input);
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
    if (i < 500) continue;
    const RunTimes& times = pipe.last_run();
    waits.push_back(1000 * (times.actions[1].front().begin - times.actions[0].front().end));
    steps.push_back(took.count());
  }
  const Sorted wait(waits), step(steps);
  std::printf("hand-over, %-28s min %6.2f  median %6.2f  p99 %7.2f us   whole forward: median %6.2f us\n",
              what, wait.min(), wait.median(), wait.p99(), step.median());
}

}  // namespace

int main(int argc, char** argv) {
  const int micro_batches = argc > 1 ? std::atoi(argv[1]) : 8;
  const double ms = argc > 2 ? std::atof(argv[2]) : 10;
  const int steps = argc > 3 ? std::atoi(argv[3]) : 5;
  std::printf(
      "4 stages that sleep %g ms for each of forward, gradient of inputs and of weights, %d micro-batches, "
      "%d cores\n",
      ms, micro_batches, core::CpuSet::of_process().size());
  schedule(Schedule::kFillDrain, 1, micro_batches, ms, steps);
  schedule(Schedule::kOneFOneB, 1, micro_batches, ms, steps);
  schedule(Schedule::kInterleaved, 2, micro_batches, ms, steps);
  schedule(Schedule::kZeroBubble, 1, micro_batches, ms, steps);
  hand_over({"cpu:0", "cpu:1"}, "two cores");
  hand_over({"cpu:0/a", "cpu:0/b"}, "two threads of one core");
  return 0;
}
