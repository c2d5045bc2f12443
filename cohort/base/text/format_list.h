#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cohort/base/error.h"

namespace cohort::base {

/// Returns "rank 3", "ranks 1, 2 and 5"; after twenty, how many more there are. No LibTorch.
std::string format_list(std::string_view noun, const std::vector<int>& numbers);

/// Returns "1 rank", "3 ranks". `noun`: one of them.
std::string format_count(std::int64_t count, std::string_view noun);

/// Returns the texts with `separator` between them.
std::string join(const std::vector<std::string>& texts, std::string_view separator = ", ");

/// A text of parts with a separator between them.
///
///     TextList list("; ");
///     for (const Call& call : calls) list.add("rank ", call.rank, ": ", call.name);
///     log_info(list.text());
class TextList {
 public:
  explicit TextList(std::string_view separator = ", ") : separator_(separator) {}

  /// Adds what concat() makes of `parts`.
  template <typename... Parts>
  void add(const Parts&... parts) {
    if (!std::exchange(is_empty_, false)) text_ += separator_;
    text_ += concat(parts...);
  }
  bool empty() const { return is_empty_; }
  const std::string& text() const { return text_; }

 private:
  std::string separator_;
  std::string text_;
  bool is_empty_ = true;
};

/// Returns what concat() makes of each value, with `separator` between them: join(tensor.sizes(), " x ").
template <typename Range>
std::string join(const Range& values, std::string_view separator = ", ") {
  TextList list(separator);
  for (const auto& value : values) list.add(value);
  return list.text();
}

}  // namespace cohort::base
