// Arguments are read by name, and each name that is asked for is noted. What nobody has asked for at the end
// is rejected with the nearest known name, so a misspelt argument is never ignored.
#include "cohort/data/transforms/transform.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/text/nearest_name.h"

namespace cohort::data {
CropResizeOp Transform::plan(ImageSize in, base::RandomStream&) const {
  return {{0, 0, in.height, in.width}, in, false};
}

void Transform::apply(Image&, base::RandomStream&) const {}

TransformArgs::TransformArgs(const TransformSpec& spec, std::string first_argument)
    : name_(spec.name), args_(spec.args) {
  const auto unnamed = args_.find("");
  if (unnamed == args_.end()) {
    return;
  }
  if (first_argument.empty()) {
    throw ConfigError("data.transforms", base::concat(name_, " takes no argument without a name"));
  }
  if (args_.count(first_argument) != 0) {
    fail(first_argument, "given twice, with and without its name");
  }
  // From here on only names count: "Resize: 64" and "Resize: {size: 64}" are one.
  args_[first_argument] = unnamed->second;
  args_.erase("");
}

const std::vector<double>* TransformArgs::find(const std::string& key) {
  // Noted whether or not it is given: the message of an unknown argument lists all that are known.
  asked_.push_back(key);
  const auto found = args_.find(key);
  return found == args_.end() ? nullptr : &found->second;
}

void TransformArgs::fail(const std::string& key, const std::string& what) const {
  throw ConfigError("data.transforms", base::concat(name_, ".", key, ": ", what));
}

std::vector<double> TransformArgs::numbers(const std::string& key, const std::vector<double>& fallback) {
  const std::vector<double>* values = find(key);
  if (values == nullptr) {
    return fallback;
  }
  // An empty fallback says that any number of values will do; the caller checks it.
  if (!fallback.empty() && values->size() != fallback.size()) {
    fail(key, base::concat("got ", values->size(), " values, expected ", fallback.size()));
  }
  for (const double value : *values) {
    if (!std::isfinite(value)) {
      fail(key, base::concat("got ", value, ", expected a finite number"));
    }
  }
  return *values;
}

double TransformArgs::number(const std::string& key, double fallback) {
  return numbers(key, {fallback})[0];
}

int64_t TransformArgs::integer(const std::string& key, int64_t fallback) {
  return has(key) ? integers(key, 1, 1)[0] : (asked_.push_back(key), fallback);
}

std::vector<int64_t> TransformArgs::integers(const std::string& key, size_t min_count, size_t max_count) {
  const std::vector<double>* values = find(key);
  if (values == nullptr) {
    fail(key, "missing");
  }
  if (values->size() < min_count || values->size() > max_count) {
    fail(key, base::concat("got ", values->size(), " values, expected ", min_count,
                           min_count == max_count ? "" : base::concat(" to ", max_count)));
  }
  std::vector<int64_t> whole;
  for (const double value : *values) {
    // All arguments are doubles in a configuration. Below this bound the cast is exact, and NaN fails the
    // test.
    if (!(std::fabs(value) < 1e9) || value != std::floor(value)) {
      fail(key, base::concat("got ", value, ", expected a whole number"));
    }
    whole.push_back(static_cast<int64_t>(value));
  }
  return whole;
}

ImageSize TransformArgs::size(const std::string& key) {
  const std::vector<int64_t> values = integers(key, 1, 2);
  for (const int64_t value : values) {
    if (value < 1 || value > 65535) {
      fail(key, base::concat("got ", value, ", expected 1 to 65535 pixels"));
    }
  }
  // One number is both height and width.
  return {values.front(), values.back()};
}

void TransformArgs::reject_the_rest() const {
  for (const auto& [key, values] : args_) {
    if (std::find(asked_.begin(), asked_.end(), key) == asked_.end()) {
      const std::string hint = asked_.empty() ? ""
                                              : base::concat(base::least_changed_name(key, asked_),
                                                             " (known: ", base::join(asked_), ")");
      throw ConfigError("data.transforms", base::concat(name_, " has no argument ", key), hint);
    }
  }
}

// Transforms of a program go the way of those of a configuration, so both are checked by the same code.
TransformSpec resize(int64_t shorter_side) {
  return {"Resize", {{"size", {static_cast<double>(shorter_side)}}}};
}
TransformSpec resize(ImageSize size) {
  return {"Resize", {{"size", {static_cast<double>(size.height), static_cast<double>(size.width)}}}};
}
TransformSpec center_crop(int64_t size) {
  return {"CenterCrop", {{"size", {static_cast<double>(size)}}}};
}
TransformSpec random_crop(int64_t size, int64_t padding, bool pad_if_needed) {
  return {"RandomCrop",
          {{"size", {static_cast<double>(size)}},
           {"padding", {static_cast<double>(padding)}},
           {"pad_if_needed", {pad_if_needed ? 1.0 : 0.0}}}};
}
TransformSpec random_resized_crop(int64_t size, std::vector<double> scale, std::vector<double> ratio) {
  return {"RandomResizedCrop",
          {{"size", {static_cast<double>(size)}}, {"scale", std::move(scale)}, {"ratio", std::move(ratio)}}};
}
TransformSpec random_horizontal_flip(double p) {
  return {"RandomHorizontalFlip", {{"p", {p}}}};
}
TransformSpec grayscale(int64_t num_output_channels) {
  return {"Grayscale", {{"num_output_channels", {static_cast<double>(num_output_channels)}}}};
}
TransformSpec to_tensor() {
  return {"ToTensor", {}};
}
TransformSpec normalize(std::vector<double> mean, std::vector<double> std) {
  return {"Normalize", {{"mean", std::move(mean)}, {"std", std::move(std)}}};
}

}  // namespace cohort::data
