#include "cohort/base/text/nearest_name.h"

#include <algorithm>
#include <cctype>
#include <vector>

namespace cohort::base {

// Damerau and Levenshtein, in the form of optimal string alignment: two letters that changed places are one
// change. Upper and lower case count as equal.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  const auto same = [](char x, char y) {
    return std::tolower(static_cast<unsigned char>(x)) == std::tolower(static_cast<unsigned char>(y));
  };
  const std::size_t width = b.size() + 1;
  std::vector<std::size_t> cost((a.size() + 1) * width);
  const auto at = [&](std::size_t i, std::size_t j) -> std::size_t& { return cost[i * width + j]; };
  for (std::size_t i = 0; i <= a.size(); ++i) at(i, 0) = i;
  for (std::size_t j = 0; j <= b.size(); ++j) at(0, j) = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    for (std::size_t j = 1; j <= b.size(); ++j) {
      at(i, j) = std::min(
          {at(i - 1, j) + 1, at(i, j - 1) + 1, at(i - 1, j - 1) + (same(a[i - 1], b[j - 1]) ? 0 : 1)});
      if (i > 1 && j > 1 && same(a[i - 1], b[j - 2]) && same(a[i - 2], b[j - 1])) {
        at(i, j) = std::min(at(i, j), at(i - 2, j - 2) + 1);
      }
    }
  }
  return at(a.size(), b.size());
}

const std::string& least_changed_name(std::string_view name, std::span<const std::string> names) {
  return *std::min_element(names.begin(), names.end(), [&](const std::string& a, const std::string& b) {
    return edit_distance(name, a) < edit_distance(name, b);
  });
}

std::optional<std::string> nearest_name(std::string_view name, std::span<const std::string> names) {
  if (names.empty()) return std::nullopt;
  const std::string& best = least_changed_name(name, names);
  // More than a third changed is another name, and to offer it would mislead.
  const std::size_t allowed = std::max<std::size_t>(1, std::max(name.size(), best.size()) / 3);
  if (edit_distance(name, best) > allowed) return std::nullopt;
  return best;
}

}  // namespace cohort::base
