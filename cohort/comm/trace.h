#pragma once

#include <chrono>
#include <filesystem>

#include "cohort/comm/group.h"

namespace cohort::comm {

/// How write_trace() works.
struct TraceOptions {
  /// 0: the group's.
  std::chrono::milliseconds timeout{0};
  /// For tests: takes this rank's clock to be ahead by so much, and measures it as another host's.
  std::chrono::nanoseconds clock_ahead{0};
};

/// Rank 0 has written `path`: the timelines (`base::Timeline`) of all ranks as one Chrome trace, a process
/// per rank, under rank 0's clock. Ranks on one host share a clock; another host's is measured over the
/// store, to within half of the shortest of 16 round trips. Stop the timelines before. Collective. Throws:
/// SystemError on every rank when the file cannot be written; TimeoutError naming the ranks that did not
/// come.
void write_trace(const Group& group, const std::filesystem::path& path, TraceOptions options = {});

}  // namespace cohort::comm
