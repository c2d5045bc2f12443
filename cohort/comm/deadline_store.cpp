#include "cohort/comm/deadline_store.h"

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>

#include "cohort/core/error.h"
#include "cohort/core/wait.h"

namespace cohort::comm {
namespace {

using Bytes = std::vector<std::uint8_t>;
using Keys = std::vector<std::string>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using std::chrono::milliseconds;

// The store says itself that a wait was over, a moment after the time.
constexpr milliseconds kSlack(250);

core::Deadline& deadline_of_thread() {
  thread_local core::Deadline deadline = core::Deadline::never();
  return deadline;
}

}  // namespace

StoreDeadline::StoreDeadline(core::Deadline deadline) : before_(deadline_of_thread()) {
  deadline_of_thread() = before_.sooner(deadline);
}

StoreDeadline::~StoreDeadline() {
  deadline_of_thread() = before_;
}

core::Deadline StoreDeadline::current() {
  return deadline_of_thread();
}

// The thread that asks the store, and what it shares with those who ask it.
struct DeadlineStore::Worker {
  Worker(StorePtr of, std::string called) : store(std::move(of)), name(std::move(called)) {}

  StorePtr store;
  const std::string name;
  std::mutex asking;  // held by the one whose turn it is

  std::mutex mutex;  // of what follows
  std::condition_variable changed;
  std::function<void()> job;
  bool is_silent = false;
  bool is_stopped = false;

  static void run(const std::shared_ptr<Worker>& self) {
    for (std::unique_lock lock(self->mutex);;) {
      core::wait_for_task(self->changed, lock, [&] { return self->job != nullptr || self->is_stopped; });
      if (self->job == nullptr) break;
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

DeadlineStore::DeadlineStore(StorePtr store, std::string name)
    : worker_(std::make_shared<Worker>(std::move(store), std::move(name))) {
  std::thread([worker = worker_] { Worker::run(worker); }).detach();
}

DeadlineStore::~DeadlineStore() {
  {
    const std::lock_guard lock(worker_->mutex);
    worker_->is_stopped = true;
  }
  worker_->changed.notify_all();
}

// `body` must own what it uses: it may go on when nobody waits for it any more.
template <typename Body>
auto DeadlineStore::ask(const char* what, milliseconds most, Body body) {
  using Result = std::invoke_result_t<Body&, c10d::Store&>;
  using Value = std::conditional_t<std::is_void_v<Result>, bool, Result>;
  struct Answer {
    std::optional<Value> value;
    std::exception_ptr error;
  };
  const auto answer = std::make_shared<Answer>();
  const core::Deadline deadline = core::Deadline(most + kSlack).sooner(StoreDeadline::current());
  const std::lock_guard turn(worker_->asking);
  std::unique_lock lock(worker_->mutex);
  const auto throw_silent = [&] {
    throw TimeoutError("comm.store", core::concat(worker_->name, " has not answered a request (", what, ")"),
                       "look whether its host is reached, and its process runs");
  };
  if (worker_->is_silent) throw_silent();
  worker_->job = [answer, body = std::move(body), store = worker_->store.get()]() mutable {
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
  };
  worker_->changed.notify_all();
  const auto is_done = [&] { return worker_->job == nullptr; };
  if (!core::wait(worker_->changed, lock, is_done, deadline)) {
    worker_->is_silent = true;
    throw_silent();
  }
  if (answer->error) std::rethrow_exception(answer->error);
  return std::move(*answer->value);
}

StorePtr DeadlineStore::clone() {
  StorePtr copy = ask("clone", getTimeout(), [](c10d::Store& store) { return store.clone(); });
  auto clone = c10::make_intrusive<DeadlineStore>(std::move(copy), worker_->name);
  clone->timeout_ = timeout_;
  return clone;
}

void DeadlineStore::set(const std::string& key, const Bytes& value) {
  ask("set", getTimeout(), [key, value](c10d::Store& store) { store.set(key, value); });
}

Bytes DeadlineStore::compareSet(const std::string& key, const Bytes& expected, const Bytes& value) {
  return ask("compareSet", getTimeout(),
             [key, expected, value](c10d::Store& store) { return store.compareSet(key, expected, value); });
}

Bytes DeadlineStore::get(const std::string& key) {
  return ask("get", getTimeout(), [key](c10d::Store& store) { return store.get(key); });
}

std::int64_t DeadlineStore::add(const std::string& key, std::int64_t value) {
  return ask("add", getTimeout(), [key, value](c10d::Store& store) { return store.add(key, value); });
}

bool DeadlineStore::deleteKey(const std::string& key) {
  return ask("deleteKey", getTimeout(), [key](c10d::Store& store) { return store.deleteKey(key); });
}

bool DeadlineStore::check(const Keys& keys) {
  return ask("check", getTimeout(), [keys](c10d::Store& store) { return store.check(keys); });
}

std::int64_t DeadlineStore::getNumKeys() {
  return ask("getNumKeys", getTimeout(), [](c10d::Store& store) { return store.getNumKeys(); });
}

void DeadlineStore::wait(const Keys& keys) {
  wait(keys, getTimeout());
}

void DeadlineStore::wait(const Keys& keys, const milliseconds& timeout) {
  ask("wait", timeout, [keys, timeout](c10d::Store& store) { store.wait(keys, timeout); });
}

const milliseconds& DeadlineStore::getTimeout() const noexcept {
  return timeout_;
}

void DeadlineStore::setTimeout(const milliseconds& timeout) {
  timeout_ = timeout;
  ask("setTimeout", timeout, [timeout](c10d::Store& store) { store.setTimeout(timeout); });
}

void DeadlineStore::append(const std::string& key, const Bytes& value) {
  ask("append", getTimeout(), [key, value](c10d::Store& store) { store.append(key, value); });
}

std::vector<Bytes> DeadlineStore::multiGet(const Keys& keys) {
  return ask("multiGet", getTimeout(), [keys](c10d::Store& store) { return store.multiGet(keys); });
}

void DeadlineStore::multiSet(const Keys& keys, const std::vector<Bytes>& values) {
  ask("multiSet", getTimeout(), [keys, values](c10d::Store& store) { store.multiSet(keys, values); });
}

bool DeadlineStore::hasExtendedApi() const {
  return worker_->store->hasExtendedApi();
}

void DeadlineStore::queuePush(const std::string& key, const Bytes& value) {
  ask("queuePush", getTimeout(), [key, value](c10d::Store& store) { store.queuePush(key, value); });
}

Bytes DeadlineStore::queuePop(const std::string& key, bool block) {
  return ask("queuePop", getTimeout(),
             [key, block](c10d::Store& store) { return store.queuePop(key, block); });
}

std::int64_t DeadlineStore::queueLen(const std::string& key) {
  return ask("queueLen", getTimeout(), [key](c10d::Store& store) { return store.queueLen(key); });
}

Keys DeadlineStore::listKeys() {
  return ask("listKeys", getTimeout(), [](c10d::Store& store) { return store.listKeys(); });
}

}  // namespace cohort::comm
