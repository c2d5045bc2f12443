#include <cstdio>
#include <filesystem>
#include <memory>
#include <vector>

#include "cohort/cli/commands.h"
#include "cohort/comm/job.h"
#include "cohort/core/error.h"
#include "cohort/train/config.h"
#include "cohort/train/run.h"

namespace cohort::cli {
namespace {

namespace fs = std::filesystem;

struct EvalArguments {
  std::string config;
  std::string run;
  std::string checkpoint = "best";
  std::vector<std::string> overrides;
  std::vector<std::string> plugins;
  std::string device;
};

int eval_command(EvalArguments arguments) {
  fs::path checkpoint = arguments.checkpoint;
  if (!arguments.run.empty()) {
    if (arguments.config.empty()) arguments.config = (fs::path(arguments.run) / "config.yaml").string();
    const bool is_name = checkpoint == "best" || checkpoint == "last";
    if (is_name) checkpoint = fs::path(arguments.run) / "checkpoints" / checkpoint;
  }
  if (arguments.config.empty()) {
    throw UsageError("cli.eval", "neither --run nor --config was given", "cohort eval --run runs/NAME");
  }
  if (!fs::exists(checkpoint)) {
    throw DataError(
        "cli.eval", core::concat("there is no checkpoint ", checkpoint.string()),
        "cohort eval --run runs/NAME --checkpoint last, or the path of a checkpoint or .safetensors file");
  }
  if (!arguments.device.empty()) arguments.overrides.push_back("train.device=" + arguments.device);
  for (const std::string& plugin : arguments.plugins) train::load_plugin(plugin);
  const train::Config config = train::load_config(arguments.config, arguments.overrides);
  const auto metrics = train::run_evaluation(config, checkpoint);
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
  command->add_option("-r,--run", arguments->run, "A run folder: its config.yaml, its best checkpoint");
  command->add_option("-c,--config", arguments->config, "The configuration, when not that of --run");
  command->add_option("--checkpoint", arguments->checkpoint,
                      "best (the default), last, a checkpoint folder or a .safetensors file");
  command->add_option("overrides", arguments->overrides, "key=value, for instance data.val=other/images");
  command
      ->add_option("--load", arguments->plugins,
                   "A shared library with models, data sets or operators of yours")
      ->allow_extra_args(false);
  command->add_option("--device", arguments->device, "auto, cpu, cuda or cuda:K");
  command->footer("Example:\n  cohort eval --run runs/fashion-vgg-20260101-120000");
  command->callback(
      [arguments, &context] { context.action = [arguments] { return eval_command(*arguments); }; });
}

}  // namespace cohort::cli
