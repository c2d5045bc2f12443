#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cohort/config/config.h"
#include "cohort/data/transforms/transform_pipeline.h"
#include "cohort/train/classes.h"

/// From images and samples to classes: what `cohort predict` and `cohort export` do, for a program of one's
/// own.
namespace cohort::train {

/// How an image becomes an input, and what the outputs are called.
struct ImageTask {
  std::vector<data::TransformSpec> transforms = {};  ///< run on each image, in order
  data::ColorMode color = data::ColorMode::kRgb;     ///< what images are decoded to
  std::int64_t image_size = 0;            ///< of the images themselves, where no transform fixes it
  bool channels_last = false;             ///< whether inputs are laid out NHWC
  std::vector<std::string> classes = {};  ///< in the order of the outputs; empty: they are numbered
};

/// The classes of an image, or of a sample, with their probabilities, the most probable first.
struct Prediction {
  std::string path;  ///< of the image; of a sample what its data set calls it: Dataset::describe()
  std::vector<std::pair<std::string, double>> classes;  ///< names, and probabilities from 0 to 1
};

/// A classifier of image files, on the CPU, in evaluation mode. Threads: one caller at a time.
class Predictor {
 public:
  /// Logits [N, classes] of images [N, C, H, W].
  using Model = std::function<at::Tensor(const at::Tensor& images)>;

  /// `batch_size` images are given to `model` at a time, also where fewer are left: the first of them then
  /// fills the batch.
  Predictor(const ImageTask& task, Model model, std::int64_t batch_size);

  /// The model of a run, with the parameters of `checkpoint` (a folder, or a safetensors file), the
  /// transforms of its evaluation and the classes that `checkpoint` names. One that names none (a file alone,
  /// or of an older version) takes those of the validation data, which must be there then. Throws:
  /// ConfigError, DataError; UsageError for a data set that a library registered, as how that makes an input
  /// of a file is not known here: predict_samples() asks it.
  static Predictor of_run(const config::Config& config, const std::filesystem::path& checkpoint,
                          std::int64_t batch_size = 1);
  /// The same of a checkpoint that was read.
  static Predictor of_run(const config::Config& config, const TrainedWeights& trained,
                          std::int64_t batch_size = 1);
  /// The model that export_program() wrote to `file`; nothing else is needed but the libraries with operators
  /// and transforms of one's own. Throws: DataError.
  static Predictor of_program(const std::filesystem::path& file);

  /// Returns the `top` most probable classes of each image, or all where there are fewer.
  /// Throws: DataError naming the file that cannot be read.
  std::vector<Prediction> operator()(const std::vector<std::string>& image_files, std::int64_t top) const;

  /// The shape of the batch that the model is given.
  at::Tensor empty_batch() const;

 private:
  data::TransformPipeline pipeline_;
  Model model_;
  std::int64_t batch_size_;
  bool channels_last_;
  std::vector<std::string> classes_;
};

/// Returns the `top` most probable classes of `samples` of the run's validation data, read through its data
/// set, whatever that is. Throws: as Predictor::of_run(), of any data set; UsageError for an index that is
/// not in the data.
std::vector<Prediction> predict_samples(const config::Config& config, const std::filesystem::path& checkpoint,
                                        const std::vector<std::int64_t>& samples, std::int64_t top);
/// The same of a checkpoint that was read.
std::vector<Prediction> predict_samples(const config::Config& config, const TrainedWeights& trained,
                                        const std::vector<std::int64_t>& samples, std::int64_t top);

/// Writes what Predictor::of_run() would compute to `file`, as a program for `batch_size` images
/// (docs/guide/script.md, "Program files"). Where a library registered the data set, the program takes inputs
/// of its first field, and nothing in the file says how an image becomes one. Throws: ConfigError, DataError;
/// UsageError where script mode cannot record the model.
void export_program(const config::Config& config, const std::filesystem::path& checkpoint,
                    std::int64_t batch_size, const std::filesystem::path& file);
/// The same of a checkpoint that was read.
void export_program(const config::Config& config, const TrainedWeights& trained, std::int64_t batch_size,
                    const std::filesystem::path& file);

}  // namespace cohort::train
