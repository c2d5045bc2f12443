// One thread owns the store; who asks puts a job in its only place, and waits for the answer until a
// deadline. Always: a job owns all that it uses, answer included. So who asks may leave, and a store that
// hangs keeps only its own thread. To set a timeout in LibTorch's store is not enough: it waits for an answer
// without a limit. A place that was left and stays taken beyond its answer time shows that the store is
// silent, and all later requests fail.
#include "cohort/comm/deadline_store.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/threads/wait.h"

namespace cohort::comm {
namespace {

using Bytes = std::vector<std::uint8_t>;
using Keys = std::vector<std::string>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using std::chrono::milliseconds;

// The store says itself that a wait was over, a moment after the time.
constexpr milliseconds kStoreSlack(250);

base::Deadline& deadline_of_thread() {
  thread_local base::Deadline deadline = base::Deadline::never();
  return deadline;
}

}  // namespace

StoreDeadline::StoreDeadline(base::Deadline deadline) : before_(deadline_of_thread()) {
  deadline_of_thread() = before_.sooner(deadline);
}

StoreDeadline::~StoreDeadline() {
  deadline_of_thread() = before_;
}

base::Deadline StoreDeadline::current() {
  return deadline_of_thread();
}

// The thread that asks the store, and what it shares with those who ask it.
struct DeadlineStore::Worker {
  Worker(StorePtr of, std::string called) : store(std::move(of)), name(std::move(called)) {}

  StorePtr store;
  const std::string name;

  std::mutex mutex;  // of what follows
  std::condition_variable changed;
  std::function<void()> job;                            // null: nobody's turn
  const char* what = "";                                // the job is
  base::Deadline answers_by = base::Deadline::never();  // it, unless the store is silent
  bool is_left = false;                                 // nobody waits for the job any more
  bool is_silent = false;
  bool is_stopped = false;

  [[noreturn]] void throw_silent() const {
    throw TimeoutError("comm.store", base::concat(name, " has not answered a request (", what, ")"),
                       "look whether its host is reached, and its process runs");
  }
  void take_turn(std::unique_lock<std::mutex>& lock, const char* wanted, base::Deadline deadline);
  void begin(const char* request, std::function<void()> body, milliseconds answer_time);
  void wait_for_answer(std::unique_lock<std::mutex>& lock, base::Deadline deadline);

