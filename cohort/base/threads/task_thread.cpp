// There are three records, and each has one lock:
// - Work: whether it is done, and whether nobody waits for it any more (then its thread is late until it is
//   done). Both change under the work's mutex, so that a thread is never late for what it has ended.
// - Shared: the queue of one thread, under its mutex.
// - Shared::waits_for: for which work a TaskThread waits, within what it runs; under waiting_mutex(). Whoever
//   comes to wait follows these from the thread that it will wait for. A chain that leads back is a circle.
// No lock is taken within another, and functions are run and destroyed under none.
#include "cohort/base/threads/task_thread.h"

#include <pthread.h>

#include <algorithm>
#include <deque>
#include <future>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/threads/spin.h"
#include "cohort/base/threads/wait.h"
#include "cohort/base/timeline.h"

namespace cohort::base {
namespace task_detail {

// Owned by the TaskThread, its thread and every piece of work, so that a thread left behind finds it alive.
struct Shared {
  explicit Shared(TaskThread::Options given) : options(std::move(given)) {}

  void run();
  std::shared_ptr<PendingTask> take();
  void give_up();
  static void own(PendingTask& work, std::shared_ptr<Shared> thread) { work.thread_ = std::move(thread); }
  // The thread for whose work this one waits; none where that wait is over and this one is yet to wake.
  Shared* waits_for_thread() const {
    const bool is_over = waits_for == nullptr || waits_for->done() || waits_until.expired();
    return is_over ? nullptr : waits_for->thread_.get();
  }
  std::chrono::microseconds spin(Deadline deadline) const {
    if (shares_cores.load(std::memory_order_relaxed)) return std::chrono::microseconds(0);
    return std::min(options.spin, std::chrono::floor<std::chrono::microseconds>(deadline.remaining()));
  }
  std::string busy_with() const {
    const char* const what = current.load(std::memory_order_acquire);
    return what == nullptr ? std::string("idle") : concat("busy with ", what);
  }

  const TaskThread::Options options;
  std::atomic<int> queued{0};
  std::atomic<bool> stopping{false};  // changes under mutex
  std::atomic<bool> shares_cores{false};
  std::atomic<int> num_late{0};       // functions that are abandoned and not done
  std::atomic<bool> is_stuck{false};  // the one that runs is
  std::atomic<const char*> current{nullptr};
  // What the thread waits for within what it runs; under waiting_mutex().
  const PendingTask* waits_for = nullptr;
  Deadline waits_until = Deadline::never();

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<PendingTask>> queue;  // under mutex, as all below
  std::weak_ptr<PendingTask> taken;                // last
  bool given_up = false;
  bool running = true;
};

namespace {

thread_local Shared* current_thread = nullptr;

// Says which TaskThread this is until the thread ends, to destructors of its thread_local objects too.
struct CurrentThread {
  explicit CurrentThread(std::shared_ptr<Shared> shared) : thread(std::move(shared)) {
    current_thread = thread.get();
  }
  ~CurrentThread() { current_thread = nullptr; }
  CurrentThread(const CurrentThread&) = delete;
  CurrentThread& operator=(const CurrentThread&) = delete;

  const std::shared_ptr<Shared> thread;
};

std::mutex& waiting_mutex() {
  static std::mutex& mutex = *new std::mutex;  // leaked: threads may outlive statics
  return mutex;
}

// Which threads there are: those with a core in common do not spin.
class Threads {
 public:
  void add(Shared* thread) {
    const std::lock_guard lock(mutex_);
    threads_.push_back(thread);
    update();
  }
  void remove(Shared* thread) {
    const std::lock_guard lock(mutex_);
    std::erase(threads_, thread);
    update();
  }

 private:
  void update() {
    for (Shared* thread : threads_) {
      const auto meets = [&](const Shared* other) {
        return other != thread && thread->options.cpus.intersects(other->options.cpus);
      };
      thread->shares_cores = std::any_of(threads_.begin(), threads_.end(), meets);
    }
  }

