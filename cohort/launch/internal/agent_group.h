#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "cohort/base/threads/deadline.h"
#include "cohort/launch/internal/failure.h"
#include "cohort/launch/run_options.h"

/// How the agents of a job agree. No LibTorch. Not for users of the library.
namespace cohort::launch {

/// The agents of a job as one of them sees them: what they tell each other, and what they agree on.
///
/// It knows neither ranks nor terminals, and how words travel is the implementation's matter. Blocking: no
/// call waits for another agent. A caller polls fd() beside its own files, for poll_interval() at most. Then
/// it calls acknowledge(), and asks again for what it needs. Always: all agents get the same result of an
/// attempt. Threads: one caller, the loop of the agent.
class AgentGroup {
 public:
  virtual ~AgentGroup() = default;

  /// Readable when another agent has a word for this one, or is lost, or when this agent is to show that its
  /// loop runs; -1: that never happens.
  virtual int fd() const = 0;
  /// The caller is to ask at least so often, so that a lost agent is noticed.
  virtual std::chrono::milliseconds poll_interval() const = 0;
  /// Empties fd(). The other agents see by it that the caller's loop still runs.
  virtual void acknowledge() = 0;
  /// Until the next acknowledge(), and until the deadline at most, the caller has work to do and is not
  /// missed.
  virtual void busy_until(base::Deadline deadline) = 0;

  /// What follows is of this attempt; attempts are numbered from 0.
  virtual void begin_attempt(int number) = 0;
  /// Tells the others: a signal asks to stop the job.
  virtual void announce_stop(int signal) = 0;
  /// Tells the others: a rank of this node has failed, so end yours.
  virtual void announce_failure() = 0;
  /// Tells the others: this agent gives up, and why.
  virtual void announce_abort(const std::string& why) = 0;

  /// The signal that another agent says has asked to stop, as this agent would take it; 0: none.
  virtual int stop_signal() const = 0;
  /// Whether the attempt is over for all: a rank of another node has failed, or its agent gave up or is lost.
  virtual bool is_attempt_over() const = 0;

  /// Says what came of this node's ranks, once in an attempt. Then the agents agree on a result.
  virtual void post_report(const AttemptReport& own_report) = 0;
  /// Returns the result for all nodes; nothing as long as it is not known.
  /// Throws: PeerError when another agent gave up or is lost; CommError when its report cannot be read.
  virtual std::optional<AttemptReport> result() = 0;
  /// Whether this agent may end after it has the result: every other living agent has read it.
  virtual bool may_leave() const = 0;
};

/// The agent of a job of one node: agrees with itself.
class SingleAgent : public AgentGroup {
 public:
  explicit SingleAgent(const RunOptions& options)
      : poll_interval_(options.monitor_interval), max_restarts_(options.max_restarts) {}

  int fd() const override { return -1; }
  std::chrono::milliseconds poll_interval() const override { return poll_interval_; }
  void acknowledge() override {}
  void busy_until(base::Deadline) override {}
  void begin_attempt(int number) override {
    attempt_ = number;
    result_.reset();
  }
  void announce_stop(int) override {}
  void announce_failure() override {}
  void announce_abort(const std::string&) override {}
  int stop_signal() const override { return 0; }
  bool is_attempt_over() const override { return false; }
  void post_report(const AttemptReport& own_report) override {
    result_ = combine({own_report}, attempt_ < max_restarts_);
  }
  std::optional<AttemptReport> result() override { return result_; }
  bool may_leave() const override { return true; }

 private:
  const std::chrono::milliseconds poll_interval_;
  const int max_restarts_;
  int attempt_ = 0;
  std::optional<AttemptReport> result_;
};

}  // namespace cohort::launch
