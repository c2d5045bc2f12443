#include <cstdio>
#include <memory>

#include "cohort/cli/commands.h"
#include "cohort/cli/trained_model.h"
#include "cohort/core/error.h"
#include "cohort/train/predict.h"
#include "cohort/train/run.h"

namespace cohort::cli {
namespace {

struct PredictArguments {
  TrainedModel model;
  std::string program;
  std::vector<std::string> pictures;
  std::int64_t top = 3;
};

train::Predictor predictor_of(PredictArguments& arguments) {
  if (arguments.program.empty()) {
    const train::Config config = arguments.model.load("cli.predict");
    return train::Predictor::of_run(config, arguments.model.checkpoint);
  }
  for (const std::string& plugin : arguments.model.plugins) train::load_plugin(plugin);
  return train::Predictor::of_program(arguments.program);
}

int predict_command(PredictArguments arguments) {
  const train::Predictor predictor = predictor_of(arguments);
  for (const train::Prediction& one : predictor(arguments.pictures, arguments.top)) {
    std::printf("%s", one.path.c_str());
    for (const auto& [name, probability] : one.classes) std::printf("\t%s %.4f", name.c_str(), probability);
    std::printf("\n");
  }
  return 0;
}

struct ExportArguments {
  TrainedModel model;
  std::int64_t batch_size = 1;
  std::string file;
};

int export_command(ExportArguments arguments) {
  const train::Config config = arguments.model.load("cli.export");
  train::export_program(config, arguments.model.checkpoint, arguments.batch_size, arguments.file);
  std::printf("%s: for %ld pictures at a time; cohort predict --program %s IMAGE...\n",
              arguments.file.c_str(), static_cast<long>(arguments.batch_size), arguments.file.c_str());
  return 0;
}

}  // namespace

void add_predict(CLI::App& app, Context& context) {
  auto arguments = std::make_shared<PredictArguments>();
  CLI::App* command = app.add_subcommand("predict", "Say what is in pictures");
  arguments->model.add_options(*command);
  command->add_option("-p,--program", arguments->program, "A file of `cohort export`, in place of a run")
      ->excludes("--run", "--config", "--checkpoint");
  repeatable(
      command->add_option("--set", arguments->model.overrides, "Changes one setting of the configuration"),
      "KEY=VALUE")
      ->excludes("--program");
  command->add_option("--top", arguments->top, "How many classes are shown")->capture_default_str();
  command->add_option("images", arguments->pictures, "JPEG or PNG files")->required();
  command->footer(
      "Prints a line for each picture: its path, and classes with probabilities, tabs between.\nExample:\n"
      "  cohort predict --run runs/fashion-vgg-20260101-120000 shoe.jpg\n"
      "  cohort predict --program fashion.program shoe.jpg");
  command->callback(
      [arguments, &context] { context.action = [arguments] { return predict_command(*arguments); }; });
}

void add_export(CLI::App& app, Context& context) {
  auto arguments = std::make_shared<ExportArguments>();
  CLI::App* command =
      app.add_subcommand("export", "Write a trained model to a file that runs without its code");
  arguments->model.add_options(*command);
  command->add_option("--batch-size", arguments->batch_size, "Pictures that it computes at a time")
      ->capture_default_str();
  command->add_option("file", arguments->file, "The file, model.program")->required();
  command->add_option("overrides", arguments->model.overrides, "key=value of the configuration");
  command->footer("Example:\n  cohort export --run runs/fashion-vgg-20260101-120000 fashion.program");
  command->callback(
      [arguments, &context] { context.action = [arguments] { return export_command(*arguments); }; });
}

}  // namespace cohort::cli
