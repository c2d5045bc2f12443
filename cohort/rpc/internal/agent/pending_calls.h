#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/threads/future.h"
#include "cohort/net/peer.h"
#include "cohort/rpc/encoded.h"
#include "cohort/rpc/internal/context_state.h"
#include "cohort/rpc/internal/gradient_nodes.h"
#include "cohort/rpc/internal/telemetry/call_statistics.h"
#include "cohort/rpc/internal/timers.h"

namespace cohort::rpc {

/// A call that may wait in module net, and what takes its place if it is given up before it begins to be
/// written.
struct QueuedCall {
  std::shared_ptr<net::Peer> peer;
  std::uint64_t message = 0;
  net::Message without_arguments;

  /// Whether the other worker will learn by it that the call was given up.
  bool give_up() { return peer != nullptr && peer->replace(message, without_arguments); }
};

/// A call that this agent made.
struct PendingCall {
  PendingCall(const char* what, base::WaitHelper helper) : promise(what, std::move(helper)) {}
  void fail(const std::exception_ptr& error);
  /// "embed on ps/0, call 17".
  std::string describe(std::uint64_t id) const;

  base::Promise<Encoded> promise;
  std::string worker, function;
  std::uint64_t sequence = 0;  ///< kSequenceOffset; 0: it is not sent
  QueuedCall queued;           ///< of one that is long
  std::chrono::milliseconds timeout{0};
  CallStatistics::Time begun;
  CallStatistics::Function* statistics = nullptr;
  Timers::Key timer;
  // Within a context of distributed autograd:
  std::shared_ptr<RecordedCall> recorded;
  std::weak_ptr<ContextState> context;
  std::optional<base::Promise<void>> attached;  ///< the results have their history
};

/// Numbers of calls that each worker of a dynamic group has for itself.
inline constexpr std::uint64_t kCallsOfAWorker = 1'000'000'000'000;

/// The number of a call as texts show it: without what says which worker of a dynamic group has made the
/// call.
inline std::uint64_t shown_number(std::uint64_t call) {
  return call % kCallsOfAWorker;
}

/// The calls that an agent made and that have not ended, by their numbers. Whoever takes a call out ends it.
/// Threads: one at a time.
class PendingCalls {
 public:
  using Node = std::map<std::uint64_t, PendingCall>::node_type;

  /// Before the first number. Handlers of a worker may outlive it: calls of a later worker of its name have
  /// other numbers.
  void begin_numbers_of(std::int32_t worker) {
    next_number_ = static_cast<std::uint64_t>(worker) * kCallsOfAWorker + 1;
  }
  /// A number that no call or object of this agent has had.
  std::uint64_t next_number() { return next_number_++; }
  /// A call to the worker is sent now, whether it has ended or not. Returns its sequence (kSequenceOffset).
  std::uint64_t on_sent(std::uint64_t id, const std::string& worker);
  /// Keeps it until the call ends. False where it has ended: then the caller gives it up.
  bool on_queued(std::uint64_t id, QueuedCall& call);
  /// Takes it out; an empty one where there is none.
  QueuedCall take_queued(std::uint64_t id);
  void add(std::uint64_t id, PendingCall call) { calls_.emplace(id, std::move(call)); }
  /// Null where it has ended.
  const PendingCall* find(std::uint64_t id) const;

  /// Takes a call out whose future is set now; empty where it has ended. The agent is not idle before
  /// on_finished(), as functions of the future may run.
  Node take(std::uint64_t id);
  void on_finished() { --num_finishing_; }
  /// Takes all out, at the end of the agent.
  std::map<std::uint64_t, PendingCall> take_all() { return std::exchange(calls_, {}); }

  /// The calls of a worker: number and description.
  std::vector<std::pair<std::uint64_t, std::string>> of_worker(const std::string& worker) const;
  std::size_t size() const { return calls_.size(); }
  /// Whether no call is under way, and no function runs that a result leads to.
  bool is_idle() const { return calls_.empty() && !is_finishing(); }
  /// Whether a function may run that a result leads to.
  bool is_finishing() const { return num_finishing_ > 0; }
  /// The calls that is_idle() waits for.
  std::vector<std::string> describe() const;

 private:
  std::uint64_t next_number_ = 1;
  std::map<std::uint64_t, PendingCall> calls_;
  std::map<std::string, std::uint64_t> num_sent_;  // by worker
  int num_finishing_ = 0;  // calls that are answered, but whose callbacks may not have run yet
};

}  // namespace cohort::rpc
