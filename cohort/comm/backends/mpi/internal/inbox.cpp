// Callers and the engine's thread share nothing but these lists and flags, under one mutex. The engine
// takes all news at once, and runs it without the mutex. A blocking task waits until the calls before it
// were taken, since a collective must not begin after it. Always: after close() no task is added, and
// stop() returns.
#include "cohort/comm/backends/mpi/internal/inbox.h"

#include <algorithm>
#include <utility>

#include "cohort/base/threads/wait.h"

namespace cohort::comm::mpi {
namespace {

using std::chrono::milliseconds;

}  // namespace

void Inbox::add_call(MpiWorkPtr call) {
  {
    const std::lock_guard lock(mutex_);
    calls_.push_back(std::move(call));
  }
  changed_.notify_one();
}

void Inbox::add_task(Task task) {
  {
    const std::lock_guard lock(mutex_);
    if (is_over_) return;
    tasks_.push_back(std::move(task));
  }
  changed_.notify_one();
}

void Inbox::add_blocking_task(Task task) {
  {
    const std::lock_guard lock(mutex_);
    if (!is_over_) blocking_tasks_.push_back(std::move(task));
  }
  changed_.notify_one();
}

void Inbox::set_exit_timeout(milliseconds timeout) {
  const std::lock_guard lock(mutex_);
  exit_timeout_ = std::max(exit_timeout_, timeout);
}

milliseconds Inbox::exit_timeout() const {
  const std::lock_guard lock(mutex_);
  return exit_timeout_;
}

void Inbox::stop(milliseconds grace, bool add_exit_timeout) {
  std::unique_lock lock(mutex_);
  is_stopping_ = true;
  changed_.notify_one();
  const milliseconds most = add_exit_timeout ? exit_timeout_ + grace : grace;
  base::wait(ended_, lock, [&] { return is_over_; }, base::Deadline(most));
}

Inbox::News Inbox::take() {
  News news;
  const std::lock_guard lock(mutex_);
  news.calls.swap(calls_);
  news.tasks.swap(tasks_);
  return news;
}

// A collective that was begun before the task may not have been taken yet.
Inbox::Task Inbox::take_blocking_task() {
  const std::lock_guard lock(mutex_);
  if (!calls_.empty() || blocking_tasks_.empty()) return nullptr;
  Task task = std::move(blocking_tasks_.front());
  blocking_tasks_.erase(blocking_tasks_.begin());
  return task;
}

bool Inbox::is_stopping() const {
  const std::lock_guard lock(mutex_);
  return is_stopping_;
}

void Inbox::wait(std::chrono::microseconds most) {
  std::unique_lock lock(mutex_);
  const auto has_news = [&] {
    return !calls_.empty() || !tasks_.empty() || !blocking_tasks_.empty() || is_stopping_;
  };
  base::wait(changed_, lock, has_news, base::Deadline(most));
}

void Inbox::close() {
  {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
  }
  ended_.notify_all();
}

}  // namespace cohort::comm::mpi
