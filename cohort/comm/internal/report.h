#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cohort/comm/internal/group_state.h"

/// Text about what groups do, on one rank and joined over all. Internal.
namespace cohort::comm {

/// What one rank last did in one group.
struct Answer {
  std::string group;
  int rank = 0;  ///< in the job
  std::int64_t position = -1;
  std::string call;               ///< "all_reduce 17 float[3, 4] SUM"; empty: nothing yet
  std::string state;              ///< as CallState
  std::int64_t milliseconds = 0;  ///< in that state, or until it failed
  std::string caller;

  bool operator==(const Answer&) const = default;
};

/// All groups of one rank, one a line.
std::string write_answers(const std::vector<Answer>& answers);
/// What cannot be read is left out.
std::vector<Answer> read_answers(const std::string& text);

std::vector<Answer> answers_of(GroupRegistry& registry);

/// One table over ranks and groups, and below what is wrong with each group. An element of `answers` for each
/// rank of the job; nothing: it did not answer.
std::string join_answers(const std::vector<std::optional<std::vector<Answer>>>& answers);

/// What the groups of one rank do, with stacks.
std::string report_of(GroupRegistry& registry);

}  // namespace cohort::comm
