// The text is bounded in size and nesting before the parser sees it, as the parser calls itself for each
// level. A first pass makes sure that there is a single document, and the second reads it. Only a scalar
// without quotes can be a number or a truth value. What is written here reads back to the same value: a text
// stands without quotes only where that is safe.
#include "cohort/config/yaml_text.h"

#include <yaml-cpp/eventhandler.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <sstream>

#include "cohort/base/error.h"

namespace cohort::config {
namespace {

using base::concat;

// Note [YAML limits]: yaml-cpp's parser calls itself once per level, and nothing bounds it. A level costs a
// bracket, a column of indentation, or on one line an indicator and a blank ("- - - a"), so these bound the
// depth before the parser runs. Texts are bounded too, so that what was read can be written on one line and
// read again.
constexpr std::size_t kMaxBrackets = 500;
constexpr std::size_t kMaxIndicators = 500;
constexpr std::size_t kMaxIndentation = 500;
constexpr std::size_t kMaxText = 1000;

[[noreturn]] void reject(const YamlSource& source, std::size_t line, const std::string& what) {
  YAML::Mark mark;
  mark.line = static_cast<int>(line);
  mark.column = 0;
  throw ConfigError("config.load", concat(source.at(mark), ": ", what), "a configuration of usual size");
}

void check_limits(std::string_view text, const YamlSource& source) {
  if (text.size() > kMaxYamlBytes) {
    reject(source, 0, concat("the file is too large, expected at most ", kMaxYamlBytes, " bytes"));
  }
  std::size_t line = 0, indentation = 0, indicators = 0, brackets = 0;
  bool at_begin = true;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const char next = i + 1 < text.size() ? text[i + 1] : '\n';
    if (c == '\n') {
      ++line;
      indentation = indicators = 0;
      at_begin = true;
      continue;
    }
    // All of this overcounts: brackets in quotes and comments count too, and are never taken back. A limit
    // that no usual file comes near need not be exact, and a scanner of YAML's quoting could be wrong.
    at_begin = at_begin && (c == ' ' || c == '\t');
    indentation += at_begin;
    brackets += c == '[' || c == '{';
    indicators += (c == '-' || c == '?' || c == ':') && (next == ' ' || next == '\t');
    if (c == '\0') reject(source, line, "a zero byte: this is not a text file");
    if (brackets > kMaxBrackets)
      reject(source, line, concat("more than ", kMaxBrackets, " opening brackets"));
    if (indentation > kMaxIndentation)
      reject(source, line, concat("more than ", kMaxIndentation, " blanks before a line"));
    if (indicators > kMaxIndicators)
      reject(source, line, concat("more than ", kMaxIndicators, " of '- ', '? ' and ': ' in a line"));
  }
}

/// True for a scalar that stands without quotes: only that can be a number or a boolean.
bool is_plain(const YAML::Node& node) {
  // yaml-cpp tags a scalar without quotes "?", and one with quotes "!".
  return node.IsScalar() && node.Tag() == "?";
}

template <typename T>
std::optional<T> parse_number(std::string_view text) {
  // YAML knows +1, from_chars does not. from_chars depends on no locale, unlike strtod and streams.
  if (text.starts_with('+')) text.remove_prefix(1);
  if (text.empty() || text.front() == '+') return std::nullopt;
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// Note [One document]: YAML::LoadAll never comes back from some texts that are not YAML, for it takes
// documents until the scanner is empty, and a stray bracket stays there (found by fuzzing). YAML::Load does
// come back, but leaves unsaid what follows the first document. So a first pass, which keeps nothing, looks
// whether anything does.
class DocumentMarks : public YAML::EventHandler {
 public:
  const YAML::Mark& last() const { return last_; }
  void OnDocumentStart(const YAML::Mark& mark) override { last_ = mark; }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark&, YAML::anchor_t) override {}
  void OnAlias(const YAML::Mark&, YAML::anchor_t) override {}
  void OnScalar(const YAML::Mark&, const std::string&, YAML::anchor_t, const std::string&) override {}
  void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                       YAML::EmitterStyle::value) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {
  }
  void OnMapEnd() override {}

 private:
  YAML::Mark last_;
};

void check_one_document(const std::string& text, const YamlSource& source) {
  std::istringstream stream(text);
  YAML::Parser parser(stream);
  DocumentMarks marks;
  // True and more text: the second call finds where it begins, or throws with its own message.
  if (!parser.HandleNextDocument(marks) || !parser) return;
  parser.HandleNextDocument(marks);
  throw ConfigError(
      "config.load",
      concat(source.at(marks.last()), ": a second document begins here, or what belongs to no key"),
      "one configuration per file; check brackets and indentation there");
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
    const std::string copy(text);
    check_one_document(copy, source);
    return YAML::Load(copy);
  } catch (const YAML::Exception& error) {
    throw ConfigError("config.load", concat(source.at(error.mark), ": this is not YAML: ", error.msg),
                      "check indentation, the space after each colon, and quotes and brackets there");
  }
}

std::optional<std::string> as_text(const YAML::Node& node) {
  // "name:" with nothing after it is an empty text.
  if (node.IsNull()) return "";
  if (!node.IsScalar() || node.Scalar().size() > kMaxText) return std::nullopt;
  return node.Scalar();
}

std::optional<bool> as_bool(const YAML::Node& node) {
  if (!is_plain(node)) return std::nullopt;
  std::string text = node.Scalar();
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  // The words of YAML 1.1 too, since users of PyYAML write them.
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
  // from_chars reads "inf" and "nan".
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
      if (text.size() > kMaxText) return concat("a text of ", text.size(), " bytes (at most ", kMaxText, ")");
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
  // to_chars writes the shortest text that reads back to the same double. Fixed notation is for sizes that
  // people read without an exponent: 0.0001, not 1e-04.
  const auto format =
      size == 0 || (size >= 1e-4 && size < 1e15) ? std::chars_format::fixed : std::chars_format::general;
  const auto result = std::to_chars(text.data(), text.data() + text.size(), value, format);
  return {text.data(), result.ptr};
}

std::string scalar_text(const std::string& text) {
  const auto is_safe = [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '_' || c == '/' || c == '.' || c == '-';
  };
  // A text may look like a truth value ("true"): only the type of the key decides what it is. "null" is
  // different, since it would be read as an empty text. A first letter rules out numbers and "~".
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
      // Control characters would end the line or be rejected by the scanner. UTF-8 passes, byte by byte.
      std::array<char, 8> escape;
      std::snprintf(escape.data(), escape.size(), "\\x%02x", c);
      quoted += escape.data();
    } else {
      quoted += static_cast<char>(c);
    }
  }
  return quoted + "\"";
}

}  // namespace cohort::config
