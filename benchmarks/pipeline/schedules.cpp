// What schedules do, apart from what a machine does: four stages that sleep, and what is idle of their time,
// beside each schedule's formula. Then what a hand-over between two stages costs.
//
//   Run:  pipeline_schedules [MICRO_BATCHES = 8] [MILLISECONDS = 10] [STEPS = 5]
#include <ATen/ATen.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <cstdio>
#include <cstdlib>

#include "cohort/base/cpu.h"
#include "cohort/bench/timeit.h"
#include "cohort/pipeline/pipeline.h"
#include "cohort/pipeline/synthetic.h"

namespace {

using namespace cohort;
using namespace cohort::pipeline;

std::vector<base::Placement> placements(int count) {
  const int cores = base::CpuSet::of_process().size();
  std::vector<base::Placement> all;
  for (int i = 0; i < count; ++i) {
    all.push_back(base::Placement::parse(base::concat("cpu:", i % cores, "/p", i)));
  }
  return all;
}

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
  std::vector<double> bubbles;  // in %
  const auto took = bench::sample(
      [&] {
        pipe.step(input, input.detach(), loss);
        bubbles.push_back(100 * pipe.last_run().bubble());
        return 1e-3 * pipe.last_run().time;
      },
      bench::TimeitOptions().rounds(steps));
  bubbles.erase(bubbles.begin());  // of the step that made caches warm
  const double formula = 100 * bubble_formula(pipe.plan(micro_batches).options);
  const double median = bench::percentile(bubbles, 0.5);
  std::printf(
      "%-18s formula %6.2f %%  idle: min %6.2f  median %6.2f  p99 %6.2f %%  ratio %.3f  step %8.2f ms\n",
      to_string(of).c_str(), formula, bench::percentile(bubbles, 0), median, bench::percentile(bubbles, 0.99),
      median / formula, 1e3 * took.median());
}

// From the end of a forward in one stage to the begin of the next stage's: what a micro-batch waits.
void hand_over(const char* on, const char* what) {
  const Stage nothing([](const Tensors& in) { return Tensors{in.at(0)}; }, {});
  PipelineOptions options;
  options.placements = base::parse_placements(on);
  options.num_micro_batches = 1;
  Pipeline pipe({nothing, nothing}, options);
  const torch::NoGradGuard no_grad;
  const at::Tensor input = torch::zeros({1, 1});
  const auto forward = [&] { pipe.forward(input); };
  for (int warm_up = 0; warm_up < 500; ++warm_up) forward();
  std::vector<double> waits;  // in us
  const auto whole = bench::sample(
      [&] {
        const double seconds = bench::seconds_of(forward);
        const RunTimes& times = pipe.last_run();
        waits.push_back(1000 * (times.actions[1].front().begin - times.actions[0].front().end));
        return seconds;
      },
      bench::TimeitOptions().rounds(4500).warm_up(0));
  std::printf("hand-over, %-28s min %6.2f  median %6.2f  p99 %7.2f us   whole forward: median %6.2f us\n",
              what, bench::percentile(waits, 0), bench::percentile(waits, 0.5),
              bench::percentile(waits, 0.99), 1e6 * whole.median());
}

}  // namespace

int main(int argc, char** argv) {
  const int micro_batches = argc > 1 ? std::atoi(argv[1]) : 8;
  const double ms = argc > 2 ? std::atof(argv[2]) : 10;
  const int steps = argc > 3 ? std::atoi(argv[3]) : 5;
  std::printf(
      "4 stages that sleep %g ms for each of forward, gradient of inputs and of weights, %d micro-batches, "
      "%d cores\n",
      ms, micro_batches, base::CpuSet::of_process().size());
  schedule(Schedule::kFillDrain, 1, micro_batches, ms, steps);
  schedule(Schedule::kOneFOneB, 1, micro_batches, ms, steps);
  schedule(Schedule::kInterleaved, 2, micro_batches, ms, steps);
  schedule(Schedule::kZeroBubble, 1, micro_batches, ms, steps);
  hand_over("cpu:0,cpu:1", "two cores");
  hand_over("cpu:0/a,cpu:0/b", "two threads of one core");
  return 0;
}
