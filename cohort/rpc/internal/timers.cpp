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
  bool is_first = false;
  Key key;
  {
    const std::lock_guard lock(mutex_);
    key = {time, next_++};
    functions_.emplace(key, std::move(fn));
    is_first = functions_.begin()->first == key;
  }
  if (is_first) changed_.notify_one();
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

void Timers::run() {
  std::unique_lock lock(mutex_);
  while (!stops_) {
    if (functions_.empty()) {
      base::wait_for_task(changed_, lock, [this] { return stops_ || !functions_.empty(); });
      continue;
    }
    const Time next = functions_.begin()->first.first;
    const Time now = base::Deadline::Clock::now();
    if (now < next) {
      const auto is_earlier = [&] {
        return stops_ || functions_.empty() || functions_.begin()->first.first < next;
      };
      base::wait(changed_, lock, is_earlier, base::Deadline(next - now));
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
