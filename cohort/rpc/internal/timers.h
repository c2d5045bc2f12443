#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
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
  /// Ends the thread, once the function that it runs has returned: whose owner may then be destroyed. By such a function: the
  /// thread ends after it.
  void stop();

  /// Has `fn`, which must neither wait nor throw, called then.
  Key add(Time time, std::function<void()> fn);
  /// It is called no more, but may be running.
  void remove(const Key& key);

 private:
  // The thread's too: a function that it runs may destroy the timers.
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    std::map<Key, std::function<void()>> functions;
    std::uint64_t next = 0;
    Time sleeps_until = Time::min();  // the thread; a time before that wakes it
    bool stops = false;
  };
  static void run(Shared& shared);

  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  std::thread thread_;
};

}  // namespace cohort::rpc
