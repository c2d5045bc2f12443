#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/text/bounded_json.h"

namespace cohort::membership {

/// Throws: CommError, code membership.read.
[[noreturn]] inline void reject_text(const std::string& what) {
  throw CommError("membership.read", what, "the same version of Cohort on all hosts");
}

inline constexpr int kMaxSignal = 64;
// So the number of all processes, kMaxProcesses of each node, is an int.
inline constexpr int kMaxNodes = 1 << 16;

/// Parses JSON of bounded size and depth.
inline nlohmann::json parse_json(std::string_view text) {
  constexpr base::JsonLimits kLimits{.bytes = std::size_t{32} << 20, .depth = 8};
  std::optional<nlohmann::json> value = base::parse_bounded_json(text, kLimits);
  if (!value) reject_text("a text is no JSON, is longer than 32 MiB, or is nested too deep");
  return *std::move(value);
}

/// Reads an object, each of whose fields must be there, and no other.
class Fields {
 public:
  Fields(const nlohmann::json& object, const char* name) : object_(object), name_(name) {
    if (!object.is_object()) reject_text(base::concat(name, " is no object"));
  }

  const nlohmann::json& field(const char* key) {
    const auto found = object_.find(key);
    if (found == object_.end()) reject_text(base::concat(name_, " has no ", key));
    ++num_read_;
    return *found;
  }
  std::string text(const char* key) {
    const nlohmann::json& value = field(key);
    if (!value.is_string()) reject_field(key, "a text");
    return value.get<std::string>();
  }
  bool flag(const char* key) {
    const nlohmann::json& value = field(key);
    if (!value.is_boolean()) reject_field(key, "true or false");
    return value.get<bool>();
  }
  std::uint64_t count(const char* key) {
    const nlohmann::json& value = field(key);
    if (!value.is_number_unsigned()) reject_field(key, "a number of at least 0");
    // Whoever counts on does not come to the end of the numbers.
    if (value.get<std::uint64_t>() > kMaxCount) reject_field(key, "a number in its range");
    return value.get<std::uint64_t>();
  }
  int integer(const char* key, int least, int most = 2'000'000'000) {
    const std::uint64_t value = count(key);
    if (value > static_cast<std::uint64_t>(most) || static_cast<int>(value) < least)
      reject_field(key, "a number in its range");
    return static_cast<int>(value);
  }
  const nlohmann::json& array(const char* key) {
    const nlohmann::json& value = field(key);
    if (!value.is_array()) reject_field(key, "a list");
    return value;
  }
  /// To be called when all fields have been read.
  void check_all_read() const {
    if (num_read_ != object_.size()) reject_text(base::concat(name_, " has an unknown field"));
  }
  [[noreturn]] void reject_field(const char* key, const char* expected) const {
    reject_text(base::concat(name_, ": ", key, " is not ", expected));
  }

 private:
  static constexpr std::uint64_t kMaxCount = std::uint64_t{1} << 62;

  const nlohmann::json& object_;
  const char* const name_;
  std::size_t num_read_ = 0;
};

}  // namespace cohort::membership
