// One queue, under the pool's mutex, feeds all threads. A thread is made where more functions wait than
// threads are idle, up to the limit. A function that waits for another one of the pool does not count: so
// there may be more threads than the limit, and those above it stay idle. A function that was abandoned while
// it runs raises the limit by one; its thread ends after it and lowers the limit again.
// Idle threads take turns, so under a small load none is idle for long. The pool counts how many were idle
// all the time of a period, and lets so many end in the next one, whichever comes by. A task's mutex may be
// held when the pool's is taken, never the other way round. Functions run and are destroyed under neither.
#include "cohort/base/threads/thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>

#include "cohort/base/error.h"
#include "cohort/base/threads/wait.h"
#include "cohort/base/timeline.h"

namespace cohort::base {
namespace thread_pool_detail {

// Owned by the pool, its threads and every task, so that a thread left behind finds it alive.
struct Shared : std::enable_shared_from_this<Shared> {
  explicit Shared(ThreadPool::Options given) : options(std::move(given)), limit(options.max_threads) {}

  void post(const std::shared_ptr<PooledTask>& task);
  void allow_one_more() noexcept;
  void begin_wait() noexcept;
  void end_wait() noexcept;
  void start_if_needed() noexcept;
  void start();
  void run();
  std::shared_ptr<PooledTask> take(bool& has_ended);
  void end_thread(bool was_stuck);
  bool wait_for_function(std::unique_lock<std::mutex>& lock);
  bool is_surplus();
  int stop(std::chrono::milliseconds patience);

