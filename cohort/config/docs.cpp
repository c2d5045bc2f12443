// The reference of all keys, as text and as Markdown, from the table. The table is the single source:
// docs/reference/keys.md is this Markdown, and a test compares them. Defaults are those of a fresh Config, so
// no default is written twice.
#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"
#include "cohort/config/internal/flat_keys.h"
#include "cohort/config/keys.h"

namespace cohort::config {
namespace {

using base::concat;

// Two quotes in a table of defaults would look like a value that must be typed.
std::string default_text(const ConfigKey& key) {
  Config config;
  const std::string text = value_text(key, config);
  return text == "\"\"" ? "empty" : text;
}

std::string used_text(const ConfigKey& key) {
  if (key.used_with == nullptr) return "";
  const std::string exception =
      key.used_above_zero == nullptr ? "" : concat(", but where ", key.used_above_zero, " is above 0");
  if (key.used_values.empty()) {
    return concat(" Not with ", key.used_with, " ", base::join(key.unused_values, " or "), exception, ".");
  }
  return concat(" Only with ", key.used_with, " ", base::join(key.used_values, " or "), exception, ".");
}

/// Breaks `text` between words so that a line has at most `width` bytes; further lines begin with `indent`
/// spaces.
std::string wrap(const std::string& text, std::size_t width, std::size_t indent) {
  std::string result(indent, ' ');
  std::size_t column = indent;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(' ', begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    // A word longer than the line stays whole: it may be a path or a value to copy.
    if (column > indent && column + 1 + word.size() > width) {
      result += "\n" + std::string(indent, ' ');
      column = indent;
    } else if (column > indent) {
      result += ' ';
      ++column;
    }
    result += word;
    column += word.size();
    begin = end + 1;
  }
  return result;
}

// A bar ends a cell of a Markdown table, also inside code.
std::string escape_cell(std::string text) {
  for (std::size_t at = 0; (at = text.find('|', at)) != std::string::npos; at += 2) text.insert(at, "\\");
  return text;
}

}  // namespace

std::string config_help() {
  std::string text =
      "Keys of a configuration. Each can be changed on the command line: key=value, the value in YAML\n"
      "(optim.lr=0.05, schedule.milestones=[30,60], data.train_transforms=[{Resize: 64}]).\n";
  std::string_view section;
  for (const ConfigKey& key : config_keys()) {
    if (key.section() != section) {
      section = key.section();
      text += concat("\n", section, "\n");
    }
    text += concat("  ", key.name, " = ", default_text(key), "\n");
    text +=
        wrap(concat(key.help, used_text(key), " (", expectation(key), "; on resume: ", resume_text(key), ")"),
             100, 6) +
        "\n";
  }
  text += "\nFlat keys of published VGG scripts, read too; a file with one of them has these defaults\n";
  for (const FlatKey& key : flat_keys()) {
    // NUM_GPUS sets two keys, so there is no single name to show.
    const std::string sets = key.key[0] == '\0' ? "" : concat(" (", key.key, ")");
    text += concat("  ", key.name, sets, "\n", wrap(key.help, 100, 6), "\n");
  }
  return text;
}

std::string config_markdown() {
  std::string text;
  std::string_view section;
  for (const ConfigKey& key : config_keys()) {
    if (key.section() != section) {
      section = key.section();
      text += concat(text.empty() ? "" : "\n", "### ", section,
                     "\n\n| key | default | takes | on resume | |\n| --- | --- | --- | --- | --- |\n");
    }
    text +=
        concat("| `", key.name, "` | ", escape_cell(default_text(key)), " | ", escape_cell(expectation(key)),
               " | ", resume_text(key), " | ", escape_cell(key.help + used_text(key)), " |\n");
  }
  text += "\n### Flat keys\n\n| key | stands for | default |\n| --- | --- | --- |\n";
  for (const FlatKey& key : flat_keys()) {
    const std::string sets = key.key[0] == '\0' ? "" : concat("`", key.key, "`");
    text += concat("| `", key.name, "` | ", sets, " | ", escape_cell(key.help), " |\n");
  }
  return text;
}

}  // namespace cohort::config
