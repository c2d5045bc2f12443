#include <c10/util/Exception.h>

#include <cstdio>
#include <memory>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/load_plugin.h"
#include "cohort/cli/internal/commands.h"
#include "cohort/models/registry.h"
#include "cohort/models/summary.h"

namespace cohort::cli {
namespace {

struct SummaryArguments {
  models::ModelOptions model;
  std::int64_t batch_size = 1;
  std::vector<std::string> plugins;
};

int summary_command(const SummaryArguments& arguments) {
  for (const std::string& plugin : arguments.plugins) base::load_plugin(plugin);
  torch::nn::AnyModule model = models::make_model(arguments.model);
  const std::vector<std::int64_t> shape{arguments.batch_size, arguments.model.in_channels,
                                        arguments.model.image_size, arguments.model.image_size};
  models::ModelSummary summary;
  try {
    summary = models::summarize(model, shape);
  } catch (const c10::OutOfMemoryError&) {
    // Too little memory is no fault of the shape, and another size is no cure for every model.
    throw;
  } catch (const c10::Error& error) {  // LibTorch's names neither the model nor the input's shape
    throw UsageError("cli.summary",
                     base::concat(arguments.model.name, " on an input of ", at::IntArrayRef(shape), ": ",
                                  base::message_of(error)),
                     "another --image-size, --channels or --batch-size");
  }
  std::fputs(models::to_text(summary).c_str(), stdout);
  return 0;
}

}  // namespace

void add_summary(CLI::App& app, Context& context) {
  auto arguments = std::make_shared<SummaryArguments>();
  CLI::App* command =
      app.add_subcommand("summary", "Show a model's layers, shapes, parameters, bytes and FLOPs");
  command
      ->add_option("model", arguments->model.name, "vgg16, vgg16_bn, resnet50, lenet5, ... or one of --load")
      ->required();
  command->add_option("--classes", arguments->model.num_classes, "Number of classes")->capture_default_str();
  command->add_option("--channels", arguments->model.in_channels, "1 for gray images, 3 for colour")
      ->capture_default_str();
  command->add_option("--image-size", arguments->model.image_size, "Height and width in pixels")
      ->capture_default_str();
  command->add_option("--width", arguments->model.width, "Factor on the number of channels")
      ->capture_default_str();
  command->add_option("--pools", arguments->model.pools, "VGG: how many of the five pools are kept")
      ->capture_default_str();
  command->add_option("--head", arguments->model.head, "VGG: default or linear")->capture_default_str();
  command->add_option("--batch-size", arguments->batch_size, "Images in the batch")->capture_default_str();
  repeatable(command->add_option("--load", arguments->plugins, "A shared library with models of yours"),
             "FILE");
  command->footer("Example:\n  cohort summary vgg16_bn --classes 10 --image-size 64");
  command->callback(
      [arguments, &context] { context.action = [arguments] { return summary_command(*arguments); }; });
}

}  // namespace cohort::cli
