// A plan is made, simulated with the given costs, and printed beside the formula's value. With --measure the
// same plan also runs, with stages that sleep instead of computing. Sleeping threads need no core, so the
// measurement shows the schedule even on a machine with fewer cores than placements. No configuration and no
// model take part.
#include <ATen/ops/zeros.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "cohort/base/cpu.h"
#include "cohort/base/error.h"
#include "cohort/base/files/atomic_file.h"
#include "cohort/base/load_plugin.h"
#include "cohort/cli/internal/commands.h"
#include "cohort/pipeline/draw.h"
#include "cohort/pipeline/pipeline.h"
#include "cohort/pipeline/synthetic.h"

namespace cohort::cli {
namespace {

struct PipelineArguments {
  std::vector<std::string> plugins;
  std::string schedule = "1f1b";
  pipeline::PlanOptions plan{.num_stages = 4, .num_micro_batches = 8};
  pipeline::StageCosts costs;
  std::string draw;
  bool actions = false;
  double measure_ms = 0;
};

// Threads of their own for all placements, on the cores that there are. The part after the slash makes names
// distinct, so that placements on one core still get a thread each.
std::vector<base::Placement> placements_on_cores(int count) {
  const int cores = base::CpuSet::of_process().size();
  std::vector<base::Placement> placements;
  for (int i = 0; i < count; ++i) {
    placements.push_back(base::Placement::parse(base::concat("cpu:", i % cores, "/p", i)));
  }
  return placements;
}

// Runs the plan with stages that sleep.
pipeline::RunTimes measure(const PipelineArguments& arguments, const pipeline::Plan& plan) {
  const auto time = [&](double cost) {
    // Costs have no unit; measure_ms says how many milliseconds one of them is.
    return std::chrono::microseconds(static_cast<std::int64_t>(cost * arguments.measure_ms * 1000));
  };
  std::vector<pipeline::Stage> stages;
  for (int stage = 0; stage < plan.num_stages(); ++stage) {
    stages.emplace_back(torch::nn::Sequential(pipeline::SleepingLayer(
        pipeline::SleepTimes{time(arguments.costs.forward), time(arguments.costs.input_gradient),
                             time(arguments.costs.weight_gradient)})));
  }
  pipeline::PipelineOptions options;
  options.placements = placements_on_cores(plan.num_placements());
  options.num_micro_batches = plan.num_micro_batches();
  options.schedule = plan.options.schedule;
  pipeline::Pipeline pipe(stages, options);
  const auto loss = [](const at::Tensor& output, const at::Tensor&) { return output.sum(); };
  // One row for each micro-batch. It requires a gradient so that the first stage has an input gradient too,
  // as the plan assumes.
  const at::Tensor input = at::zeros({plan.num_micro_batches(), 1}).requires_grad_();
  for (int step = 0; step < 2; ++step) pipe.step(input, input.detach(), loss);  // the first starts threads
  return pipe.last_run();
}

int pipeline_command(PipelineArguments arguments) {
  for (const std::string& plugin : arguments.plugins) base::load_plugin(plugin);
  arguments.plan.schedule = pipeline::parse_schedule(arguments.schedule);
  const pipeline::Plan plan = pipeline::make_plan(arguments.plan);
  const pipeline::Simulation simulation = pipeline::simulate(plan, {.costs = {arguments.costs}});
  if (arguments.actions) std::fputs(plan.text().c_str(), stdout);
  std::printf("%s: %d stages on %d placements, %d micro-batches\n", arguments.schedule.c_str(),
              plan.num_stages(), plan.num_placements(), plan.num_micro_batches());
  // The simulation follows each action, the formula is the paper's. They differ where the formula leaves out
  // the time of sends.
  std::printf("  time %.4g, idle %.2f %%", simulation.time, 100 * simulation.bubble);
  if (pipeline::schedule_type(plan.options.schedule).idle_time) {
    std::printf(" (formula %.2f %%)", 100 * pipeline::bubble_formula(plan.options, arguments.costs));
  }
  std::printf("\n  activations held at most, by placement:");
  for (const double peak : simulation.peak_memory) std::printf(" %.4g", peak);
  std::printf("\n  micro-batches that wait between two stages at most: %d\n",
              pipeline::channel_capacity(plan));
  std::vector<pipeline::Band> bands{{base::concat("plan, ", arguments.schedule), simulation.actions, ""}};
  // Both bands go into one drawing, plan above measurement, so that a late stage can be seen.
  if (arguments.measure_ms > 0) {
    const pipeline::RunTimes times = measure(arguments, plan);
    bands.push_back({"measured, with stages that sleep", times.actions, " ms"});
    std::printf("measured: time %.4g ms, idle %.2f %%\n", times.time, 100 * times.bubble());
  }
  if (!arguments.draw.empty()) {
    base::write_file_atomically(arguments.draw,
                                pipeline::draw_svg(bands, plan.num_placements(), plan.num_stages()));
    std::printf("drawn: %s\n", arguments.draw.c_str());
  }
  return 0;
}

}  // namespace

void add_pipeline(CLI::App& app, Context& context) {
  auto arguments = std::make_shared<PipelineArguments>();
  CLI::App* command =
      app.add_subcommand("pipeline", "Show what the placements of a pipeline do, and what it costs");
  command
      ->add_option("--schedule", arguments->schedule,
                   "fill_drain (or gpipe), 1f1b, interleaved_1f1b, zb_h1, or one that --load brings")
      ->capture_default_str();
  repeatable(command->add_option("--load", arguments->plugins, "A shared library with schedules of yours"),
             "FILE");
  command->add_option("--stages", arguments->plan.num_stages, "Stages")->capture_default_str();
  command->add_option("--placements", arguments->plan.num_placements, "Placements (0: one per stage)")
      ->capture_default_str();
  command->add_option("--micro-batches", arguments->plan.num_micro_batches, "Micro-batches in a step")
      ->capture_default_str();
  command->add_option("--forward", arguments->costs.forward, "Time of a stage's forward")
      ->capture_default_str();
  command
      ->add_option("--input-gradient", arguments->costs.input_gradient, "Time of the gradients of its inputs")
      ->capture_default_str();
  command
      ->add_option("--weight-gradient", arguments->costs.weight_gradient,
                   "Time of the gradients of its weights")
      ->capture_default_str();
  command->add_option("--send", arguments->costs.send, "Time of a hand-over")->capture_default_str();
  command->add_option("--draw", arguments->draw, "Where to draw it, as SVG");
  command
      ->add_option("--measure", arguments->measure_ms,
                   "Run it with stages that sleep for their times, of this many milliseconds each")
      ->check(CLI::PositiveNumber);
  command->add_flag("--actions", arguments->actions, "List every action");
  command->footer(
      "Example:\n  cohort pipeline --schedule zb_h1 --stages 4 --micro-batches 8 --measure 5 --draw "
      "zb_h1.svg");
  command->callback(
      [arguments, &context] { context.action = [arguments] { return pipeline_command(*arguments); }; });
}

}  // namespace cohort::cli
