// `cohort plan`: reads what to plan from the command line, and prints what the planner says of it.
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/load_plugin.h"
#include "cohort/cli/internal/commands.h"
#include "cohort/cli/internal/config_option.h"
#include "cohort/planner/memory_plan.h"

namespace cohort::cli {
namespace {

struct PlanArguments {
  std::string config;
  std::vector<std::string> overrides;
  std::vector<std::string> plugins;
  std::vector<std::string> device_map;
  std::vector<std::string> old_place;
  bool memory = false;
  bool measure = false;
  bool json = false;
};

int plan_command(const PlanArguments& arguments) {
  // --memory is asked for by name: other plans may come, and then no default would be right.
  if (!arguments.memory) {
    throw UsageError("cli.plan", "no option says what to plan", "cohort plan --memory --config FILE");
  }
  planner::MemoryOptions options{.measure = arguments.measure};
  if (!arguments.old_place.empty()) {
    throw UsageError("cli.plan", "--place has a new name: --device-map",
                     "--device-map " + arguments.old_place.front());
  }
  for (const std::string& text : arguments.device_map) {
    const std::size_t equals = text.find('=');
    // The first "=" parts them. A placement has none, a layer's name has none either.
    if (equals == 0 || equals == std::string::npos) {
      throw UsageError("cli.plan", base::concat("--device-map: got \"", text, "\", expected LAYER=PLACEMENT"),
                       "--device-map layer4=cpu:1");
    }
    // A layer that is given twice goes to the last place, as overrides do.
    options.device_map[text.substr(0, equals)] = base::Placement::parse(text.substr(equals + 1));
  }
  for (const std::string& plugin : arguments.plugins) base::load_plugin(plugin);
  const config::Config config = load_config("cli.plan", arguments.config, arguments.overrides);
  const planner::MemoryPlan plan = planner::plan_memory(config, options);
  std::fputs((arguments.json ? planner::to_json(plan) : planner::to_text(plan)).c_str(), stdout);
  return 0;
}

}  // namespace

void add_plan(CLI::App& app, Context& context) {
  auto arguments = std::make_shared<PlanArguments>();
  CLI::App* command = app.add_subcommand("plan", "Say what a run takes before it runs");
  command->add_flag("--memory", arguments->memory,
                    "Bytes of parameters, optimizer, batch, activations and gradients, by placement");
  add_config_option(*command, arguments->config, "The configuration, as of cohort train");
  command->add_option("overrides", arguments->overrides,
                      "key=value: change one setting, for instance train.batch_size=64");
  command->add_option("--place", arguments->old_place)->group("");
  repeatable(command->add_option("--device-map", arguments->device_map,
                                 "A layer that lives elsewhere than the rest, such as layer4=cpu:1"),
             "LAYER=PLACEMENT");
  command->add_flag("--measure", arguments->measure,
                    "Run two steps of the whole batch too, and print what was measured beside it");
  command->add_flag("--json", arguments->json, "Print bytes as JSON");
  repeatable(
      command->add_option("--load", arguments->plugins, "A shared library with models or data sets of yours"),
      "FILE");
  command->footer(
      "Examples:\n"
      "  cohort plan --memory --config configs/vgg.yaml data.type=synthetic model.num_classes=1000\n"
      "  cohort plan --memory --measure --config my.yaml --device-map layer3=cpu:1 --device-map "
      "layer4=cpu:1\n"
      "  cohort plan --memory --config my.yaml distributed.model=pipeline distributed.schedule=zb_h1");
  command->callback(
      [arguments, &context] { context.action = [arguments] { return plan_command(*arguments); }; });
}

}  // namespace cohort::cli
