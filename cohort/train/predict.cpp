// How an image becomes an input is a small task of its own, which a program file carries as JSON beside the
// model. So the file alone is enough to predict. That text is parsed with bounds, as a file may hold
// anything. Every batch has the same size, since a program takes no other; a short batch is filled with its
// first image. Samples of a data set are read by a loader whose sampler lists them.
#include "cohort/train/predict.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/container/any.h>

#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "cohort/base/error.h"
#include "cohort/base/text/bounded_json.h"
#include "cohort/checkpoint/state_dict.h"
#include "cohort/data/file_bytes.h"
#include "cohort/data/sampler.h"
#include "cohort/optim/autocast.h"
#include "cohort/script/script.h"
#include "cohort/train/batch_plan.h"
#include "cohort/train/classes.h"
#include "cohort/train/internal/config_choices.h"
#include "cohort/train/internal/factories.h"
#include "cohort/train/internal/json_text.h"

namespace cohort::train {
namespace fs = std::filesystem;
namespace {

using nlohmann::json;

constexpr const char* kWherePredict = "train.predict";
// The name of the format's first version; files that were exported then are still read.
constexpr const char* kTaskKey = "picture_task";  // in the metadata of a program

ImageTask task_of(const config::DataConfig& config, const DatasetSetup& setup,
                  std::optional<std::vector<std::string>> classes) {
  if (!data::is_own_dataset(config.type)) {
    throw UsageError(kWherePredict,
                     base::concat("data.type is ", config.type,
                                  ", which a library registered: how it makes an input of an image's file is "
                                  "not known here"),
                     "--samples 0,1,2, which reads validation data through it (train::predict_samples)");
  }
  // A bare .safetensors file says nothing of classes. The validation data then has to be there.
  if (!classes) classes = make_dataset(config, Split::kVal, setup)->classes();
  ImageTask task{.color = color_of(config),
                 .image_size = config.image_size,
                 .channels_last = setup.channels_last,
                 .classes = std::move(*classes)};
  for (const config::TransformConfig& transform : val_transforms(config)) {
    // Those of validation: nothing random, and what the model's accuracy was measured with.
    task.transforms.push_back({transform.name, transform.args});
  }
  return task;
}

json names_to_json(const std::vector<std::string>& names) {
  json list = json::array();
  for (const std::string& name : names) list.push_back(text_to_json(name));
  return list;
}

constexpr const char* kGrayInFiles = "grey";  // the spelling of the format's first version

std::string to_text(const ImageTask& task) {
  json transforms = json::array();
  for (const data::TransformSpec& spec : task.transforms) {
    transforms.push_back({{"name", spec.name}, {"args", spec.args}});
  }
  return json{{"transforms", std::move(transforms)},
              {"color", task.color == data::ColorMode::kGray ? kGrayInFiles : "rgb"},
              {"image_size", task.image_size},
              {"channels_last", task.channels_last},
              {"classes", names_to_json(task.classes)}}
      .dump();
}

ImageTask task_from(const std::string& text, const fs::path& file) {
  try {
    const json from = base::parse_bounded_json(text).value_or(json());
    ImageTask task{.color = from.at("color") == kGrayInFiles ? data::ColorMode::kGray : data::ColorMode::kRgb,
                   .image_size = from.at("image_size").get<std::int64_t>(),
                   .channels_last = from.at("channels_last").get<bool>(),
                   .classes = {}};
    for (const json& name : from.at("classes")) task.classes.push_back(text_from_json(name));
    for (const json& each : from.at("transforms")) {
      task.transforms.push_back({each.at("name").get<std::string>(),
                                 each.at("args").get<std::map<std::string, std::vector<double>>>()});
    }
    return task;
  } catch (const json::exception& error) {
    throw DataError(kWherePredict, base::concat(file.string(),
                                                ": what it says about images cannot be "
                                                "read: ",
                                                error.what()));
  }
}

/// On the CPU, in evaluation mode, with the parameters `weights` in place of model.weights.
torch::nn::AnyModule make_trained_model(config::ModelConfig config, const ModelSetup& setup,
                                        const checkpoint::TensorMap& weights) {
  // All values come from the checkpoint; the file that a run once started from may be gone.
  config.weights.clear();
  torch::nn::AnyModule model = make_model(config, setup);
  checkpoint::load_module_state(*model.ptr(), weights);
  model.ptr()->eval();
  return model;
}

Predictor::Model call_of(torch::nn::AnyModule model, const config::TrainConfig& train) {
  return [model = std::move(model), bf16 = is_bf16(train)](const at::Tensor& images) mutable {
    std::optional<optim::Autocast> narrow;
    // As the run computed, so that predictions are those of its evaluation.
    if (bf16) narrow.emplace(at::kCPU, at::kBFloat16);
    return model.forward<at::Tensor>(images);
  };
}

void check_batch_size(std::int64_t batch_size) {
  if (batch_size >= 1) return;
  throw UsageError(kWherePredict, base::concat("batch_size: got ", batch_size, ", expected at least 1"));
}

void check_top(std::int64_t top) {
  if (top < 1) throw UsageError(kWherePredict, base::concat("top: got ", top, ", expected at least 1"));
}

// `probabilities`: of each class, [classes].
Prediction prediction_of(std::string path, const at::Tensor& probabilities,
                         const std::vector<std::string>& names, std::int64_t top) {
  const auto [values, places] = probabilities.topk(std::min(top, probabilities.size(0)), 0);
  Prediction prediction{std::move(path), {}};
  for (std::int64_t k = 0; k < values.size(0); ++k) {
    const auto place = places[k].item<std::int64_t>();
    // A data set need not have names of classes.
    const bool is_named = place < static_cast<std::int64_t>(names.size());
    prediction.classes.emplace_back(is_named ? names[static_cast<std::size_t>(place)] : std::to_string(place),
                                    values[k].item<double>());
  }
  return prediction;
}

/// Samples in the order in which somebody asks for them.
class Listed : public data::Sampler {
 public:
  explicit Listed(std::vector<std::int64_t> samples) : samples_(std::move(samples)) {}
  std::int64_t size() const override { return static_cast<std::int64_t>(samples_.size()); }
  std::vector<std::int64_t> order(std::int64_t) const override { return samples_; }

