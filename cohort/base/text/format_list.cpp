#include "cohort/base/text/format_list.h"

#include "cohort/base/error.h"

namespace cohort::base {

std::string format_list(std::string_view noun, const std::vector<int>& numbers) {
  // A job may miss thousands of ranks, and a message is to stay readable.
  constexpr std::size_t kMax = 20;
  std::string text = concat(noun, numbers.size() == 1 ? " " : "s ");
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (i == kMax) return text + concat(" and ", numbers.size() - i, " more");
    text += concat(i == 0 ? "" : i + 1 == numbers.size() ? " and " : ", ", numbers[i]);
  }
  return text;
}

std::string format_count(std::int64_t count, std::string_view noun) {
  return concat(count, " ", noun, count == 1 ? "" : "s");
}

std::string join(const std::vector<std::string>& texts, std::string_view separator) {
  return join<std::vector<std::string>>(texts, separator);
}

}  // namespace cohort::base
