#include "cohort/pipeline/internal/turns.h"

#include "cohort/base/threads/wait.h"
#include "cohort/pipeline/internal/channel.h"

namespace cohort::pipeline {

void Turns::wait(int who, const base::Deadline& deadline) {
  std::unique_lock lock(mutex_);
  const auto over = [&] { return closed_ || (next_ < order_.size() && order_[next_] == who); };
  if (!base::wait(changed_, lock, over, deadline)) throw ChannelTimeout();
  if (closed_) throw ChannelClosed();
}

void Turns::end() {
  {
    const std::lock_guard lock(mutex_);
    ++next_;
  }
  changed_.notify_all();
}

void Turns::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
}

}  // namespace cohort::pipeline
