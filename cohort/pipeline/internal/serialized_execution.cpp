#include "cohort/pipeline/internal/serialized_execution.h"

#include "cohort/base/threads/wait.h"
#include "cohort/pipeline/internal/channel.h"

namespace cohort::pipeline {

void SerializedExecution::wait(int placement, const base::Deadline& deadline) {
  std::unique_lock lock(mutex_);
  const auto over = [&] { return closed_ || (next_ < order_.size() && order_[next_] == placement); };
  if (!base::wait(changed_, lock, over, deadline)) throw ChannelTimeout();
  if (closed_) throw ChannelClosed();
}

void SerializedExecution::end() {
  {
    const std::lock_guard lock(mutex_);
    // One action has ended, and the next placement of the order has its turn.
    ++next_;
  }
  changed_.notify_all();
}

void SerializedExecution::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
}

}  // namespace cohort::pipeline