  static void run(const std::shared_ptr<Worker>& self) {
    for (std::unique_lock lock(self->mutex);;) {
      base::wait_for_task(self->changed, lock, [&] { return self->job != nullptr || self->is_stopped; });
      if (self->job == nullptr) break;
      // The job stays in its place while it runs, and so marks the store as busy.
      const std::function<void()> body = self->job;
      lock.unlock();
      body();
      lock.lock();
      self->job = nullptr;
      self->changed.notify_all();
    }
    self->store.reset();  // closing may hang as well
  }
};

// A request of another thread is no silence of the store, however long it takes, as long as that thread waits
// for it. One that was left is, once it has taken longer than a store takes.
void DeadlineStore::Worker::take_turn(std::unique_lock<std::mutex>& lock, const char* wanted,
                                      base::Deadline deadline) {
  for (;;) {
    if (is_silent) throw_silent();
    if (job == nullptr && !deadline.expired()) return;
    if (job != nullptr && is_left && answers_by.expired()) {
      is_silent = true;
      changed.notify_all();
      throw_silent();
    }
    if (deadline.expired()) {
      throw TimeoutError(
          "comm.store",
          base::concat("timed out before ", name, " could be asked (", wanted, ")",
                       job == nullptr ? "" : base::concat(", busy with another request: ", what)),
          "a longer timeout");
    }
    const bool was_left = is_left;
    base::wait(
        changed, lock, [&] { return job == nullptr || is_silent || is_left != was_left; },
        is_left ? deadline.sooner(answers_by) : deadline);
  }
}

void DeadlineStore::Worker::begin(const char* request, std::function<void()> body, milliseconds answer_time) {
  job = std::move(body);
  what = request;
  answers_by = base::Deadline(answer_time);
  is_left = false;
  changed.notify_all();
}

void DeadlineStore::Worker::wait_for_answer(std::unique_lock<std::mutex>& lock, base::Deadline deadline) {
  const auto is_done = [this] { return job == nullptr; };
  if (base::wait(changed, lock, is_done, deadline)) return;
  is_left = true;
  // This caller may have had less time than a store needs: only the store's own time counts against it.
  is_silent = answers_by.expired();
  changed.notify_all();
  throw_silent();
}

DeadlineStore::DeadlineStore(StorePtr store, std::string name, Waiting waiting)
    : worker_(std::make_shared<Worker>(std::move(store), std::move(name))), waiting_(waiting) {
  // Detached, since a store that hangs would hold whoever joins. The worker shares its state with the thread.
  std::thread([worker = worker_] { Worker::run(worker); }).detach();
}

DeadlineStore::~DeadlineStore() {
  {
    const std::lock_guard lock(worker_->mutex);
    worker_->is_stopped = true;
  }
  worker_->changed.notify_all();
}

// `body` must own what it uses: it may continue when nobody waits for it any more.
template <typename Body>
auto DeadlineStore::ask(const char* what, milliseconds most, Body body, Waits waits) {
  using Result = std::invoke_result_t<Body&, c10d::Store&>;
  using Value = std::conditional_t<std::is_void_v<Result>, bool, Result>;
  struct Answer {
    std::optional<Value> value;
    std::exception_ptr error;
  };
  const auto answer = std::make_shared<Answer>();
  most = std::min(most, kLongestTime);
  const base::Deadline deadline = base::Deadline(most + kStoreSlack).sooner(StoreDeadline::current());
  std::unique_lock lock(worker_->mutex);
  worker_->take_turn(lock, what, deadline);
  // Half of the slack: less than the one who asks waits.
  const milliseconds answer_time =
      waits == Waits::kForKey ? most + kStoreSlack / 2 : std::min(kAnswerTime, most + kStoreSlack / 2);
  worker_->begin(
      what,
      // The bare pointer is safe: the thread drops its store only after its last job.
      [answer, body = std::move(body), store = worker_->store.get()]() mutable {
        try {
          if constexpr (std::is_void_v<Result>) {
            body(*store);
            answer->value = true;
          } else {
            answer->value = body(*store);
          }
        } catch (...) {
          answer->error = std::current_exception();
        }
      },
      answer_time);
  worker_->wait_for_answer(lock, deadline);
  if (answer->error) std::rethrow_exception(answer->error);
  return std::move(*answer->value);
}

template <typename Body>
auto DeadlineStore::ask(const char* what, Body body, Waits waits) {
  return ask(what, getTimeout(), std::move(body), waits);
}

StorePtr DeadlineStore::clone() {
  // The clone has a connection and a thread of its own, so who waits there delays nobody here.
  StorePtr copy = ask("clone", [](c10d::Store& store) { return store.clone(); });
  auto clone = c10::make_intrusive<DeadlineStore>(std::move(copy), worker_->name, waiting_);
  clone->timeout_ = timeout_;
  return clone;
}

void DeadlineStore::set(const std::string& key, const Bytes& value) {
  ask("set", [key, value](c10d::Store& store) { store.set(key, value); });
}

Bytes DeadlineStore::compareSet(const std::string& key, const Bytes& expected, const Bytes& value) {
  return ask("compareSet",
             [key, expected, value](c10d::Store& store) { return store.compareSet(key, expected, value); });
}

Bytes DeadlineStore::get(const std::string& key) {
  return ask("get", [key](c10d::Store& store) { return store.get(key); }, Waits::kForKey);
}

std::int64_t DeadlineStore::add(const std::string& key, std::int64_t value) {
  return ask("add", [key, value](c10d::Store& store) { return store.add(key, value); });
}

bool DeadlineStore::deleteKey(const std::string& key) {
  return ask("deleteKey", [key](c10d::Store& store) { return store.deleteKey(key); });
}

bool DeadlineStore::check(const Keys& keys) {
  return ask("check", [keys](c10d::Store& store) { return store.check(keys); });
}

std::int64_t DeadlineStore::getNumKeys() {
  return ask("getNumKeys", [](c10d::Store& store) { return store.getNumKeys(); });
}

void DeadlineStore::wait(const Keys& keys) {
  wait(keys, getTimeout());
}

void DeadlineStore::wait(const Keys& keys, const milliseconds& timeout) {
  if (waiting_ == Waiting::kByAsking) {
    // A wait within the store would keep its only place until the key comes.
    if (base::poll_until([&] { return check(keys); }, base::Deadline(timeout))) return;
    throw TimeoutError("comm.store",
                       base::concat("timed out: ", worker_->name, " has no '", keys.front(), "'"));
  }
  ask("wait", timeout, [keys, timeout](c10d::Store& store) { store.wait(keys, timeout); }, Waits::kForKey);
}

const milliseconds& DeadlineStore::getTimeout() const noexcept {
  return timeout_;
}

void DeadlineStore::setTimeout(const milliseconds& timeout) {
  timeout_ = std::min(timeout, kLongestTime);
  ask("setTimeout", [timeout = timeout_](c10d::Store& store) { store.setTimeout(timeout); });
}

void DeadlineStore::append(const std::string& key, const Bytes& value) {
  ask("append", [key, value](c10d::Store& store) { store.append(key, value); });
}

std::vector<Bytes> DeadlineStore::multiGet(const Keys& keys) {
  return ask("multiGet", [keys](c10d::Store& store) { return store.multiGet(keys); }, Waits::kForKey);
}

void DeadlineStore::multiSet(const Keys& keys, const std::vector<Bytes>& values) {
  ask("multiSet", [keys, values](c10d::Store& store) { store.multiSet(keys, values); });
}

bool DeadlineStore::hasExtendedApi() const {
  return worker_->store->hasExtendedApi();
}

void DeadlineStore::queuePush(const std::string& key, const Bytes& value) {
  ask("queuePush", [key, value](c10d::Store& store) { store.queuePush(key, value); });
}

Bytes DeadlineStore::queuePop(const std::string& key, bool block) {
  return ask(
      "queuePop", [key, block](c10d::Store& store) { return store.queuePop(key, block); }, Waits::kForKey);
}

std::int64_t DeadlineStore::queueLen(const std::string& key) {
  return ask("queueLen", [key](c10d::Store& store) { return store.queueLen(key); });
}

Keys DeadlineStore::listKeys() {
  return ask("listKeys", [](c10d::Store& store) { return store.listKeys(); });
}

}  // namespace cohort::comm
