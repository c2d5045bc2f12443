#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "cohort/config/types.h"

namespace cohort::config {

/// The member of a Config that a key stands for.
using KeyTarget = std::variant<bool*, std::int64_t*, double*, std::string*, std::vector<std::int64_t>*,
                               std::vector<double>*, TransformList*, std::map<std::string, std::string>*>;

/// What becomes of a key whose value differs when a run resumes from a checkpoint.
enum class OnResume {
  kUnset,        ///< of no key: a test holds it
  kTakesEffect,  ///< from the next step on; the log shows both values
  kRejected,     ///< before anything is written
  kCannotMatter  ///< no number of the run follows from it: taken without a word
};

/// A key: what it sets, what it takes, and what help and docs say of it.
struct ConfigKey {
  const char* name;              ///< section.key
  KeyTarget (*target)(Config&);  ///< where a Config keeps its value
  OnResume on_resume = OnResume::kUnset;
  bool makes_step = false;  ///< rejected on resume where a step over all ranks gets another number of samples
  const char* help;         ///< a sentence for help and docs: what it does
  double min = -std::numeric_limits<double>::infinity();  ///< of each number
  double max = std::numeric_limits<double>::infinity();
  bool min_is_open = false;                       ///< greater than `min`, not equal
  std::vector<std::string> choices = {};          ///< of a text; presets of a TransformList
  const char* form = nullptr;                     ///< what a free text must look like, when `matches` is set
  bool (*matches)(const std::string&) = nullptr;  ///< what a free text must satisfy; null: any text does
  const char* used_with = nullptr;  ///< a key; this one has an effect only where that one is in `used_values`
  /// Where `used_values` is empty: values with which it has no effect.
  std::vector<std::string> used_values = {};  ///< empty: in any but `unused_values`
  std::vector<std::string> unused_values = {};
  /// A whole number: where that key is above 0, this one has an effect whatever `used_with` is.
  const char* used_above_zero = nullptr;

  /// The part of the name before the point: "optim" of optim.lr.
  std::string_view section() const;
  /// The part of the name after the point: "lr".
  std::string_view short_name() const;
};

}  // namespace cohort::config
