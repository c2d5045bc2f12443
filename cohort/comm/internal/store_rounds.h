#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "cohort/base/log.h"
#include "cohort/base/threads/deadline.h"
#include "cohort/comm/internal/group_state.h"
#include "cohort/comm/internal/report.h"

/// Questions about what all ranks do, and their answers, on the store of a job. Internal.
namespace cohort::comm {

/// One rank's part in the questions of a job. A question is a numbered round on the store.
///
/// Keys, below desync/, R being the round and N the rank: claim/R (a count: who gets 1 asks), asked/R (why),
/// answer/R/N, table/R (the table is logged), last/N (what N did when it failed), left (a count of ranks).
///
/// Always: a rank answers each round once, in order. Threads: one, that of the store, which each call may
/// keep waiting. Each call throws what the store throws.
class StoreRounds {
 public:
  /// Asks over a connection of its own.
  StoreRounds(std::shared_ptr<GroupRegistry> registry, const c10::intrusive_ptr<c10d::Store>& store);

  /// How often a rank is to look who asks.
  std::chrono::milliseconds poll_time() const { return poll_time_; }
  /// How long the calls that may be under way, and then leave(), take where the store answers.
  std::chrono::milliseconds end_time() const;

  /// Answers each round that has been asked. Call it before each of the calls below.
  void answer_questions();
  /// Asks all ranks, unless another rank asks already, and logs the table of their answers. Blocking: 1.75 s
  /// and a poll_time() at most.
  void ask(const std::string& why, base::LogLevel level);
  /// A call of this rank has failed: leaves an answer for those who ask later, and asks, or waits for the
  /// table of a rank that failed shortly before.
  void ask_after_failure(const std::string& what);
  /// This rank asks and answers no more. Blocking: rank 0 for a second at most, where it is to wait for the
  /// ranks that have not left.
  void leave(bool wait_for_all);

 private:
  using Clock = base::Deadline::Clock;

  std::string key(const char* what, std::int64_t round, int rank = -1) const;
  std::chrono::milliseconds table_time() const;
  std::optional<std::vector<Answer>> fetch(const std::string& name);
  void wait_for_table(std::int64_t round);

  const std::shared_ptr<GroupRegistry> registry_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::chrono::milliseconds poll_time_;
  std::int64_t round_ = 0;           // the first that this rank has not answered
  std::int64_t awaited_round_ = -1;  // the last one whose table was waited for
  Clock::time_point failure_asked_;  // when this rank saw the last question about a failure
};

}  // namespace cohort::comm
