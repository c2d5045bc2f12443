#pragma once

#include <cstdint>
#include <string_view>

#include "cohort/base/error.h"

namespace cohort::data {

/// Throws: UsageError naming `index` and `size` unless 0 <= `index` < `size`. `where` is the operation in the
/// message, `data.tensor_dataset`.
inline void check_index(std::string_view where, std::int64_t index, std::int64_t size) {
  if (index >= 0 && index < size) [[likely]] {
    return;
  }
  throw UsageError(where, base::concat("got index ", index, ", expected 0 to ", size - 1, ": there are ",
                                       size, " samples"));
}

}  // namespace cohort::data