  std::mutex mutex_;
  std::vector<Shared*> threads_;
};

Threads& threads() {
  static Threads& all = *new Threads;
  return all;
}

// The calling thread waits for `work` of `other` during its scope. No wait of a circle ends before a
// deadline.
class Waits {
 public:
  Waits(const PendingTask& work, Shared* other, Deadline deadline) : self_(current_thread) {
    if (self_ == nullptr) return;
    const std::lock_guard lock(waiting_mutex());
    // It may have ended since wait() looked, and its thread wait for this one by now, in later work.
    if (work.done() || deadline.expired()) {
      self_ = nullptr;
      return;
    }
    for (const Shared* next = other; next != nullptr; next = next->waits_for_thread()) {
      if (next != self_) continue;
      throw UsageError("base.task_thread",
                       concat("thread ", self_->options.name, ", ", self_->busy_with(), ", would wait for ",
                              work.what(), " on thread ", other->options.name,
                              other == self_ ? ", which is itself" : ", which waits for it in turn"),
                       "parts that call each other in one direction only, or one place for both");
    }
    self_->waits_for = &work;
    self_->waits_until = deadline;
  }
  ~Waits() {
    if (self_ == nullptr) return;
    const std::lock_guard lock(waiting_mutex());
    self_->waits_for = nullptr;
  }
  Waits(const Waits&) = delete;
  Waits& operator=(const Waits&) = delete;

 private:
  Shared* self_;
};

}  // namespace

bool PendingTask::wait(Deadline deadline) {
  if (done()) return true;
  const Waits waits(*this, thread_.get(), deadline);
  if (spin_until([this] { return done(); }, thread_->spin(deadline))) return true;
  std::unique_lock lock(mutex_);
  const auto is_done = [this] { return done(); };
  return base::wait(finished_, lock, is_done, deadline);
}

bool PendingTask::abandon() {
  const std::lock_guard lock(mutex_);
  if (done()) return false;
  if (!std::exchange(is_abandoned_, true)) ++thread_->num_late;
  if (is_running_) thread_->is_stuck = true;
  return true;
}

void PendingTask::wait_or_throw(Deadline deadline) {
  if (wait(deadline) || !abandon()) {
    if (error_) std::rethrow_exception(error_);
    return;
  }
  const Shared& thread = *thread_;
  const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.elapsed()).count();
  throw TimeoutError("base.task_thread",
                     concat("waited ", waited, " ms for ", what_, " on thread ", thread.options.name,
                            ", which is ", thread.busy_with()),
                     "a longer timeout where that is slow and not stuck");
}

void PendingTask::run() noexcept {
  std::exception_ptr error;
  {
    const std::lock_guard lock(mutex_);
    is_running_ = true;
    if (is_abandoned_) thread_->is_stuck = true;
  }
  try {
    const TimelineScope scope(what_);
    execute();
  } catch (...) {
    error = std::current_exception();
  }
  finish(std::move(error));
}

void PendingTask::finish(std::exception_ptr error) noexcept {
  drop();
  error_ = std::move(error);
  {
    const std::lock_guard lock(mutex_);
    if (is_abandoned_) --thread_->num_late;
    if (is_running_) thread_->is_stuck = false;
    done_.store(true, std::memory_order_release);
  }
  finished_.notify_all();
}

std::shared_ptr<PendingTask> Shared::take() {
  spin_until([this] { return queued.load(std::memory_order_acquire) > 0 || stopping; },
             spin(Deadline::never()));
  std::unique_lock lock(mutex);
  wait_for_task(changed, lock, [this] { return !queue.empty() || stopping; });
  if (given_up || queue.empty()) return nullptr;
  std::shared_ptr<PendingTask> work = std::move(queue.front());
  queue.pop_front();
  taken = work;
  queued.fetch_sub(1, std::memory_order_release);
  return work;
}

void Shared::run() {
  while (const std::shared_ptr<PendingTask> work = take()) {
    current.store(work->what(), std::memory_order_release);
    work->run();
    current.store(nullptr, std::memory_order_release);
  }
  threads().remove(this);
  {
    const std::lock_guard lock(mutex);
    running = false;
  }
  changed.notify_all();
}

// What has not begun fails; the thread ends after what it is in.
void Shared::give_up() {
  std::deque<std::shared_ptr<PendingTask>> left;
  {
    const std::lock_guard lock(mutex);
    given_up = true;
    stopping = true;
    left.swap(queue);
    queued = 0;
  }
  changed.notify_all();
  for (const auto& work : left) {
    work->finish(std::make_exception_ptr(
        TimeoutError("base.task_thread", concat(work->what(), " was not begun: thread ", options.name,
                                                " was given up, as it is ", busy_with()))));
  }
}

}  // namespace task_detail

