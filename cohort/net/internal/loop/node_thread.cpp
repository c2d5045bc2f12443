// A thread cannot be taken out of a function of the handler, so another one takes its place: it has the
// next generation, and the old one ends by itself after its function. A thread knows whose it is by a
// thread-local pair, so is_here() needs no mutex.
#include "cohort/net/internal/loop/node_thread.h"

#include <pthread.h>

#include <exception>
#include <utility>

#include "cohort/base/threads/wait.h"

namespace cohort::net::node_detail {
namespace {

// Of the thread that runs a node: whose, and which one.
struct OwnThread {
  const NodeThread* owner = nullptr;
  int generation = 0;
};
thread_local OwnThread own_thread;

}  // namespace

bool NodeThread::is_here() const {
  return own_thread.owner == this && is_current(own_thread.generation);
}

bool NodeThread::is_replaced_here() const {
  return own_thread.owner == this && !is_current(own_thread.generation);
}

void NodeThread::start(Body body) {
  const int generation = generation_ + 1;
  generation_ = generation;
  thread_ = std::thread([this, generation, body = std::move(body)] { run(generation, body); });
  runs_ = true;
}

bool NodeThread::replace(Body body) {
  std::thread old;
  old.swap(thread_);
  try {
    start(std::move(body));
  } catch (const std::exception&) {
    --generation_;
    thread_.swap(old);
    return false;
  }
  old.detach();
  ++num_replaced_;
  return true;
}

void NodeThread::stop(std::unique_lock<std::mutex>& lock, base::Deadline deadline) {
  std::thread thread;
  thread.swap(thread_);
  if (thread.get_id() == std::this_thread::get_id()) {
    thread.detach();  // a handler held the last node; the thread keeps the loop until it ends
  } else if (thread.joinable()) {
    if (base::wait(node_.changed, lock, [this] { return !runs_; }, deadline)) {
      lock.unlock();
      thread.join();
      lock.lock();
    } else {
      thread.detach();
    }
  }
}

void NodeThread::run(int generation, const Body& body) {
  own_thread = {this, generation};
  ::pthread_setname_np(::pthread_self(), "net");
  body(generation);
  own_thread = {};
  const std::lock_guard lock(node_.mutex);
  if (is_current(generation)) {
    runs_ = false;
  } else {
    --num_replaced_;
  }
  node_.changed.notify_all();
}

}  // namespace cohort::net::node_detail
