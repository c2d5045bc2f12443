#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <vector>

#include "cohort/base/threads/deadline.h"

namespace cohort::pipeline {

/// Lets one placement compute at a time, in a fixed order. Threads: any.
class SerializedExecution {
 public:
  /// `order`: the placement that computes next, for each computation of the run.
  explicit SerializedExecution(std::vector<int> order) : order_(std::move(order)) {}

  /// Waits until `placement` is next in the order. Its computation ends with end(). Throws: ChannelClosed,
  /// ChannelTimeout.
  void wait(int placement, const base::Deadline& deadline);
  void end();
  /// Every wait() throws ChannelClosed from now on.
  void close();

 private:
  const std::vector<int> order_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t next_ = 0;  // under mutex_
  bool closed_ = false;   // under mutex_
};

}  // namespace cohort::pipeline
