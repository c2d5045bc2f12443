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
#include "cohort/launch/internal/rank_process.h"
#include "cohort/launch/internal/rank_set.h"
#include "cohort/launch/run_options.h"
#include "cohort/launch/worker.h"

/// The ranks of one node in one attempt: started together, watched, ended together. No LibTorch.
namespace cohort::launch {

/// What an attempt is, beyond the options.
struct WorkerGroupSpec {
  int attempt = 0;
  int node_rank = 0;  ///< of this node, and how many there are
  int num_nodes = 1;
  int first_rank = 0;  ///< of this node's
  int world_size = 1;
  std::string master_addr;
  std::uint16_t master_port = 0;
  std::string run_id;
  int secret_fd = -1;                ///< of the job's secret, which ranks inherit; -1: there is none
  std::filesystem::path log_folder;  ///< of this attempt; made here
};

class WorkerGroup : public RankSet {
 public:
  /// All ranks run. Ownership: refers to all. Threads: one caller at a time, the
  /// thread that outlives the ranks. Throws: SystemError, and no rank is left.
  WorkerGroup(const RunOptions& options, const WorkerGroupSpec& spec, Display& display,
              OrphanWatchdog& watchdog);
  ~WorkerGroup() override;
  WorkerGroup(const WorkerGroup&) = delete;
  WorkerGroup& operator=(const WorkerGroup&) = delete;

  /// Waits until a rank prints or ends, one of `wake` is readable, or the time is over; then passes on what
  /// was printed and reaps.
  void step(std::chrono::milliseconds most, const std::vector<int>& wake);

  std::vector<int> running_ranks() const override;
  /// Those that ended badly, as long as nobody ended them: after stop() only those that had failed before.
  const std::vector<RankFailure>& failures() const { return failures_; }
  /// The status of the first that ended with another than 0, failure or not; else 0.
  int status() const { return status_; }

  void signal(int number) override;
  std::string notify(int number) override;
  void pause() override;
  void resume() override;
  void stop() override;
  void kill() override;

 private:
  void start(int local_rank, base::Deadline start_by);
  void note_end(const RankProcess& member);

  const RunOptions& options_;
  WorkerGroupSpec spec_;
  Display& display_;
  OrphanWatchdog& watchdog_;
  std::vector<base::CpuSet> cores_;
  std::vector<std::unique_ptr<RankProcess>> members_;
  std::vector<RankFailure> failures_;
  std::set<int> withheld_;  // signals that the log has said were not passed on
  int status_ = 0;
  double stopped_at_ = 0;  // seconds since 1970; 0: not stopped
};

}  // namespace cohort::launch
