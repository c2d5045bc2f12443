#pragma once

#include <chrono>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "cohort/base/cpu.h"
#include "cohort/launch/internal/failure.h"
#include "cohort/launch/internal/orphan_watchdog.h"
#include "cohort/launch/internal/output.h"
#include "cohort/launch/run_options.h"
#include "cohort/launch/worker.h"

/// The ranks of one node in one attempt: started together, watched, ended together. No LibTorch.
namespace cohort::launch {

/// What an attempt is, beyond the options.
struct WorkerGroupSpec {
  int attempt = 0;
  int first_rank = 0;  ///< of this node's
  int world_size = 1;
  std::string master_addr;
  std::uint16_t master_port = 0;
  std::string run_id;
  int secret_fd = -1;                ///< of the job's secret, which ranks inherit; -1: there is none
  std::filesystem::path log_folder;  ///< of this attempt; made here
};

class WorkerGroup {
 public:
  /// All ranks run. Ownership: refers to all. Threads: one caller at a time, the
  /// thread that outlives the ranks. Throws: SystemError, and no rank is left.
  WorkerGroup(const RunOptions& options, const WorkerGroupSpec& place, Display& display,
              OrphanWatchdog& watchdog);
  ~WorkerGroup();
  WorkerGroup(const WorkerGroup&) = delete;
  WorkerGroup& operator=(const WorkerGroup&) = delete;

  /// Waits until a rank prints or ends, one of `wake` is readable, or the time is over; then passes on what
  /// was printed and reaps.
  void step(std::chrono::milliseconds most, const std::vector<int>& wake);

  bool running() const;
  /// Local ranks that run still.
  std::vector<int> running_ranks() const;
  /// Those that ended badly, as long as nobody ended them: after stop() only those that had failed before.
  const std::vector<RankFailure>& failures() const { return failures_; }
  /// The status of the first that ended with another than 0, failure or not; else 0.
  int status() const { return status_; }

  /// Each rank gets the signal.
  void signal(int number);
  /// Each rank that would not die of it gets the signal. Returns what there is to say, once, where one does
  /// not get it; else nothing.
  std::string notify(int number);
  /// Each rank and what it has started stops, or continues: for Ctrl-Z.
  void pause();
  void resume();
  /// From here on ranks end because they are told to: SIGTERM for each.
  void stop();
  /// SIGKILL for each and for what it has started.
  void kill();

 private:
  struct Member;

  void start(int local_rank, base::Deadline start_by);
  void read(Member& member);
  void note_end(Member& member);
  void reap_orphans();

  const RunOptions& options_;
  WorkerGroupSpec place_;
  Console& console_;
  WarningFilter& warnings_;
  OrphanWatchdog& watchdog_;
  std::vector<base::CpuSet> cores_;
  std::vector<std::unique_ptr<Member>> members_;
  std::vector<RankFailure> failures_;
  std::set<int> withheld_;  // signals that the log has said were not passed on
  int status_ = 0;
  double stopped_at_ = 0;  // seconds since 1970; 0: not stopped
};

}  // namespace cohort::launch
