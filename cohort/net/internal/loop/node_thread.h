#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <thread>

#include "cohort/base/threads/deadline.h"
#include "cohort/net/internal/loop/node_lock.h"

namespace cohort::net::node_detail {

/// The node's own thread, and those that were it before.
///
/// Invariants: at most one thread is the node's own. It has the last generation. A thread of an earlier
/// generation has been replaced while it was in a function of the handler, and ends after that function.
/// Threads: any. Under the mutex of NodeLock where a function does not say otherwise.
/// Calls: `Body`, without the mutex.
class NodeThread {
 public:
  /// What a thread does, until is_current() is false for its generation or the node has been stopped. It
  /// keeps this alive.
  using Body = std::function<void(int generation)>;

  explicit NodeThread(NodeLock& lock) : node_(lock) {}

  /// Throws: std::system_error where no thread can be had.
  void start(Body body);
  /// Another thread is the node's own from now on. False where no thread can be had: nothing has changed.
  bool replace(Body body);
  /// After the node has been stopped: waits until the own thread has ended. `lock` is held before and after.
  /// A thread that is this one, or in a function past the deadline, is left to itself.
  void stop(std::unique_lock<std::mutex>& lock, base::Deadline deadline);

  std::thread::id id() const { return thread_.get_id(); }
  /// How many threads were replaced and have not ended, without this one.
  int num_replaced_elsewhere() const { return num_replaced_ - (is_replaced_here() ? 1 : 0); }

  /// With or without the mutex: whether threads of this generation are to continue.
  bool is_current(int generation) const { return generation == generation_; }
  /// With or without the mutex: whether this is the node's own thread.
  bool is_here() const;

 private:
  bool is_replaced_here() const;
  void run(int generation, const Body& body);

  NodeLock& node_;
  std::atomic<int> generation_{0};
  std::thread thread_;
  bool runs_ = false;     // the thread of the last generation has not ended
  int num_replaced_ = 0;  // those that have not ended
};

}  // namespace cohort::net::node_detail