TaskThread::TaskThread(Options options) : shared_(std::make_shared<task_detail::Shared>(std::move(options))) {
  std::promise<void> begun;
  std::future<void> has_begun = begun.get_future();
  thread_ = std::thread([begun = std::move(begun), shared = shared_]() mutable {
    static thread_local const task_detail::CurrentThread current(shared);
    try {
      const Options& with = shared->options;
      ::pthread_setname_np(::pthread_self(), with.name.substr(0, 15).c_str());
      Timeline::name_thread(with.name);
      if (!with.cpus.empty()) with.cpus.pin_current_thread();
      shared->current = "its start";
      if (with.start) with.start();
      shared->current = nullptr;
      task_detail::threads().add(shared.get());
      begun.set_value();
    } catch (...) {
      begun.set_exception(std::current_exception());
      return;
    }
    shared->run();
  });
  const Deadline deadline(shared_->options.start_time);
  if (!wait(has_begun, deadline)) {
    shared_->give_up();
    thread_.detach();
    deadline.check("base.task_thread", concat("thread ", name(), " to begin"));
  }
  try {
    has_begun.get();
  } catch (...) {
    thread_.join();
    throw;
  }
}

TaskThread::~TaskThread() {
  stop(is_late() ? std::chrono::seconds(0) : std::chrono::seconds(5));
}

const std::string& TaskThread::name() const {
  return shared_->options.name;
}
bool TaskThread::is_current() const {
  return task_detail::current_thread == shared_.get();
}
bool TaskThread::shares_cores() const {
  return shared_->shares_cores;
}
bool TaskThread::is_late() const {
  return shared_->num_late > 0;
}
bool TaskThread::is_stuck() const {
  if (shared_->is_stuck) return true;
  if (shared_->num_late == 0) return false;
  // Somebody gave up behind a function whose Pending is gone: nobody can give that one up.
  std::shared_ptr<task_detail::PendingTask> work;  // destroyed without the lock
  {
    const std::lock_guard lock(shared_->mutex);
    work = shared_->taken.lock();
  }
  return work && work.use_count() == 2 && !work->done();
}

void TaskThread::post(std::shared_ptr<task_detail::PendingTask> work) {
  const auto shared = shared_;  // its last function may end first, and this TaskThread with it
  task_detail::Shared::own(*work, shared);
  {
    const std::lock_guard lock(shared->mutex);
    if (shared->stopping) {
      throw UsageError("base.task_thread", concat(work->what(), " was given to thread ", shared->options.name,
                                                  ", which has been stopped"));
    }
    shared->queue.push_back(std::move(work));
    shared->queued.fetch_add(1, std::memory_order_release);
  }
  shared->changed.notify_one();
}

bool TaskThread::stop(std::chrono::milliseconds patience) {
  {
    const std::lock_guard lock(shared_->mutex);
    if (!thread_.joinable()) return !shared_->running;  // it was stopped before
    shared_->stopping = true;
  }
  shared_->changed.notify_all();
  if (is_current()) {  // the last reference to it was within what it runs
    thread_.detach();
    return false;
  }
  {
    std::unique_lock lock(shared_->mutex);
    wait(shared_->changed, lock, [this] { return !shared_->running; }, Deadline(patience));
    if (!shared_->running) {
      lock.unlock();
      thread_.join();
      return true;
    }
  }
  shared_->give_up();
  thread_.detach();
  return false;
}

}  // namespace cohort::base
