// A SerialQueue has the store. Who asks waits until no request is under way, submits a request, and waits for
// the answer until a deadline. Always: a request owns all that it uses. So who asks may leave, and a store
// that hangs keeps only its own thread. To set a timeout in LibTorch's store is not enough: it waits for an
// answer without a limit. A request that was abandoned and has no answer after its answer time shows that the
// store is silent, and all later requests fail.
#include "cohort/comm/internal/deadline_store.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/threads/serial_queue.h"
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

// How long the thread of a store may take to begin.
milliseconds start_time_until_deadline() {
  const base::Deadline deadline = StoreDeadline::current();
  deadline.check("comm.store", "the thread of a store to begin", "a longer timeout");
  return std::min(base::SerialQueue::Options().start_time, milliseconds(deadline.remaining_ms()));
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
  Worker(StorePtr of, std::string called, milliseconds start_time)
      : store(std::move(of)),
        name(std::move(called)),
        queue({.name = "store",
               .spin = std::chrono::microseconds(0),
               .start_time = start_time,
               .in_timeline = false}) {}

  StorePtr store;
  const std::string name;

  std::mutex mutex;  // of what follows
  std::condition_variable changed;
  std::int64_t last_request = 0;                        // its number
  const char* what = nullptr;                           // the request under way; null: none
  base::Deadline answers_by = base::Deadline::never();  // it, unless the store is silent
  bool is_abandoned = false;                            // nobody waits for the request any more
  bool is_silent = false;

  base::SerialQueue queue;

  [[noreturn]] void throw_silent() const {
    const char* const request = what == nullptr ? "an earlier one" : what;
    throw TimeoutError("comm.store", base::concat(name, " has not answered a request (", request, ")"),
                       "look whether its host is reached, and its process runs");
  }
  void wait_until_idle(std::unique_lock<std::mutex>& lock, const char* wanted, base::Deadline deadline);
  std::int64_t begin_request(const char* wanted, milliseconds answer_time);
  void end_request() noexcept;
  void abandon_request(std::int64_t request);
};

// A request of another thread is no silence of the store, however long it takes, as long as that thread waits
// for it. An abandoned request is, once it has taken longer than a store takes.
void DeadlineStore::Worker::wait_until_idle(std::unique_lock<std::mutex>& lock, const char* wanted,
                                            base::Deadline deadline) {
  for (;;) {
    if (is_silent) throw_silent();
    if (what == nullptr && !deadline.expired()) return;
    if (what != nullptr && is_abandoned && answers_by.expired()) {
      is_silent = true;
      changed.notify_all();
      throw_silent();
    }
    if (deadline.expired()) {
      throw TimeoutError(
          "comm.store",
          base::concat("timed out before ", name, " could be asked (", wanted, ")",
                       what == nullptr ? "" : base::concat(", busy with another request: ", what)),
          "a longer timeout");
    }
    const bool was_abandoned = is_abandoned;
    base::wait(
        changed, lock, [&] { return what == nullptr || is_silent || is_abandoned != was_abandoned; },
        is_abandoned ? deadline.sooner(answers_by) : deadline);
  }
}

// Under the mutex.
std::int64_t DeadlineStore::Worker::begin_request(const char* wanted, milliseconds answer_time) {
  what = wanted;
  answers_by = base::Deadline(answer_time);
  is_abandoned = false;
  return ++last_request;
}

void DeadlineStore::Worker::end_request() noexcept {
  {
    const std::lock_guard lock(mutex);
    what = nullptr;
  }
  changed.notify_all();
}

// Throws, unless the answer has come meanwhile.
void DeadlineStore::Worker::abandon_request(std::int64_t request) {
  const std::lock_guard lock(mutex);
  if (what == nullptr || last_request != request) return;
  is_abandoned = true;
  // This caller may have had less time than a store needs: only the store's own time counts against it.
  is_silent = answers_by.expired();
  changed.notify_all();
  throw_silent();
}

DeadlineStore::DeadlineStore(StorePtr store, std::string name, Waiting waiting)
    : worker_(std::make_shared<Worker>(std::move(store), std::move(name), start_time_until_deadline())),
      waiting_(waiting) {}

// The last that the thread does is to close the store, which may hang as well, and to end itself. Nobody
// joins it: what the thread hangs in would hold who does.
DeadlineStore::~DeadlineStore() {
  base::SerialQueue& queue = worker_->queue;
  queue.submit("close", [worker = std::move(worker_)] { worker->store.reset(); });
}

// `body` must own what it uses: it may continue when nobody waits for it any more.
template <typename Body>
auto DeadlineStore::ask(const char* what, milliseconds most, Body body, Waits waits) {
  most = std::min(most, kLongestTime);
  const base::Deadline deadline = base::Deadline(most + kStoreSlack).sooner(StoreDeadline::current());
  // Half of the slack: less than the one who asks waits.
  const milliseconds answer_time =
      waits == Waits::kForKey ? most + kStoreSlack / 2 : std::min(kAnswerTime, most + kStoreSlack / 2);
  Worker& worker = *worker_;
  std::unique_lock lock(worker.mutex);
  worker.wait_until_idle(lock, what, deadline);
  // The references are safe: the worker ends within the last that its thread runs.
  auto answer =
      worker.queue.submit(what, [&worker, body = std::move(body)]() mutable { return body(*worker.store); });
  const std::int64_t request = worker.begin_request(what, answer_time);
  lock.unlock();
  answer.on_ready([&worker] { worker.end_request(); });
  if (!answer.wait(deadline)) worker.abandon_request(request);
  return answer.get(deadline);  // at once: it is there
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
    // A wait within the store would delay all other requests until the key comes.
    const base::Deadline deadline = timeout == kNoTimeout ? base::Deadline::never() : base::Deadline(timeout);
    if (base::poll_until([&] { return check(keys); }, deadline)) return;
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
