#pragma once

#include <atomic>
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "cohort/base/threads/deadline.h"
#include "cohort/comm/backends/mpi/internal/work.h"

/// The calls that run over MPI. Internal.
namespace cohort::comm::mpi {

/// From the first late call to MPI_Abort: the program may say more than the engine can, which ranks did not
/// come and what they were doing. With a sanitizer it is slower to say so.
#ifdef COHORT_IS_SANITIZED
inline constexpr std::chrono::milliseconds kAbortGrace(25'000);
#else
inline constexpr std::chrono::milliseconds kAbortGrace(5000);
#endif

/// Runs the steps of calls, and ends those that are late.
///
/// Always: calls of an OrderedQueue run in the order in which they came, and none after one that failed.
/// Threads: the engine's thread alone; it sets `failed`, which other threads read.
class Progress {
 public:
  /// `failed` is set once a call has failed. Ownership: refers to it.
  explicit Progress(std::atomic<bool>& failed) : failed_(failed) {}

  void add(MpiWorkPtr call);
  bool is_empty() const { return running_.empty(); }
  /// Whether a collective runs that has not failed.
  bool has_collectives() const;
  /// Runs each call on until it has to wait; returns whether one has ended.
  bool advance();
  /// Ends late calls.
  void end_late_calls();
  /// Whether the job is to end now, since a call was late kAbortGrace ago.
  bool must_abort() const { return abort_at_ && abort_at_->expired(); }
  /// The first late call; empty: none was late.
  const std::string& abort_reason() const { return abort_reason_; }
  /// How long the thread may sleep; 0: something is likely to come soon. `has_moved`: something has, since
  /// the last call of this.
  std::chrono::microseconds pause_time(bool has_moved);

 private:
  void end_late(MpiWork& call);

  std::atomic<bool>& failed_;
  std::vector<MpiWorkPtr> running_;
  std::optional<base::Deadline> abort_at_;  // nothing: no call was late
  std::string abort_reason_;
  base::Deadline::Clock::time_point last_moved_ = base::Deadline::Clock::now();
};

}  // namespace cohort::comm::mpi
