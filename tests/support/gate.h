#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace cohort::test {

/// What threads wait at until a test opens it; for a minute at most, so that a test that fails ends.
class Gate {
 public:
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::minutes(1), [this] { return open_; });
  }
  void open() {
    {
      const std::lock_guard lock(mutex_);
      open_ = true;
    }
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

}  // namespace cohort::test
