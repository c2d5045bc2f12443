#pragma once

#include <charconv>
#include <chrono>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cohort/base/text/choice.h"

/// The flags that `cohort run` was given, with the names that messages call them by. No LibTorch. Not for
/// users of the library.
namespace cohort::launch {

/// Throws: UsageError.
[[noreturn]] void reject_options(const std::string& what, const std::string& hint = "");

/// The whole text must be the number: "2x" is a typing error.
template <typename T>
bool read_number(std::string_view text, T& value) {
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  return result.ec == std::errc() && result.ptr == text.data() + text.size();
}

/// Keeps empty parts, which the reader of a part then rejects.
std::vector<std::string> split_text(const std::string& text, char separator);

/// A flag's value with the name that messages call it by: the flag, or the variable that it came from.
struct FlagValue {
  std::string name;
  std::string text;

  /// Throws: UsageError, as the functions below.
  [[noreturn]] void reject(const std::string& expected) const;
  int integer(int low, int high) const;
  std::chrono::milliseconds seconds(double low) const;
  /// true, yes, 1 and their like, as torchrun reads them.
  bool truth() const;
  /// Returns what the text stands for.
  template <typename Value, std::size_t kCount>
  const Value& choose(const base::Choice<Value> (&choices)[kCount]) const {
    if (const Value* const value = base::find_choice(text, choices)) return *value;
    std::vector<std::string> names;
    for (const base::Choice<Value>& choice : choices) names.emplace_back(choice.name);
    reject_as_none_of(std::move(names));
  }

 private:
  [[noreturn]] void reject_as_none_of(std::vector<std::string> names) const;
};

/// Flags by name, and what PET_NAME says of those that are not given.
class FlagValues {
 public:
  /// Ownership: refers to the map. Throws: UsageError for a flag that cannot be had.
  explicit FlagValues(const std::map<std::string, std::string>& given);

  std::optional<FlagValue> get(const std::string& name) const;

 private:
  const std::map<std::string, std::string>& given_;
};

}  // namespace cohort::launch
