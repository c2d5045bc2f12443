#include <cstdio>
#include <map>
#include <memory>
#include <string>

#include "cohort/cli/internal/commands.h"
#include "cohort/cli/internal/trained_model.h"
#include "cohort/comm/job.h"
#include "cohort/train/run.h"

namespace cohort::cli {
namespace {

struct EvalArguments {
  TrainedModel model;
  std::string device;
};

int eval_command(EvalArguments arguments) {
  TrainedModel& model = arguments.model;
  // Last, so that --device wins over train.device among the overrides.
  if (!arguments.device.empty()) model.overrides.push_back("train.device=" + arguments.device);
  std::map<std::string, double> metrics;
  model.use("cli.eval", [&](const config::Config& config, const train::TrainedWeights& trained) {
    metrics = train::run_evaluation(config, trained);
  });
  // All ranks have the same numbers; one of them prints.
  if (comm::job_from_environment().rank != 0) return 0;
  for (const auto& [name, value] : metrics) {
    std::printf("%s %.6g\n", name.c_str(), value);
  }
  return 0;
}

}  // namespace

void add_eval(CLI::App& app, Context& context) {
  auto arguments = std::make_shared<EvalArguments>();
  CLI::App* command = app.add_subcommand("eval", "Evaluate a checkpoint on the validation data");
  arguments->model.add_options(*command);
  command->add_option("overrides", arguments->model.overrides,
                      "key=value, for instance data.val=other/images");
  command->add_option("--device", arguments->device, "auto, cpu, cuda or cuda:K");
  command->footer("Example:\n  cohort eval --run runs/fashion-vgg-20260101-120000");
  command->callback(
      [arguments, &context] { context.action = [arguments] { return eval_command(*arguments); }; });
}

}  // namespace cohort::cli
