#include "cohort/core/numbered.h"

#include "cohort/core/error.h"

namespace cohort::core {

std::string numbered(std::string_view noun, const std::vector<int>& numbers) {
  constexpr std::size_t kMost = 20;
  std::string text = concat(noun, numbers.size() == 1 ? " " : "s ");
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (i == kMost) return text + concat(" and ", numbers.size() - i, " more");
    text += concat(i == 0 ? "" : i + 1 == numbers.size() ? " and " : ", ", numbers[i]);
  }
  return text;
}

}  // namespace cohort::core
