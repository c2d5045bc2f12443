#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "cohort/base/load_plugin.h"
#include "cohort/cli/internal/commands.h"
#include "cohort/cli/internal/config_option.h"
#include "cohort/train/script_bench.h"

namespace cohort::cli {
namespace {

struct ScriptArguments {
  std::string config;
  std::vector<std::string> overrides;
  std::vector<std::string> plugins;
  int rounds = bench::TimeitOptions().rounds();
  double seconds = 0.2;
};

int script_command(const ScriptArguments& arguments) {
  // Plug-ins come before the configuration everywhere in this module: a key may name what they register.
  for (const std::string& plugin : arguments.plugins) base::load_plugin(plugin);
  const config::Config config = load_config("cli.bench", arguments.config, arguments.overrides);
  const auto round = std::chrono::nanoseconds(static_cast<std::int64_t>(arguments.seconds * 1e9));
  const train::ScriptBench found = train::bench_script(
      config,
      train::ScriptBenchOptions().timeit(bench::TimeitOptions().rounds(arguments.rounds).min_time(round)));
  std::fputs(train::to_text(found).c_str(), stdout);
  return 0;
}

}  // namespace

void add_bench(CLI::App& app, Context& context) {
  CLI::App* bench = app.add_subcommand("bench", "Measure, on a configuration of yours, what a feature gives");
  bench->require_subcommand(1);
  // Shared, since CLI11 writes into it while it parses, and the action reads it after this function has
  // returned.
  auto arguments = std::make_shared<ScriptArguments>();
  CLI::App* command = bench->add_subcommand(
      "script", "Time of a training step, and of evaluation, in eager mode and with train.script");
  add_config_option(*command, arguments->config, "The configuration, as of cohort train");
  command->add_option("overrides", arguments->overrides,
                      "key=value: change one setting, for instance train.batch_size=64");
  command->add_option("--rounds", arguments->rounds, "Rounds of each measurement; the median counts")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--seconds", arguments->seconds, "Least time of a round")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  repeatable(
      command->add_option("--load", arguments->plugins, "A shared library with models or data sets of yours"),
      "FILE");
  command->footer(
      "Examples:\n"
      "  cohort bench script --config configs/vgg.yaml data.type=synthetic model.num_classes=10\n"
      "  OMP_NUM_THREADS=1 cohort bench script --config my.yaml train.threads=1 train.batch_size=16");
  command->callback(
      [arguments, &context] { context.action = [arguments] { return script_command(*arguments); }; });
}

}  // namespace cohort::cli
