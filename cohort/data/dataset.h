#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "cohort/base/random.h"
#include "cohort/base/registry.h"
#include "cohort/base/text/named_options.h"

/// Datasets: a number of samples, each of which can be read by its index, from any thread.
///
/// Most users derive from ExampleDataset and write two functions that speak of tensors. Dataset itself writes
/// a sample straight into the batch's memory, without a tensor per sample.
namespace cohort::data {

/// One tensor of a sample: `shape` is the sample's, without the batch dimension.
struct Field {
  std::string name;  ///< for messages and tables: "image", "label"
  at::ScalarType dtype = at::kFloat;
  std::vector<std::int64_t> shape;
  /// The batch is laid out NHWC; `shape` stays {C, H, W}, the sample's memory is H x W x C.
  bool channels_last = false;

  /// Numbers in one sample.
  std::int64_t numel() const;
  /// Bytes of one sample.
  std::int64_t bytes() const;
};

/// Samples 0 .. size() - 1.
/// Threads: `read` and `describe` are called from many threads at once.
class Dataset {
 public:
  virtual ~Dataset() = default;

  /// How many samples there are; the same at every call.
  virtual std::int64_t size() const = 0;
  /// What a sample consists of; by convention the input first, then the target.
  virtual std::vector<Field> fields() const = 0;
  /// Writes sample `index`, one field to each of `out` (fields()[i].bytes() bytes at out[i]). All chance
  /// comes from `random`, so that the sample does not depend on the thread that reads it. Throws: whatever
  /// makes the sample unreadable; the loader adds `describe(index)` to it. Ours throw UsageError for an index
  /// that is not in 0 .. size() - 1.
  virtual void read(std::int64_t index, base::RandomStream& random,
                    std::span<std::byte* const> out) const = 0;
  /// Names the sample for a person: its file, if it has one.
  virtual std::string describe(std::int64_t index) const;
  /// Names of the classes, by label; empty if the dataset does not know.
  virtual std::vector<std::string> classes() const { return {}; }
  /// A text that is another one when the samples are others, wherever they lie; empty if the dataset does not
  /// know.
  virtual std::string fingerprint() const { return ""; }
};

/// A dataset that returns tensors: override `size` and `get`.
///
///     class Squares : public cohort::data::ExampleDataset {
///      public:
///       std::int64_t size() const override { return 1000; }
///       std::vector<at::Tensor> get(std::int64_t i, cohort::base::RandomStream&) const override {
///         return {at::full({1}, float(i)), at::full({1}, float(i * i))};
///       }
///     };
///
/// Every sample has the shapes and types of the first that can be read; `get` may return a scalar tensor for
/// a label. Tensors are on the CPU: the loader brings whole batches to LoaderOptions::device.
class ExampleDataset : public Dataset {
 public:
  /// Returns the tensors of sample `index`, in the same order for each. Draws only from `random`, so that a
  /// sample does not hang on the thread or the worker that reads it. Threads: called from many at once.
  /// Whatever it throws makes the sample one that cannot be read.
  virtual std::vector<at::Tensor> get(std::int64_t index, base::RandomStream& random) const = 0;

  /// Throws: what `get` threw for sample 0, where none of the first hundred samples can be read; UsageError
  /// for an empty dataset, and for a tensor that is not on the CPU.
  std::vector<Field> fields() const final;
  void read(std::int64_t index, base::RandomStream& random, std::span<std::byte* const> out) const final;

 private:
  void learn_fields() const;

  mutable std::once_flag learnt_;
  mutable std::vector<Field> fields_;
  mutable std::int64_t fields_from_ = 0;  // the sample that fields_ describes
};

/// Arguments of a dataset that is made by name: `split` (train or val), `path`, which is that split's, and
/// the options of the configuration (data.options), which the factory reads: `args.integer("width", 8)`,
/// `args.at("path")`. make_dataset rejects those that it does not read.
using DatasetArgs = base::NamedOptions;
/// Makes a data set of a configuration.
using DatasetFactory = std::function<std::shared_ptr<const Dataset>(const DatasetArgs&)>;

/// Makes `name` known to make_dataset. Throws: UsageError if the name is taken; Cohort's own are.
void register_dataset(const std::string& name, DatasetFactory factory);

/// Throws: UsageError naming the nearest and all that exist if `name` is none of them, for a name that two
/// libraries registered, and for Cohort's own (idx, image_folder, synthetic), which are made from options;
/// ConfigError naming an option that the factory did not ask for; what the factory throws, with the name of
/// the dataset and its split in front: a DataError where it is none of Cohort's errors.
std::shared_ptr<const Dataset> make_dataset(const std::string& name, const DatasetArgs& args);

/// Throws: UsageError if two libraries registered `name`, or one registered a name of Cohort's own.
void check_dataset_name(const std::string& name);

/// True for the kinds that Cohort brings (idx, image_folder, synthetic), whose samples are made as the keys
/// of a configuration say; false for what a library registered.
bool is_own_dataset(const std::string& name);

/// Names of all datasets, sorted.
std::vector<std::string> dataset_names();

/// What COHORT_REGISTER_DATASET calls while a library loads, when nothing can catch: a name that is taken
/// stays with the first, and make_dataset(name) throws, naming both places.
bool register_dataset_at_load(const char* name, DatasetFactory factory, const char* file, int line) noexcept;

}  // namespace cohort::data

/// Registers a dataset when the program, or a shared library given to `--load`, is loaded:
///
///     COHORT_REGISTER_DATASET(squares, [](const cohort::data::DatasetArgs&) {
///       return std::make_shared<Squares>();
///     });
#define COHORT_REGISTER_DATASET(name, ...) \
  COHORT_REGISTER_AT_LOAD(data::register_dataset_at_load, #name, __VA_ARGS__)
