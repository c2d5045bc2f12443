// There are three records, and each has one lock:
// - QueuedTask: whether it is done, and whether nobody waits for it any more (then its thread is late until
//   it is done). Both change under the task's mutex, so that a thread is never late for what it has ended.
// - Shared: the queue of one thread, under its mutex.
// - Shared::waits_for: for which task a SerialQueue waits, within what it runs; under waiting_mutex().
//   Whoever comes to wait follows these from the thread that it will wait for. A chain that leads back is a
//   circle.
// No lock is taken within another, and functions are run and destroyed under none.
#include "cohort/base/threads/serial_queue.h"

#include <pthread.h>

#include <algorithm>
#include <deque>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/log.h"
#include "cohort/base/threads/spin.h"
#include "cohort/base/threads/wait.h"
#include "cohort/base/timeline.h"

namespace cohort::base {
namespace serial_queue_detail {

// Owned by the SerialQueue, its thread and every task, so that a thread left behind finds it alive.
struct Shared {
  explicit Shared(SerialQueue::Options given) : options(std::move(given)) {}

  void run();
  std::shared_ptr<QueuedTask> take();
  void run_idle();
  void give_up();
  static void own(QueuedTask& task, std::shared_ptr<Shared> queue) { task.queue_ = std::move(queue); }
  // The thread for whose task this one waits; none where that wait is over and this one is yet to wake.
  Shared* waits_for_thread() const {
    const bool is_over = waits_for == nullptr || waits_for->done() || waits_until.expired();
    return is_over ? nullptr : waits_for->queue_.get();
  }
  std::chrono::microseconds spin(Deadline deadline) const {
    if (shares_cores.load(std::memory_order_relaxed)) return std::chrono::microseconds(0);
    return std::min(options.spin, std::chrono::floor<std::chrono::microseconds>(deadline.remaining()));
  }
  std::string busy_with() const {
    const char* const what = current.load(std::memory_order_acquire);
    return what == nullptr ? std::string("idle") : concat("busy with ", what);
  }

