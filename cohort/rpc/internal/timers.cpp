#include "cohort/rpc/internal/timers.h"

#include <utility>

#include "cohort/base/threads/wait.h"

namespace cohort::rpc {

Timers::Timers() : thread_([this] { run(); }) {}

Timers::~Timers() {
  stop();
}

void Timers::stop() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

Timers::Key Timers::add(Time time, std::function<void()> fn) {
  Key key;
  bool wakes = false;
  {
    const std::lock_guard lock(mutex_);
    key = {time, next_++};
    functions_.emplace(key, std::move(fn));
    wakes = time < sleeps_until_;
  }
  if (wakes) changed_.notify_one();
  return key;
}

void Timers::remove(const Key& key) {
  std::function<void()> dropped;  // without the mutex
  const std::lock_guard lock(mutex_);
  const auto found = functions_.find(key);
  if (found == functions_.end()) return;
  dropped = std::move(found->second);
  functions_.erase(found);
}

// A function that is removed wakes nobody: the thread wakes at its time, and finds the next. So calls that are answered in
// time, which is nearly all, cost no wake.
void Timers::run() {
  std::unique_lock lock(mutex_);
  while (!stops_) {
    const Time next = functions_.empty() ? Time::max() : functions_.begin()->first.first;
    const Time now = base::Deadline::Clock::now();
    if (now < next) {
      sleeps_until_ = next;
      const auto is_earlier = [&] {
        return stops_ || (!functions_.empty() && functions_.begin()->first.first < next);
      };
      if (next == Time::max()) {
        base::wait_for_task(changed_, lock, is_earlier);
      } else {
        base::wait(changed_, lock, is_earlier, base::Deadline(next - now));
      }
      sleeps_until_ = Time::min();
      continue;
    }
    const std::function<void()> fn = std::move(functions_.begin()->second);
    functions_.erase(functions_.begin());
    lock.unlock();
    fn();
    lock.lock();
  }
}

}  // namespace cohort::rpc