  const ThreadPool::Options options;
  std::mutex mutex;                      // of what follows
  std::condition_variable changed;       // for idle threads: what wakes a single one must not wake stop()
  std::condition_variable thread_ended;  // for stop()
  std::deque<std::shared_ptr<PooledTask>> queue;
  std::map<std::thread::id, std::thread> threads;
  int alive = 0;
  std::size_t num_idle = 0;
  int num_waiting = 0;  // of the threads that are alive: their functions wait for others
  int limit;
  // Idle threads: the fewest of this period, and how many of them may end.
  std::size_t least_idle = 0, num_surplus = 0;
  Deadline::Clock::time_point period_end = Deadline::Clock::time_point::min();
  bool stopping = false;
  bool has_stopped = false;
};

namespace {

// The pool that the calling thread belongs to, for Waiting and stop().
thread_local Shared* pool_of_thread = nullptr;

}  // namespace

std::string PooledTask::description() const {
  return concat(what(), " in the thread pool ", pool_->options.name);
}

bool PooledTask::on_begin() noexcept {
  return !is_abandoned();
}

void PooledTask::on_abandoned() noexcept {
  // A task that has not begun holds no thread, and on_begin() drops it.
  if (!is_running()) return;
  is_stuck_ = true;
  pool_->allow_one_more();
}

void Shared::start() {
  std::thread thread([self = shared_from_this()] { self->run(); });
  const auto id = thread.get_id();
  threads.emplace(id, std::move(thread));
  ++alive;
}

void Shared::post(const std::shared_ptr<PooledTask>& task) {
  task->pool_ = shared_from_this();
  {
    const std::lock_guard lock(mutex);
    if (stopping) {
      throw UsageError("base.thread_pool", concat(task->what(), " was given to the thread pool ",
                                                  options.name, ", which has been stopped"));
    }
    queue.push_back(task);
    // Idle threads may have been woken for earlier tasks, and not have taken them yet. So their number is
    // compared with the length of the queue.
    if (num_idle < queue.size() && alive - num_waiting < limit) {
      try {
        start();
      } catch (const std::system_error& error) {
        queue.pop_back();
        throw SystemError("base.thread_pool",
                          concat("cannot start a thread for the pool ", options.name, ": ", error.what()));
      }
    }
  }
  changed.notify_one();
}

void Shared::allow_one_more() noexcept {
  {
    const std::lock_guard lock(mutex);
    ++limit;
    start_if_needed();
  }
  changed.notify_one();  // a thread above the old limit may be idle
}

void Shared::start_if_needed() noexcept {
  if (queue.empty() || num_idle >= queue.size() || alive - num_waiting >= limit) return;
  try {
    start();
  } catch (...) {  // the next post() tries again
  }
}

void Shared::begin_wait() noexcept {
  {
    const std::lock_guard lock(mutex);
    ++num_waiting;
    start_if_needed();
  }
  changed.notify_one();
}

// More functions may run than the limit now. take() begins none until there are fewer.
void Shared::end_wait() noexcept {
  const std::lock_guard lock(mutex);
  --num_waiting;
}

// Of an idle thread, under the mutex. Whether one of them may end: the pool has not needed it for a period.
bool Shared::is_surplus() {
  const auto now = Deadline::Clock::now();
  if (now >= period_end) {
    num_surplus = least_idle > options.num_kept ? least_idle - options.num_kept : 0;
    least_idle = num_idle;
    period_end = now + options.idle_time;
  }
  if (num_surplus == 0 || stopping) return false;
  --num_surplus;
  return true;
}

// False where the thread may end.
bool Shared::wait_for_function(std::unique_lock<std::mutex>& lock) {
  // Where functions have waited there are threads above the limit.
  const auto has_function = [this] {
    if (queue.empty()) return stopping;
    return alive - static_cast<int>(num_idle) - num_waiting < limit;
  };
  if (options.idle_time.count() == 0) {
    wait_for_task(changed, lock, has_function);
    return true;
  }
  while (!has_function()) {
    if (is_surplus()) return false;
    wait(changed, lock, has_function, Deadline(options.idle_time));
  }
  return true;
}

// Null where the thread is to end. `has_ended`: it does not count any more.
std::shared_ptr<PooledTask> Shared::take(bool& has_ended) {
  std::unique_lock lock(mutex);
  ++num_idle;
  has_ended = !wait_for_function(lock);
  --num_idle;
  least_idle = std::min(least_idle, num_idle);
  if (has_ended) end_thread(false);  // at once: post() may need another one
  if (has_ended || queue.empty()) return nullptr;
  std::shared_ptr<PooledTask> task = std::move(queue.front());
  queue.pop_front();
  return task;
}

// Under the mutex, by the thread. stop() joins those that are left.
void Shared::end_thread(bool was_stuck) {
  --alive;
  if (was_stuck) --limit;
  const auto self = threads.find(std::this_thread::get_id());
  if (self == threads.end() || (stopping && !was_stuck)) return;
  self->second.detach();
  threads.erase(self);
}

void Shared::run() {
  pool_of_thread = this;
  ::pthread_setname_np(::pthread_self(), options.name.substr(0, 15).c_str());
  Timeline::name_thread(options.name);
  if (options.start) options.start();
  bool was_stuck = false, has_ended = false;
  while (!was_stuck) {
    const std::shared_ptr<PooledTask> task = take(has_ended);
    if (task == nullptr) break;
    task->run();
    was_stuck = task->is_stuck_;
  }
  if (!has_ended) {
    const std::lock_guard lock(mutex);
    end_thread(was_stuck);
  }
  changed.notify_all();
  thread_ended.notify_all();
}

int Shared::stop(std::chrono::milliseconds patience) {
  std::map<std::thread::id, std::thread> ended;
  std::deque<std::shared_ptr<PooledTask>> left;
  int left_behind = 0;
  {
    std::unique_lock lock(mutex);
    if (has_stopped) return alive;
    stopping = true;
    changed.notify_all();
    // A pool that is stopped by its own function cannot wait for this function.
    if (pool_of_thread != this) {
      wait(thread_ended, lock, [this] { return alive == 0; }, Deadline(patience));
    }
    left_behind = alive;
    has_stopped = true;
    ended.swap(threads);  // now: what is stuck may have been replaced meanwhile
    left.swap(queue);
  }
  // All threads are joined, or none: join() of the one that hangs would not come back.
  for (auto& [id, thread] : ended) {
    if (left_behind == 0) {
      thread.join();
    } else {
      thread.detach();
    }
  }
  for (const auto& task : left) {
    task->end(std::make_exception_ptr(
        TimeoutError("base.thread_pool", concat(task->what(), " was not begun: the thread pool ",
                                                options.name, " was stopped before it came to it"))));
  }
  return left_behind;
}

}  // namespace thread_pool_detail

ThreadPool::ThreadPool(Options options)
    : shared_(std::make_shared<thread_pool_detail::Shared>(std::move(options))) {
  if (shared_->limit >= 1) return;
  throw UsageError("base.thread_pool", concat("max_threads of the pool ", shared_->options.name, " is ",
                                              shared_->limit, ", expected at least 1"));
}

ThreadPool::Waiting::Waiting() {
  if (thread_pool_detail::pool_of_thread == nullptr) return;
  shared_ = thread_pool_detail::pool_of_thread->shared_from_this();
  shared_->begin_wait();
}
ThreadPool::Waiting::~Waiting() {
  if (shared_ != nullptr) shared_->end_wait();
}

ThreadPool::~ThreadPool() {
  stop(std::chrono::seconds(5));
}

void ThreadPool::post(std::shared_ptr<thread_pool_detail::PooledTask> task) {
  shared_->post(task);
}

int ThreadPool::stop(std::chrono::milliseconds patience) {
  const auto shared = shared_;  // where it is destroyed by its own function
  return shared->stop(patience);
}

}  // namespace cohort::base
