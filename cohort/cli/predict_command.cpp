// Two commands that use a trained model without training data. `predict` runs a checkpoint of a run, or a
// program that `export` wrote. The model is found, loaded and read inside TrainedModel::use(), which tries
// again where a run that still trains removes the checkpoint meanwhile.
#include <cstdio>
#include <memory>

#include "cohort/base/error.h"
#include "cohort/base/load_plugin.h"
#include "cohort/cli/internal/commands.h"
#include "cohort/cli/internal/trained_model.h"
#include "cohort/data/dataset.h"
#include "cohort/train/predict.h"

namespace cohort::cli {
namespace {

struct PredictArguments {
  TrainedModel model;
  std::string program;
  std::vector<std::string> images;
  std::vector<std::int64_t> samples;
  std::int64_t top = 3;
};

std::vector<train::Prediction> predictions_of(PredictArguments& arguments) {
  if (arguments.images.empty() && arguments.samples.empty()) {
    throw UsageError("cli.predict", "there is nothing to predict", "image files, or --samples 0,1,2");
  }
  // A program needs no configuration, so TrainedModel takes no part. Plug-ins may still hold its operators.
  if (!arguments.program.empty()) {
    for (const std::string& plugin : arguments.model.plugins) base::load_plugin(plugin);
    return train::Predictor::of_program(arguments.program)(arguments.images, arguments.top);
  }
  std::vector<train::Prediction> predictions;
  arguments.model.use("cli.predict", [&](const config::Config& config, const train::TrainedWeights& trained) {
    predictions = arguments.samples.empty()
                      ? train::Predictor::of_run(config, trained)(arguments.images, arguments.top)
                      : train::predict_samples(config, trained, arguments.samples, arguments.top);
  });
  return predictions;
}

int predict_command(PredictArguments arguments) {
  // All are computed before the first is printed: output is whole, or an error.
  for (const train::Prediction& prediction : predictions_of(arguments)) {
    std::printf("%s", prediction.path.c_str());
    for (const auto& [name, probability] : prediction.classes)
      std::printf("\t%s %.4f", name.c_str(), probability);
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
  bool takes_images = false;
  arguments.model.use("cli.export", [&](const config::Config& config, const train::TrainedWeights& trained) {
    train::export_program(config, trained, arguments.batch_size, arguments.file);
    // Only Cohort's own data sets say how an image file becomes an input, so only such a program takes image
    // files.
    takes_images = data::is_own_dataset(config.data.type);
  });
  std::printf("%s: for %ld %s at a time; %s\n", arguments.file.c_str(),
              static_cast<long>(arguments.batch_size), takes_images ? "images" : "samples",
              takes_images ? base::concat("cohort predict --program ", arguments.file, " IMAGE...").c_str()
                           : "it takes inputs as the data set makes them: script::load() in a program");
  return 0;
}

}  // namespace

void add_predict(CLI::App& app, Context& context) {
  auto arguments = std::make_shared<PredictArguments>();
  CLI::App* command = app.add_subcommand("predict", "Say what is in images");
  arguments->model.add_options(*command);
  // A program carries its own weights and shapes. Settings of a run beside it would have no effect.
  command->add_option("-p,--program", arguments->program, "A file of `cohort export`, in place of a run")
      ->excludes("--run", "--config", "--checkpoint");
  repeatable(
      command->add_option("--set", arguments->model.overrides, "Changes one setting of the configuration"),
      "KEY=VALUE")
      ->excludes("--program");
  command->add_option("--top", arguments->top, "How many classes are shown")->capture_default_str();
  CLI::Option* samples =
      command
          ->add_option("--samples", arguments->samples,
                       "Samples of the validation data, by number (0,5,7), read through the run's data set")
          ->delimiter(',')
          ->excludes("--program");
  command->add_option("images", arguments->images, "JPEG or PNG files")->excludes(samples);
  command->footer(
      "Prints a line for each image: its path, and classes with probabilities, tabs between.\nExample:\n"
      "  cohort predict --run runs/fashion-vgg-20260101-120000 shoe.jpg\n"
      "  cohort predict --run runs/fashion-vgg-20260101-120000 --samples 0,1,2\n"
      "  cohort predict --program fashion.program shoe.jpg");
  command->callback(
      [arguments, &context] { context.action = [arguments] { return predict_command(*arguments); }; });
}

void add_export(CLI::App& app, Context& context) {
  auto arguments = std::make_shared<ExportArguments>();
  CLI::App* command =
      app.add_subcommand("export", "Write a trained model to a file that runs without its code");
  arguments->model.add_options(*command);
  command->add_option("--batch-size", arguments->batch_size, "Images that it computes at a time")
      ->capture_default_str();
  command->add_option("file", arguments->file, "The file, model.program")->required();
  command->add_option("overrides", arguments->model.overrides, "key=value of the configuration");
  command->footer("Example:\n  cohort export --run runs/fashion-vgg-20260101-120000 fashion.program");
  command->callback(
      [arguments, &context] { context.action = [arguments] { return export_command(*arguments); }; });
}

}  // namespace cohort::cli
