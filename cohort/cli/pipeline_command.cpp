#include <cstdio>
#include <memory>
#include <string>

#include "cohort/cli/commands.h"
#include "cohort/core/atomic_file.h"
#include "cohort/core/error.h"
#include "cohort/pipeline/draw.h"

namespace cohort::cli {
namespace {

struct PipelineArguments {
  std::string schedule = "1f1b";
  pipeline::PlanOptions plan{.num_stages = 4, .num_micro_batches = 8};
  pipeline::StageCosts costs;
  std::string draw;
  bool actions = false;
};

int pipeline_command(PipelineArguments arguments) {
  arguments.plan.schedule = pipeline::parse_schedule(arguments.schedule);
  const pipeline::Plan plan = pipeline::make_plan(arguments.plan);
  const pipeline::Simulation simulation = pipeline::simulate(plan, {.costs = {arguments.costs}});
  if (arguments.actions) std::fputs(plan.text().c_str(), stdout);
  std::printf("%s: %d stages on %d placements, %d micro-batches\n", arguments.schedule.c_str(),
              plan.num_stages(), plan.num_placements(), plan.num_micro_batches());
  std::printf("  time %.4g, idle %.2f %% (formula %.2f %%)\n", simulation.time, 100 * simulation.bubble,
              100 * pipeline::bubble_formula(plan.options, arguments.costs));
  std::printf("  activations held at most, by placement:");
  for (const double peak : simulation.peak_memory) std::printf(" %.4g", peak);
  std::printf("\n  micro-batches that wait between two stages at most: %d\n",
              pipeline::channel_capacity(plan));
  if (!arguments.draw.empty()) {
    const pipeline::Band band{core::concat("plan, ", arguments.schedule), simulation.actions, ""};
    core::write_file_atomically(arguments.draw,
                                pipeline::draw_svg({band}, plan.num_placements(), plan.num_stages()));
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
      ->add_option("--schedule", arguments->schedule, "fill_drain (or gpipe), 1f1b, interleaved_1f1b, zb_h1")
      ->capture_default_str();
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
  command->add_flag("--actions", arguments->actions, "List every action");
  command->footer(
      "Example:\n  cohort pipeline --schedule zb_h1 --stages 4 --micro-batches 8 --draw zb_h1.svg");
  command->callback(
      [arguments, &context] { context.action = [arguments] { return pipeline_command(*arguments); }; });
}

}  // namespace cohort::cli
