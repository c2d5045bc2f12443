#include "cohort/rpc/internal/timers.h"

#include <utility>

#include "cohort/base/threads/wait.h"

namespace cohort::rpc {

Timers::Timers() : thread_([shared = shared_] { run(*shared); }) {}

Timers::~Timers() {
  stop();
}

void Timers::stop() {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->stops = true;
  }
  shared_->changed.notify_one();
  if (thread_.get_id() == std::this_thread::get_id()) return thread_.detach();
  if (thread_.joinable()) thread_.join();
}

Timers::Key Timers::add(Time time, std::function<void()> fn) {
  Key key;
  bool wakes = false;
  {
    const std::lock_guard lock(shared_->mutex);
    key = {time, shared_->next++};
    shared_->functions.emplace(key, std::move(fn));
    wakes = time < shared_->sleeps_until;
  }
  if (wakes) shared_->changed.notify_one();
  return key;
}

void Timers::remove(const Key& key) {
  std::function<void()> dropped;  // without the mutex
  const std::lock_guard lock(shared_->mutex);
  const auto found = shared_->functions.find(key);
  if (found == shared_->functions.end()) return;
  dropped = std::move(found->second);
  shared_->functions.erase(found);
}

// A function that is removed wakes nobody: the thread wakes at its time, and finds the next. So calls that are answered in
// time, which is nearly all, cost no wake.
void Timers::run(Shared& shared) {
  auto& functions = shared.functions;
  std::unique_lock lock(shared.mutex);
  while (!shared.stops) {
    const Time next = functions.empty() ? Time::max() : functions.begin()->first.first;
    const Time now = base::Deadline::Clock::now();
    if (now < next) {
      shared.sleeps_until = next;
      const auto is_earlier = [&] {
        return shared.stops || (!functions.empty() && functions.begin()->first.first < next);
      };
      if (next == Time::max()) {
        base::wait_for_task(shared.changed, lock, is_earlier);
      } else {
        base::wait(shared.changed, lock, is_earlier, base::Deadline(next - now));
      }
      shared.sleeps_until = Time::min();
      continue;
    }
    std::function<void()> fn = std::move(functions.begin()->second);
    functions.erase(functions.begin());
    lock.unlock();
    fn();
    fn = nullptr;  // without the mutex: what it holds may have a destructor that adds or removes one
    lock.lock();
  }
}

}  // namespace cohort::rpc
