#include "cohort/train/predict.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/container/any.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "cohort/checkpoint/bounded_json.h"
#include "cohort/core/error.h"
#include "cohort/data/file_bytes.h"
#include "cohort/optim/autocast.h"
#include "cohort/script/script.h"
#include "cohort/train/build.h"
#include "cohort/train/classes.h"
#include "cohort/train/json_text.h"

namespace cohort::train {
namespace fs = std::filesystem;
namespace {

using nlohmann::json;

constexpr const char* kTaskKey = "picture_task";  // in the metadata of a program

PictureTask task_of(const Config& config, const fs::path& checkpoint) {
  std::vector<std::string> classes = trained_classes(checkpoint);
  if (classes.empty()) classes = make_dataset(config, Split::kVal)->classes();
  PictureTask task{.color = config.data.color == "grey" ? data::ColorMode::kGrey : data::ColorMode::kRgb,
                   .image_size = config.data.image_size,
                   .channels_last = config.train.memory_format == "channels_last",
                   .classes = std::move(classes)};
  for (const TransformConfig& transform : val_transforms(config.data)) {
    task.transforms.push_back({transform.name, transform.args});
  }
  return task;
}

std::string to_text(const PictureTask& task) {
  json transforms = json::array(), classes = json::array();
  for (const std::string& name : task.classes) classes.push_back(text_to_json(name));
  for (const data::TransformSpec& spec : task.transforms) {
    transforms.push_back({{"name", spec.name}, {"args", spec.args}});
  }
  return json{{"transforms", std::move(transforms)},
              {"color", task.color == data::ColorMode::kGrey ? "grey" : "rgb"},
              {"image_size", task.image_size},
              {"channels_last", task.channels_last},
              {"classes", std::move(classes)}}
      .dump();
}

PictureTask task_from(const std::string& text, const fs::path& file) {
  try {
    const json from = checkpoint::parse_bounded_json(text).value_or(json());
    PictureTask task{.color = from.at("color") == "grey" ? data::ColorMode::kGrey : data::ColorMode::kRgb,
                     .image_size = from.at("image_size").get<std::int64_t>(),
                     .channels_last = from.at("channels_last").get<bool>()};
    for (const json& name : from.at("classes")) task.classes.push_back(text_from_json(name));
    for (const json& each : from.at("transforms")) {
      task.transforms.push_back({each.at("name").get<std::string>(),
                                 each.at("args").get<std::map<std::string, std::vector<double>>>()});
    }
    return task;
  } catch (const json::exception& error) {
    throw DataError("train.predict", core::concat(file.string(),
                                                  ": what it says about pictures cannot be "
                                                  "read: ",
                                                  error.what()));
  }
}

torch::nn::AnyModule load_model(Config config, const fs::path& checkpoint, std::size_t num_classes) {
  config.model.weights = fs::weakly_canonical(checkpoint).string();
  torch::nn::AnyModule model = make_model(config, static_cast<std::int64_t>(num_classes), at::kCPU);
  model.ptr()->eval();
  return model;
}

Predictor::Model call_of(const Config& config, torch::nn::AnyModule model) {
  return
      [model = std::move(model), bf16 = config.train.precision == "bf16"](const at::Tensor& images) mutable {
        std::optional<optim::Autocast> narrow;
        if (bf16) narrow.emplace(at::kCPU, at::kBFloat16);
        return model.forward<at::Tensor>(images);
      };
}

}  // namespace

Predictor::Predictor(const PictureTask& task, Model model, std::int64_t batch_size)
    : pipeline_(task.transforms, task.color),
      model_(std::move(model)),
      batch_size_(batch_size),
      channels_last_(task.channels_last),
      classes_(task.classes) {
  if (batch_size < 1) {
    throw UsageError("train.predict", core::concat("batch_size: got ", batch_size, ", expected at least 1"));
  }
  if (!pipeline_.has_output_shape()) {
    pipeline_.set_input_size({task.image_size, task.image_size});
  }
}

Predictor Predictor::of_run(const Config& config, const fs::path& checkpoint, std::int64_t batch_size) {
  const PictureTask task = task_of(config, checkpoint);
  return {task, call_of(config, load_model(config, checkpoint, task.classes.size())), batch_size};
}

Predictor Predictor::of_program(const fs::path& file) {
  const script::LoadedProgram program = script::load(file);
  const auto text = program.metadata().find(kTaskKey);
  const auto inputs = program.inputs();
  if (text == program.metadata().end() || inputs.front().size() != 1 ||
      inputs.front().front().sizes.empty()) {
    throw DataError("train.predict",
                    core::concat(file.string(), " does not say how a picture becomes an input of it"),
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

std::vector<Prediction> Predictor::operator()(const std::vector<std::string>& pictures,
                                              std::int64_t top) const {
  if (top < 1) throw UsageError("train.predict", core::concat("top: got ", top, ", expected at least 1"));
  const at::NoGradGuard no_grad;
  const auto layout = channels_last_ ? data::Layout::kChannelsLast : data::Layout::kChannelsFirst;
  std::vector<std::byte> bytes;
  std::vector<Prediction> predictions;
  const auto count = static_cast<std::int64_t>(pictures.size());
  for (std::int64_t first = 0; first < count; first += batch_size_) {
    at::Tensor images = empty_batch();
    const std::int64_t size = images.numel() / batch_size_, end = std::min(count, first + batch_size_);
    for (std::int64_t i = first; i < end; ++i) {
      const std::string& path = pictures[static_cast<std::size_t>(i)];
      core::RandomStream random(0, 0, static_cast<std::uint64_t>(i), core::Purpose::kTransform);
      pipeline_.run_encoded(data::read_file_bytes(path, bytes), path, random,
                            images.mutable_data_ptr<float>() + (i - first) * size, layout);
    }
    if (end - first < batch_size_) images.slice(0, end - first).copy_(images.slice(0, 0, 1));
    const at::Tensor logits = model_(images).to(at::kFloat);
    const auto [values, places] = logits.softmax(1).topk(std::min(top, logits.size(1)), 1);
    for (std::int64_t i = first; i < end; ++i) {
      predictions.push_back({pictures[static_cast<std::size_t>(i)], {}});
      Prediction& one = predictions.back();
      for (std::int64_t k = 0; k < values.size(1); ++k) {
        const auto place = places[i - first][k].item<std::int64_t>();
        const bool is_named = place < static_cast<std::int64_t>(classes_.size());
        one.classes.emplace_back(is_named ? classes_[static_cast<std::size_t>(place)] : std::to_string(place),
                                 values[i - first][k].item<double>());
      }
    }
  }
  return predictions;
}

void export_program(const Config& config, const fs::path& checkpoint, std::int64_t batch_size,
                    const fs::path& file) {
  const PictureTask task = task_of(config, checkpoint);
  const torch::nn::AnyModule model = load_model(config, checkpoint, task.classes.size());
  const Predictor::Model call = call_of(config, model);
  const at::Tensor example = Predictor(task, call, batch_size).empty_batch().zero_();
  auto fast = script::script(call, script::ScriptOptions().name(config.model.name).modules({model.ptr()}));
  const at::NoGradGuard no_grad;
  for (int i = 0; i < 3; ++i) fast(example);  // what is made lazily takes a third
  fast.save(file, {{kTaskKey, to_text(task)}});
}

}  // namespace cohort::train
