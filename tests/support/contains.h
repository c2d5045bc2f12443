#pragma once

#include <algorithm>
#include <string>
#include <vector>

namespace cohort::test {

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline bool contains_one_of(const std::string& text, const std::vector<std::string>& parts) {
  return std::any_of(parts.begin(), parts.end(),
                     [&](const std::string& part) { return contains(text, part); });
}

}  // namespace cohort::test
