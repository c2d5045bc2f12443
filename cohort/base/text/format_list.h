#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace cohort::base {

/// Returns "rank 3", "ranks 1, 2 and 5"; after twenty, how many more there are. No LibTorch.
std::string format_list(std::string_view noun, const std::vector<int>& numbers);

/// Returns the texts with `separator` between them.
std::string join(const std::vector<std::string>& texts, std::string_view separator = ", ");

}  // namespace cohort::base