 private:
  std::vector<std::int64_t> samples_;
};

}  // namespace

Predictor::Predictor(const ImageTask& task, Model model, std::int64_t batch_size)
    : pipeline_(task.transforms, task.color),
      model_(std::move(model)),
      batch_size_(batch_size),
      channels_last_(task.channels_last),
      classes_(task.classes) {
  check_batch_size(batch_size);
  if (!pipeline_.has_output_shape()) {
    // No transform fixes the size, so all images must have the size of those that the model was built for.
    pipeline_.set_input_size({task.image_size, task.image_size});
  }
}

Predictor Predictor::of_run(const config::Config& config, const fs::path& checkpoint,
                            std::int64_t batch_size) {
  return of_run(config, read_trained_weights(checkpoint), batch_size);
}

Predictor Predictor::of_run(const config::Config& config, const TrainedWeights& trained,
                            std::int64_t batch_size) {
  const ImageTask task =
      task_of(config.data, dataset_setup(config.model, config.train, config.run.seed), trained.classes);
  const ModelSetup setup{.input = image_field(config.data, task.channels_last),
                         .num_classes = static_cast<std::int64_t>(task.classes.size()),
                         .seed = config.run.seed,
                         .channels_last = task.channels_last};
  return {task, call_of(make_trained_model(config.model, setup, trained.tensors), config.train), batch_size};
}

Predictor Predictor::of_program(const fs::path& file) {
  const script::LoadedProgram program = script::load(file);
  const auto text = program.metadata().find(kTaskKey);
  const auto inputs = program.inputs();
  // Any program can be loaded; only one that export wrote says how an image becomes its input.
  if (text == program.metadata().end() || inputs.front().size() != 1 ||
      inputs.front().front().sizes.empty()) {
    throw DataError(kWherePredict,
                    base::concat(file.string(), " does not say how an image becomes an input of it"),
                    "a file that `cohort export` wrote");
  }
  return {task_from(text->second, file),
          [program](const at::Tensor& images) { return program(images).front(); },
          inputs.front().front().sizes.front()};
}

at::Tensor Predictor::empty_batch() const {
  const data::ImageShape shape = pipeline_.output_shape();
  return at::empty(
      {batch_size_, shape[0], shape[1], shape[2]},
      at::TensorOptions(at::kFloat)
          .memory_format(channels_last_ ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous));
}

std::vector<Prediction> Predictor::operator()(const std::vector<std::string>& image_files,
                                              std::int64_t top) const {
  check_top(top);
  const at::NoGradGuard no_grad;
  const auto layout = channels_last_ ? data::Layout::kChannelsLast : data::Layout::kChannelsFirst;
  std::vector<std::byte> bytes;
  std::vector<Prediction> predictions;
  const auto count = static_cast<std::int64_t>(image_files.size());
  for (std::int64_t first = 0; first < count; first += batch_size_) {
    at::Tensor images = empty_batch();
    const std::int64_t size = images.numel() / batch_size_, end = std::min(count, first + batch_size_);
    for (std::int64_t i = first; i < end; ++i) {
      const std::string& path = image_files[static_cast<std::size_t>(i)];
      // Fixed, so that a random transform of a user's gives the same image each time.
      base::RandomStream random(0, 0, static_cast<std::uint64_t>(i), base::Purpose::kTransform);
      pipeline_.run_encoded(data::read_file_bytes(path, bytes), path, random,
                            images.mutable_data_ptr<float>() + (i - first) * size, layout);
    }
    // In evaluation mode a sample's result does not depend on its neighbours, so any filling will do.
    if (end - first < batch_size_) images.slice(0, end - first).copy_(images.slice(0, 0, 1));
    const at::Tensor probabilities = model_(images).to(at::kFloat).softmax(1);
    for (std::int64_t i = first; i < end; ++i) {
      predictions.push_back(
          prediction_of(image_files[static_cast<std::size_t>(i)], probabilities[i - first], classes_, top));
    }
  }
  return predictions;
}

std::vector<Prediction> predict_samples(const config::Config& config, const fs::path& checkpoint,
                                        const std::vector<std::int64_t>& samples, std::int64_t top) {
  check_top(top);
  return predict_samples(config, read_trained_weights(checkpoint), samples, top);
}

std::vector<Prediction> predict_samples(const config::Config& config, const TrainedWeights& trained,
                                        const std::vector<std::int64_t>& samples, std::int64_t top) {
  check_top(top);
  const DatasetSetup datasets = dataset_setup(config.model, config.train, config.run.seed);
  const std::shared_ptr<const data::Dataset> dataset = make_dataset(config.data, Split::kVal, datasets);
  for (const std::int64_t sample : samples) {
    if (sample >= 0 && sample < dataset->size()) continue;
    throw UsageError(kWherePredict, base::concat("samples: got ", sample, ", the validation data has ",
                                                 dataset->size(), " samples: 0 to ", dataset->size() - 1));
  }
  const std::vector<std::string> classes = trained.classes.value_or(dataset->classes());
  const ModelSetup setup{.input = input_field(config.data, datasets.channels_last, *dataset),
                         .num_classes = static_cast<std::int64_t>(classes.size()),
                         .seed = config.run.seed,
                         .channels_last = datasets.channels_last};
  // The model is made after the data was found, as it may take long.
  const Predictor::Model model =
      call_of(make_trained_model(config.model, setup, trained.tensors), config.train);
  // Of no BatchPlan: that needs the run's model runner, whose library may not be loaded here.
  data::Loader loader(dataset, {.batch_size = global_evaluation_size(config.train, /*num_ranks=*/1),
                                .seed = static_cast<std::uint64_t>(config.run.seed),
                                .sampler = std::make_shared<Listed>(samples)});
  const at::NoGradGuard no_grad;
  std::vector<Prediction> predictions;
  while (auto batch = loader.next()) {
    const at::Tensor probabilities = model(batch->input()).to(at::kFloat).softmax(1);
    for (std::int64_t i = 0; i < batch->size; ++i) {
      const std::int64_t index = batch->indices[static_cast<std::size_t>(i)];
      predictions.push_back(prediction_of(dataset->describe(index), probabilities[i], classes, top));
    }
  }
  return predictions;
}

void export_program(const config::Config& config, const fs::path& checkpoint, std::int64_t batch_size,
                    const fs::path& file) {
  export_program(config, read_trained_weights(checkpoint), batch_size, file);
}

void export_program(const config::Config& config, const TrainedWeights& trained, std::int64_t batch_size,
                    const fs::path& file) {
  std::map<std::string, std::string> metadata;
  const DatasetSetup datasets = dataset_setup(config.model, config.train, config.run.seed);
  data::Field input = image_field(config.data, datasets.channels_last);
  std::size_t num_classes = 0;
  at::Tensor example;
  if (data::is_own_dataset(config.data.type)) {
    const ImageTask task = task_of(config.data, datasets, trained.classes);
    num_classes = task.classes.size();
    example = Predictor(task, nullptr, batch_size).empty_batch().zero_();
    metadata[kTaskKey] = to_text(task);
  } else {
    check_batch_size(batch_size);
    const auto dataset = make_dataset(config.data, Split::kVal, datasets);
    const std::vector<std::string> classes = trained.classes.value_or(dataset->classes());
    num_classes = classes.size();
    input = input_field(config.data, datasets.channels_last, *dataset);
    example = zero_batch(input, batch_size);
    metadata["classes"] = names_to_json(classes).dump();
  }
  const ModelSetup setup{.input = input,
                         .num_classes = static_cast<std::int64_t>(num_classes),
                         .seed = config.run.seed,
                         .channels_last = datasets.channels_last};
  const torch::nn::AnyModule model = make_trained_model(config.model, setup, trained.tensors);
  // Autocast is inside of the function, so its casts become part of the program.
  auto fast = script::script(call_of(model, config.train),
                             script::ScriptOptions().name(config.model.name).modules({model.ptr()}));
  const at::NoGradGuard no_grad;
  for (int i = 0; i < 3; ++i) fast(example);  // what is made lazily takes a third
  fast.save(file, metadata);
}

}  // namespace cohort::train
