#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <vector>

#include "cohort/base/threads/deadline.h"

namespace cohort::pipeline {

/// Has threads go one at a time, in an order that is known before. Threads: any.
class Turns {
 public:
  /// Whose turn it is, one after the other.
  explicit Turns(std::vector<int> order) : order_(std::move(order)) {}

  /// Waits until it is `who`'s turn, which ends with end(). Throws: ChannelClosed, ChannelTimeout.
  void wait(int who, const base::Deadline& deadline);
  void end();
  /// Ends what waits, with ChannelClosed.
  void close();

 private:
  const std::vector<int> order_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t next_ = 0;  // under mutex_
  bool closed_ = false;   // under mutex_
};

}  // namespace cohort::pipeline
