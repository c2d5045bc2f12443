// One thread calls the functions, in the order of their times. Deadlines lead to functions of the program:
// callbacks of std::stop_token, and of futures. These may take long, and other deadlines must not wait for
// them. So a second thread watches the first one while that is in a function. After 1 ms it takes the first
// one's place, which ends after its function. The next function that is called has a new thread watch it.
//
// The watcher is woken at most once for each millisecond in which functions are called. A function that is
// removed in time, as nearly all are, wakes nobody. Threads of a pool in place of this would make an error
// late where all of them are busy.
#include "cohort/rpc/internal/timers.h"

#include <condition_variable>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "cohort/base/threads/wait.h"

namespace cohort::rpc {
namespace {

constexpr std::chrono::milliseconds kMaxTime(
    1);  // of a function, until another thread takes the place of its own
constexpr std::chrono::seconds kMaxTimeToStop(5);  // for functions that run

thread_local const void* timers_of_thread = nullptr;

}  // namespace

// The threads' too: a function that they run may destroy the timers.
struct Timers::Shared : std::enable_shared_from_this<Timers::Shared> {
  using Lock = std::unique_lock<std::mutex>;
  void start(void (Shared::*role)(Lock&));
  void call_functions(Lock& lock);
  void sleep_before(Time next, Lock& lock);
  void watch(Lock& lock);
  void wake_watcher() noexcept;

  std::mutex mutex;
  std::condition_variable changed, called, ended;  // for who calls functions, for the watcher, for stop()
  std::map<Key, std::function<void()>> functions;
  std::uint64_t next = 0;
  Time sleeps_until = Time::min();  // who calls functions; a time before that wakes it
  bool stops = false;
  int num_threads = 0;
  std::uint64_t turn = 0;        // which thread calls functions: the one that came last
  Time called_at = Time::max();  // its function; max: it is in none
  bool has_watcher = false, watcher_sleeps = false;
};

Timers::Timers() : shared_(std::make_shared<Shared>()) {
  const std::lock_guard lock(shared_->mutex);
  shared_->start(&Shared::call_functions);
}

Timers::~Timers() {
  stop();
  std::map<Key, std::function<void()>> dropped;  // without the mutex
  const std::lock_guard lock(shared_->mutex);
  dropped.swap(shared_->functions);
}

void Timers::stop() {
  const auto shared = shared_;  // where it is destroyed by its own function
  std::unique_lock lock(shared->mutex);
  shared->stops = true;
  shared->changed.notify_all();
  shared->called.notify_all();
  if (timers_of_thread == shared.get()) return;
  base::wait(shared->ended, lock, [&] { return shared->num_threads == 0; }, base::Deadline(kMaxTimeToStop));
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

// Under the mutex.
void Timers::Shared::start(void (Shared::*role)(Lock&)) {
  std::thread([self = shared_from_this(), role] {
    timers_of_thread = self.get();
    Lock lock(self->mutex);
    (self.get()->*role)(lock);
    --self->num_threads;
    self->ended.notify_all();
  }).detach();
  ++num_threads;
}

void Timers::Shared::call_functions(Lock& lock) {
  const std::uint64_t own_turn = ++turn;
  while (!stops && turn == own_turn) {
    const Time first = functions.empty() ? Time::max() : functions.begin()->first.first;
    const Time now = base::Deadline::Clock::now();
    if (now < first) {
      sleep_before(first, lock);
      continue;
    }
    std::function<void()> fn = std::move(functions.begin()->second);
    functions.erase(functions.begin());
    called_at = now;
    wake_watcher();
    lock.unlock();
    fn();
    fn = nullptr;  // without the mutex: what it holds may have a destructor that adds or removes one
    lock.lock();
    if (turn == own_turn) called_at = Time::max();
  }
}

// A function that is removed wakes nobody: the thread wakes at its time, and finds the next. So calls that
// are answered in time, which is nearly all, cost no wake.
void Timers::Shared::sleep_before(Time first, Lock& lock) {
  sleeps_until = first;
  const auto is_earlier = [&] {
    return stops || (!functions.empty() && functions.begin()->first.first < first);
  };
  if (first == Time::max()) {
    base::wait_for_task(changed, lock, is_earlier);
  } else {
    base::wait(changed, lock, is_earlier, base::Deadline(first - base::Deadline::Clock::now()));
  }
  sleeps_until = Time::min();
}

void Timers::Shared::watch(Lock& lock) {
  while (!stops) {
    const Time seen = called_at;
    if (seen == Time::max()) {
      watcher_sleeps = true;
      base::wait_for_task(called, lock, [this] { return stops || called_at != Time::max(); });
      watcher_sleeps = false;
      continue;
    }
    const base::Deadline until(seen + kMaxTime - base::Deadline::Clock::now());
    base::wait(called, lock, [this] { return stops; }, until);
    if (stops || called_at != seen) continue;
    has_watcher = false;
    called_at = Time::max();
    return call_functions(lock);
  }
}

// Where no thread can be had, the function holds the others up.
void Timers::Shared::wake_watcher() noexcept {
  if (watcher_sleeps) called.notify_one();
  if (has_watcher) return;
  try {
    start(&Shared::watch);
    has_watcher = true;
  } catch (...) {  // std::system_error; the next function tries again
  }
}

}  // namespace cohort::rpc
