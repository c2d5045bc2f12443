#include "cohort/base/exception_text.h"

#include <algorithm>
#include <array>

#include "cohort/base/error.h"

namespace cohort::base {
namespace {

// LibTorch's own, and what its builds with symbols write instead.
constexpr std::array<std::string_view, 2> kBacktraces = {"Exception raised from ", "C++ CapturedTraceback:"};
constexpr std::array<std::string_view, 6> kSources = {".cc", ".cpp", ".cu", ".h", ".hpp", ".cuh"};

bool begins_backtrace(std::string_view line) {
  return std::any_of(kBacktraces.begin(), kBacktraces.end(),
                     [&](std::string_view start) { return line.starts_with(start); });
}

// Length of "[path/file.cc:123] " at the start of `text`, or 0.
std::size_t source_prefix(std::string_view text) {
  if (!text.starts_with('[')) return 0;
  const std::size_t close = text.find("] ");
  if (close == std::string_view::npos) return 0;
  const std::string_view inside = text.substr(1, close - 1);
  const std::size_t colon = inside.rfind(':');
  if (colon == std::string_view::npos || colon + 1 == inside.size()) return 0;
  const std::string_view file = inside.substr(0, colon), number = inside.substr(colon + 1);
  const bool digits = std::all_of(number.begin(), number.end(), [](char c) { return c >= '0' && c <= '9'; });
  const bool source = std::any_of(kSources.begin(), kSources.end(),
                                  [&](std::string_view suffix) { return file.ends_with(suffix); });
  return digits && source ? close + 2 : 0;
}

}  // namespace

std::string without_backtrace(std::string_view text) {
  // An error that was caught and thrown again may have several.
  while (const std::size_t prefix = source_prefix(text)) text.remove_prefix(prefix);
  for (std::size_t line = 0; line < text.size();) {
    if (begins_backtrace(text.substr(line))) {
      text = text.substr(0, line);
      break;
    }
    const std::size_t end = text.find('\n', line);
    if (end == std::string_view::npos) break;
    line = end + 1;
  }
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.remove_suffix(1);
  return std::string(text);
}

bool is_users_fault(const std::exception& error) {
  return dynamic_cast<const UsageError*>(&error) != nullptr ||
         dynamic_cast<const ConfigError*>(&error) != nullptr ||
         dynamic_cast<const DataError*>(&error) != nullptr;
}

}  // namespace cohort::base
