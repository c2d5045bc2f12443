#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "cohort/base/threads/deadline.h"

namespace cohort::rpc {

/// Calls functions at their time, on a thread of its own. Threads: any.
class Timers {
 public:
  using Time = base::Deadline::Clock::time_point;
  using Key = std::pair<Time, std::uint64_t>;

  Timers();
  /// What has not been called is dropped.
  ~Timers();
  Timers(const Timers&) = delete;
  Timers& operator=(const Timers&) = delete;
  /// Ends the thread, once the function that it runs has returned: whose owner may then be destroyed. Not by such a function.
  void stop();

  /// Has `fn`, which must neither wait nor throw, called then.
  Key add(Time time, std::function<void()> fn);
  /// It is called no more, but may be running.
  void remove(const Key& key);

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Key, std::function<void()>> functions_;
  std::uint64_t next_ = 0;
  Time sleeps_until_ = Time::min();  // the thread; a time before that wakes it
  bool stops_ = false;
  std::thread thread_;
};

}  // namespace cohort::rpc
