#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cohort/base/random.h"
#include "cohort/data/image.h"

/// Transforms of images, by name and arguments, with torchvision's geometry.
///
/// A transform does not touch pixels: it says which region to cut, to what size to bring it and whether to
/// mirror it, as a pure function of the image's size and a random stream. `TransformPipeline` does the work.
namespace cohort::data {

/// A transform as a configuration writes it: `RandomResizedCrop: {size: 64, scale: [0.08, 1]}`. The key ""
/// holds the argument that comes first in torchvision (`Resize: 256`).
struct TransformSpec {
  std::string name;                                 ///< of a registered transform, such as "Resize"
  std::map<std::string, std::vector<double>> args;  ///< numbers by name; a list has several
};

/// What a transform does to one image: cut, then resize, then mirror left and right.
struct CropResizeOp {
  Region region;        ///< in the image's pixels; what lies outside is black
  ImageSize size;       ///< of the result; the region is resized when it differs
  bool mirror = false;  ///< left and right, after the resize
};

/// One step on 8-bit images. Derive for steps of your own and make them known
/// with register_transform() (transform_registry.h).
/// Threads: `plan` and `apply` are called from several at once.
class Transform {
 public:
  virtual ~Transform() = default;

  /// Returns what to do with an image of size `in`; the whole image and nothing else by default.
  /// Throws: DataError when the image cannot be transformed.
  virtual CropResizeOp plan(ImageSize in, base::RandomStream& random) const;

  /// Changes the pixels of `image`, after `plan`'s operation was done, when `changes_pixels` says so. It may
  /// change the number of channels to what `output_channels` says, not the size.
  virtual void apply(Image& image, base::RandomStream& random) const;
  /// Whether apply() does anything; then the pipeline calls it.
  virtual bool changes_pixels() const { return false; }

  /// Returns the size of the result for images of size `in`; {0, 0} stands for a size that is not known.
  virtual ImageSize output_size(ImageSize in) const { return in; }
  /// Returns the number of channels of the result, or throws UsageError when `in` channels cannot be
  /// transformed.
  virtual std::int64_t output_channels(std::int64_t in) const { return in; }
};

/// Makes a transform from a specification; reads it through `TransformArgs`, which rejects what is left
/// unread.
class TransformArgs;
/// What register_transform() takes.
using TransformFactory = std::function<std::unique_ptr<Transform>(TransformArgs&)>;

/// Typed access to the arguments of one transform.
class TransformArgs {
 public:
  explicit TransformArgs(const TransformSpec& spec, std::string first_argument = "");

  /// Whether an argument is given; does not count as reading it.
  bool has(const std::string& key) const { return args_.count(key) != 0; }
  /// Returns the one number that `key` has, or `fallback`. Throws: ConfigError for several numbers.
  double number(const std::string& key, double fallback);
  /// The same for a whole number. Throws: ConfigError for a fraction.
  std::int64_t integer(const std::string& key, std::int64_t fallback);
  /// Numbers of any count, or of the count that `fallback` has when it is not empty.
  std::vector<double> numbers(const std::string& key, const std::vector<double>& fallback);
  /// Whole numbers, between `min_count` and `max_count` of them; required.
  std::vector<std::int64_t> integers(const std::string& key, size_t min_count, size_t max_count);
  /// A size: one number for a square, or height and width.
  ImageSize size(const std::string& key);

  /// Throws ConfigError naming the first argument that no call above has asked for.
  void reject_the_rest() const;
  /// Throws ConfigError about `key` of this transform.
  [[noreturn]] void fail(const std::string& key, const std::string& what) const;

 private:
  const std::vector<double>* find(const std::string& key);

  std::string name_;
  std::map<std::string, std::vector<double>> args_;
  std::vector<std::string> asked_;
};

/// Specifications for use in code: `TransformPipeline({random_resized_crop(64), random_horizontal_flip(),
/// to_tensor()})`.
TransformSpec resize(std::int64_t shorter_side);
TransformSpec resize(ImageSize size);
TransformSpec center_crop(std::int64_t size);
TransformSpec random_crop(std::int64_t size, std::int64_t padding = 0, bool pad_if_needed = false);
TransformSpec random_resized_crop(std::int64_t size, std::vector<double> scale = {0.08, 1.0},
                                  std::vector<double> ratio = {3.0 / 4.0, 4.0 / 3.0});
TransformSpec random_horizontal_flip(double p = 0.5);
TransformSpec grayscale(std::int64_t num_output_channels = 1);
TransformSpec to_tensor();
TransformSpec normalize(std::vector<double> mean, std::vector<double> std);

}  // namespace cohort::data
