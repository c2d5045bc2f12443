#include "cohort/train/yaml_text.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "cohort/core/error.h"

namespace cohort::train {
namespace {

using core::concat;

// Note [YAML limits]: yaml-cpp's parser calls itself once per level, and nothing bounds it. A level costs a
// bracket, or two columns of one line, so brackets and the length of a line bound the depth before the parser
// runs.
constexpr std::size_t kMaxBytes = 256 * 1024;
constexpr std::size_t kMaxBrackets = 500;
constexpr std::size_t kMaxLine = 1000;

[[noreturn]] void refuse(const YamlSource& source, std::size_t line, const std::string& what) {
  YAML::Mark mark;
  mark.line = static_cast<int>(line);
  mark.column = 0;
  throw ConfigError("train.config", concat(source.at(mark), ": ", what), "a configuration of usual size");
}

void check_limits(std::string_view text, const YamlSource& source) {
  if (text.size() > kMaxBytes) {
    refuse(source, 0,
           concat("the file is too large: got ", text.size(), " bytes, expected at most ", kMaxBytes));
  }
  std::size_t line = 0, line_begin = 0, brackets = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '\n') {
      ++line;
      line_begin = i + 1;
    } else if (c == '\0') {
      refuse(source, line, "a zero byte: this is not a text file");
    } else if ((c == '[' || c == '{') && ++brackets > kMaxBrackets) {
      refuse(source, line, concat("more than ", kMaxBrackets, " opening brackets"));
    } else if (i - line_begin >= kMaxLine) {
      refuse(source, line, concat("a line of more than ", kMaxLine, " bytes"));
    }
  }
}

/// True for a scalar that stands without quotes: only that can be a number or a boolean.
bool is_plain(const YAML::Node& node) {
  return node.IsScalar() && node.Tag() == "?";
}

template <typename T>
std::optional<T> parse_number(std::string_view text) {
  if (text.starts_with('+')) text.remove_prefix(1);
  if (text.empty() || text.front() == '+') return std::nullopt;
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace

std::string YamlSource::at(const YAML::Mark& mark) const {
  if (is_override) return concat("override '", name, "'");
  if (mark.is_null()) return name;
  return concat(name, ", line ", mark.line + 1, ", column ", mark.column + 1);
}

YAML::Node parse_yaml(std::string_view text, const YamlSource& source) {
  check_limits(text, source);
  try {
    const std::vector<YAML::Node> documents = YAML::LoadAll(std::string(text));
    if (documents.size() > 1) {
      throw ConfigError("train.config",
                        concat(source.at(documents[1].Mark()), ": a second document begins here"),
                        "one configuration per file, without a line '---'");
    }
    return documents.empty() ? YAML::Node() : documents.front();
  } catch (const YAML::Exception& error) {
    throw ConfigError("train.config", concat(source.at(error.mark), ": this is not YAML: ", error.msg),
                      "check indentation, the space after each colon, and quotes and brackets there");
  }
}

std::optional<bool> as_bool(const YAML::Node& node) {
  if (!is_plain(node)) return std::nullopt;
  std::string text = node.Scalar();
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (text == "true" || text == "yes" || text == "on") return true;
  if (text == "false" || text == "no" || text == "off") return false;
  return std::nullopt;
}

std::optional<int64_t> as_int(const YAML::Node& node) {
  return is_plain(node) ? parse_number<int64_t>(node.Scalar()) : std::nullopt;
}

std::optional<double> as_double(const YAML::Node& node) {
  if (!is_plain(node)) return std::nullopt;
  const std::optional<double> value = parse_number<double>(node.Scalar());
  return value && std::isfinite(*value) ? value : std::nullopt;
}

std::string describe(const YAML::Node& node) {
  switch (node.Type()) {
    case YAML::NodeType::Sequence:
      return "a list";
    case YAML::NodeType::Map:
      return "names with values";
    case YAML::NodeType::Scalar: {
      constexpr std::size_t kShown = 60;
      const std::string& text = node.Scalar();
      const std::string shown = text.size() > kShown ? text.substr(0, kShown) + "..." : text;
      return is_plain(node) ? concat("'", shown, "'") : concat("the text \"", shown, "\" (in quotes)");
    }
    default:
      return "nothing";
  }
}

std::string number_text(double value) {
  std::array<char, 40> text;
  const double size = std::abs(value);
  const auto format =
      size == 0 || (size >= 1e-4 && size < 1e15) ? std::chars_format::fixed : std::chars_format::general;
  const auto result = std::to_chars(text.data(), text.data() + text.size(), value, format);
  return {text.data(), result.ptr};
}

std::string scalar_text(const std::string& text) {
  const auto is_safe = [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '_' || c == '/' || c == '.' || c == '-';
  };
  const bool plain = !text.empty() && std::isalpha(static_cast<unsigned char>(text.front())) != 0 &&
                     std::all_of(text.begin(), text.end(), is_safe) && text != "null" && text != "Null" &&
                     text != "NULL";
  if (plain) return text;
  std::string quoted = "\"";
  for (const unsigned char c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += static_cast<char>(c);
    } else if (c < 0x20 || c == 0x7f) {
      std::array<char, 8> escape;
      std::snprintf(escape.data(), escape.size(), "\\x%02x", c);
      quoted += escape.data();
    } else {
      quoted += static_cast<char>(c);
    }
  }
  return quoted + "\"";
}

}  // namespace cohort::train
