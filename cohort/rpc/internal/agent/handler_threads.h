#pragma once

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "cohort/base/threads/deadline.h"

namespace cohort::rpc {

/// Which handlers wait and run, and which functions are quick enough for the node's thread. Threads: any.
class HandlerThreads {
 public:
  /// A handler that waits until it begins, or is dropped: the queues of an agent that stops drop all.
  class Queued {
   public:
    explicit Queued(std::shared_ptr<HandlerThreads> threads) : threads_(std::move(threads)) {
      ++threads_->num_queued_;
    }
    ~Queued() { begin(); }
    Queued(const Queued&) = delete;
    Queued& operator=(const Queued&) = delete;
    /// Its wait is over.
    void begin() {
      if (const auto threads = std::exchange(threads_, nullptr)) --threads->num_queued_;
    }

   private:
    std::shared_ptr<HandlerThreads> threads_;
  };
  /// A handler that runs, while it lives.
  class OnThread {
   public:
    explicit OnThread(HandlerThreads& threads) : threads_(threads) { ++threads_.num_on_threads_; }
    ~OnThread() { --threads_.num_on_threads_; }
    OnThread(const OnThread&) = delete;
    OnThread& operator=(const OnThread&) = delete;

   private:
    HandlerThreads& threads_;
  };
  /// A handler that has begun on the node's thread, while it lives.
  class OnNodeThread {
   public:
    explicit OnNodeThread(HandlerThreads& threads) : threads_(threads) { threads_.is_on_node_thread_ = true; }
    ~OnNodeThread() { threads_.is_on_node_thread_ = false; }
    OnNodeThread(const OnNodeThread&) = delete;
    OnNodeThread& operator=(const OnNodeThread&) = delete;

   private:
    HandlerThreads& threads_;
  };

  std::size_t num_queued() const { return num_queued_; }
  std::size_t num_on_threads() const { return num_on_threads_; }
  bool is_on_node_thread() const { return is_on_node_thread_; }

  /// A run of a function has ended.
  void note_run(const std::string& function, base::Deadline::Clock::duration time);
  /// Whether its last runs were quick.
  bool is_quick(const std::string& function) const;

 private:
  std::atomic<bool> is_on_node_thread_{false};
  std::atomic<std::size_t> num_queued_{0}, num_on_threads_{0};
  mutable std::mutex mutex_;               // of what follows
  std::map<std::string, int> quick_runs_;  // by function: in a row; below 0: so many are to come first
};

}  // namespace cohort::rpc
