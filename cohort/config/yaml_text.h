#pragma once

#include <yaml-cpp/yaml.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

/// YAML as Cohort reads and writes it: bounded in size and depth, and every message says where.
namespace cohort::config {

/// Where a value stands: a file, or an override on the command line.
struct YamlSource {
  std::string name;          ///< of the file, or the override's text
  bool is_override = false;  ///< then there is no line to name

  /// Returns "run.yaml, line 3, column 7" or "override 'optim.lr=x'".
  std::string at(const YAML::Mark& mark) const;
};

/// A longer text is rejected; who reads a file need not read more.
inline constexpr std::size_t kMaxYamlBytes = 256 * 1024;

/// Returns the one document in `text`.
/// Throws: ConfigError with line and column when it does not parse, is too large or too deep, or has more
/// documents.
YAML::Node parse_yaml(std::string_view text, const YamlSource& source);

/// Returns the text of a scalar (nothing at all is an empty text), or nothing when it is another thing or too
/// long.
std::optional<std::string> as_text(const YAML::Node& node);

/// Return the value of a plain scalar, or nothing when it is not of that type.
std::optional<bool> as_bool(const YAML::Node& node);
std::optional<std::int64_t> as_int(const YAML::Node& node);
std::optional<double> as_double(const YAML::Node& node);

/// Returns what a message calls the node: "'abc'", "a list", "names with values", "nothing".
std::string describe(const YAML::Node& node);

/// Returns a number in the fewest digits that read back to it.
std::string number_text(double value);
/// Returns a text as a scalar, quoted where it has to be.
std::string scalar_text(const std::string& text);

}  // namespace cohort::config