  const SerialQueue::Options options;
  std::atomic<int> queued{0};
  std::atomic<bool> stopping{false};  // changes under mutex
  std::atomic<bool> shares_cores{false};
  std::atomic<int> num_late{0};       // functions that are abandoned and not done
  std::atomic<bool> is_stuck{false};  // the one that runs is
  std::atomic<const char*> current{nullptr};
  // What the thread waits for within what it runs; under waiting_mutex().
  const QueuedTask* waits_for = nullptr;
  Deadline waits_until = Deadline::never();

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<QueuedTask>> queue;  // under mutex, as all below
  std::weak_ptr<QueuedTask> taken;                // last
  bool given_up = false;
  bool running = true;
  bool has_idle = options.idle != nullptr;  // of the thread alone
};

namespace {

thread_local Shared* current_thread = nullptr;

// Says which SerialQueue this is until the thread ends, to destructors of its thread_local objects too.
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
  // For all of them, since a thread that ends may leave another one alone on its core.
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

// The calling thread waits for `task` of `other` during its scope. No wait of a circle ends before a
// deadline.
class Waits {
 public:
  Waits(const QueuedTask& task, Shared* other, Deadline deadline) : self_(current_thread) {
    if (self_ == nullptr) return;
    const std::lock_guard lock(waiting_mutex());
    // It may have ended since wait() looked, and its thread wait for this one by now, in a later task.
    if (task.done() || deadline.expired()) {
      self_ = nullptr;
      return;
    }
    for (const Shared* next = other; next != nullptr; next = next->waits_for_thread()) {
      if (next != self_) continue;
      throw UsageError("base.serial_queue",
                       concat("thread ", self_->options.name, ", ", self_->busy_with(), ", would wait for ",
                              task.what(), " on thread ", other->options.name,
                              other == self_ ? ", which is itself" : ", which waits for it in turn"),
                       "parts that call each other in one direction only, or one place for both");
    }
    self_->waits_for = &task;
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

bool QueuedTask::wait(Deadline deadline) {
  if (done()) return true;
  const Waits waits(*this, queue_.get(), deadline);
  if (spin_until([this] { return done(); }, queue_->spin(deadline))) return true;
  return Task::wait(deadline);
}

std::string QueuedTask::description() const {
  return concat(what(), " on thread ", queue_->options.name, ", which is ", queue_->busy_with());
}

const char* QueuedTask::timeline_name() const {
  return queue_->options.in_timeline ? what() : nullptr;
}

// It runs although nobody waits, unlike in a pool: what the queue runs after it may build on it.
bool QueuedTask::on_begin() noexcept {
  if (is_abandoned()) queue_->is_stuck = true;
  return true;
}

void QueuedTask::on_abandoned() noexcept {
  ++queue_->num_late;
  if (is_running()) queue_->is_stuck = true;
}

void QueuedTask::on_done() noexcept {
  if (is_abandoned()) --queue_->num_late;
  if (is_running()) queue_->is_stuck = false;
}

std::shared_ptr<QueuedTask> Shared::take() {
  // On the count and not on the queue, so that spinning takes no mutex.
  spin_until([this] { return queued.load(std::memory_order_acquire) > 0 || stopping; },
             spin(Deadline::never()));
  std::unique_lock lock(mutex);
  const auto is_wanted = [this] { return !queue.empty() || stopping; };
  while (has_idle && !wait(changed, lock, is_wanted, Deadline(options.idle_time))) {
    lock.unlock();
    run_idle();
    lock.lock();
  }
  wait_for_task(changed, lock, is_wanted);
  if (given_up || queue.empty()) return nullptr;
  std::shared_ptr<QueuedTask> task = std::move(queue.front());
  queue.pop_front();
  taken = task;
  queued.fetch_sub(1, std::memory_order_release);
  return task;
}

void Shared::run_idle() {
  current.store("its idle function", std::memory_order_release);
  try {
    options.idle();
  } catch (const std::exception& error) {
    log_error(concat("[base.serial_queue] the idle function of thread ", options.name,
                     " failed, and runs no more: ", message_of(error)));
    has_idle = false;
  } catch (...) {
    log_error(concat("[base.serial_queue] the idle function of thread ", options.name,
                     " failed, and runs no more"));
    has_idle = false;
  }
  current.store(nullptr, std::memory_order_release);
}

void Shared::run() {
  while (const std::shared_ptr<QueuedTask> task = take()) {
    current.store(task->what(), std::memory_order_release);
    task->run();
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
  std::deque<std::shared_ptr<QueuedTask>> left;
  {
    const std::lock_guard lock(mutex);
    given_up = true;
    stopping = true;
    left.swap(queue);
    queued = 0;
  }
  changed.notify_all();
  for (const auto& task : left) {
    task->end(std::make_exception_ptr(
        TimeoutError("base.serial_queue", concat(task->what(), " was not begun: thread ", options.name,
                                                 " was given up, as it is ", busy_with()))));
  }
}

}  // namespace serial_queue_detail

SerialQueue::SerialQueue(Options options)
    : shared_(std::make_shared<serial_queue_detail::Shared>(std::move(options))) {
  Promise<void> begun("a thread to begin");
  Future<void> has_begun = begun.future();
  thread_ = std::thread([begun = std::move(begun), shared = shared_]() mutable {
    static thread_local const serial_queue_detail::CurrentThread current(shared);
    try {
      const Options& with = shared->options;
      ::pthread_setname_np(::pthread_self(), with.name.substr(0, 15).c_str());
      if (with.in_timeline) Timeline::name_thread(with.name);
      if (!with.cpus.empty()) with.cpus.pin_current_thread();
      shared->current = "its start";
      if (with.start) with.start();
      shared->current = nullptr;
      serial_queue_detail::threads().add(shared.get());
      begun.set();
    } catch (...) {
      begun.set_error(std::current_exception());
      return;
    }
    shared->run();
  });
  const Deadline deadline(shared_->options.start_time);
  if (!has_begun.wait(deadline)) {
    shared_->give_up();
    thread_.detach();
    deadline.check("base.serial_queue", concat("thread ", name(), " to begin"));
  }
  try {
    has_begun.get(deadline);
  } catch (...) {
    thread_.join();
    throw;
  }
}

SerialQueue::~SerialQueue() {
  stop(is_late() ? std::chrono::seconds(0) : std::chrono::seconds(5));
}

const std::string& SerialQueue::name() const {
  return shared_->options.name;
}
bool SerialQueue::is_current() const {
  return serial_queue_detail::current_thread == shared_.get();
}
bool SerialQueue::shares_cores() const {
  return shared_->shares_cores;
}
int SerialQueue::num_queued() const {
  return shared_->queued.load(std::memory_order_acquire);
}

bool SerialQueue::is_late() const {
  return shared_->num_late > 0;
}
bool SerialQueue::is_stuck() const {
  if (shared_->is_stuck) return true;
  if (shared_->num_late == 0) return false;
  // Somebody gave up on what comes after a function whose Future is gone: nobody can give that one up.
  std::shared_ptr<serial_queue_detail::QueuedTask> task;  // destroyed without the lock
  {
    const std::lock_guard lock(shared_->mutex);
    task = shared_->taken.lock();
  }
  return task && task.use_count() == 2 && !task->done();
}

void SerialQueue::post(std::shared_ptr<serial_queue_detail::QueuedTask> task) {
  const auto shared = shared_;  // its last function may end first, and this SerialQueue with it
  serial_queue_detail::Shared::own(*task, shared);
  {
    const std::lock_guard lock(shared->mutex);
    if (shared->stopping) {
      throw UsageError("base.serial_queue", concat(task->what(), " was given to thread ",
                                                   shared->options.name, ", which has been stopped"));
    }
    shared->queue.push_back(std::move(task));
    shared->queued.fetch_add(1, std::memory_order_release);
  }
  shared->changed.notify_one();
}

bool SerialQueue::stop(std::chrono::milliseconds patience) {
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
