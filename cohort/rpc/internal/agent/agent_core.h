#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "cohort/base/threads/thread_pool.h"
#include "cohort/net/node.h"
#include "cohort/rpc/agent_types.h"
#include "cohort/rpc/internal/agent/pending_calls.h"
#include "cohort/rpc/internal/agent/running_calls.h"
#include "cohort/rpc/internal/agent/shutdown_state.h"
#include "cohort/rpc/internal/agent/worker_table.h"
#include "cohort/rpc/internal/contexts.h"
#include "cohort/rpc/internal/references.h"
#include "cohort/rpc/internal/telemetry/call_statistics.h"
#include "cohort/rpc/internal/telemetry/call_trace.h"
#include "cohort/rpc/internal/timers.h"

/// What the parts of an agent have in common. AgentState owns it and them.
namespace cohort::rpc {

class AgentState;

/// A message that is still to be sent, and that no table knows of any more: a worker of a dynamic group does
/// not leave before. Made before the table forgets it. Each copy counts. Threads: any.
class UnsentMessage {
 public:
  using Count = std::shared_ptr<std::atomic<int>>;
  explicit UnsentMessage(Count count) : count_(std::move(count)) { ++*count_; }
  UnsentMessage(const UnsentMessage& other) : UnsentMessage(other.count_) {}
  UnsentMessage& operator=(const UnsentMessage&) = delete;
  ~UnsentMessage() { --*count_; }

 private:
  const Count count_;
};

/// What an agent knows of workers and calls, and the mutex of all of it.
///
/// Note [One mutex]: shutdown() asks whether no call is under way, and what was counted. So whoever adds a
/// call to `pending` or `running` counts it in `shutdown` before the mutex is unlocked. Promises are set,
/// messages sent and handlers stopped without the mutex, because each of these may call back into the agent.
/// The exception is a promise whose future nobody has yet.
struct CallTables {
  explicit CallTables(std::int32_t self) : workers(self), statistics(CallStatistics::Time::clock::now()) {}

  mutable std::mutex mutex;         ///< of all below
  std::condition_variable changed;  ///< a worker has connected, reported or gone; or a shutdown() has ended
  WorkerTable workers;
  PendingCalls pending;
  RunningCalls running;
  ShutdownState shutdown;
  CallStatistics statistics;
  const UnsentMessage::Count num_unsent = std::make_shared<std::atomic<int>>(0);  ///< needs no mutex
};

/// What an agent runs on. Its parts hold a reference to it, and call each other by way of functions that hold
/// share().
struct AgentCore {
  AgentCore(WorkerInfo self, AgentOptions options);
  /// Before the node begins. Makes the threads.
  void start(const std::shared_ptr<AgentState>& agent, std::shared_ptr<References> references);

  /// A part, or anything else that the agent owns, with the agent: functions that run later hold it.
  template <typename Part>
  std::shared_ptr<Part> share(Part* part) const {
    return std::shared_ptr<Part>(std::shared_ptr<AgentState>(owner), part);
  }
  /// The same for functions that may outlive the agent.
  template <typename Part>
  std::weak_ptr<Part> share_weakly(Part* part) const {
    return share(part);
  }
  /// The id of a known worker.
  std::int32_t id_of(const std::string& worker) const;
  /// Throws: CommError for an unknown one.
  WorkerInfo worker(std::int32_t id) const;
  /// Records how much is under way, where the timeline records and it is time. Without the mutex.
  void trace_counters();
  /// Frees it on the pool.
  void free_later(std::shared_ptr<void> what) const;

  const WorkerInfo self;
  const AgentOptions options;
  std::atomic<std::chrono::milliseconds> timeout;
  std::weak_ptr<AgentState> owner;
  std::unique_ptr<base::ThreadPool> pool;
  std::unique_ptr<Timers> timers;
  std::unique_ptr<net::Node> node;
  std::shared_ptr<References> references;
  Contexts contexts;
  CallTables tables;
  CounterTrace counters;
};

}  // namespace cohort::rpc
