#pragma once

#include <poll.h>

#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "cohort/base/cpu.h"
#include "cohort/base/threads/deadline.h"
#include "cohort/launch/internal/failure.h"
#include "cohort/launch/internal/orphan_watchdog.h"
#include "cohort/launch/internal/output.h"
#include "cohort/launch/run_options.h"
#include "cohort/launch/worker.h"

/// One rank: its process, and what it prints. No LibTorch. Not for users of the library.
namespace cohort::launch {

/// What a rank is started with, beyond the options.
struct RankSpec {
  int rank = 0;  ///< in the job; in elastic mode its local number
  int local_rank = 0;
  std::string prefix = {};            ///< of each of its lines
  bool is_raw = false;                ///< its bytes go through as they come, without a prefix
  std::filesystem::path folder = {};  ///< of its files; made here
  Variables environment = {};         ///< added to that of this process
  base::CpuSet cpus = {};             ///< where it may run; empty: where this process may
  std::vector<int> keep = {};         ///< descriptors that it inherits
  base::Deadline start_by = base::Deadline(kStartTime);
};

/// Started by its constructor. It is killed and reaped when it goes. Always: what it has printed before its
/// end is passed on before reap() returns true. Threads: one caller, the thread that outlives the rank.
class RankProcess {
 public:
  /// The program runs. Ownership: refers to all. Throws: SystemError.
  RankProcess(const RunOptions& options, RankSpec spec, Display& display, OrphanWatchdog& watchdog);
  ~RankProcess();
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;

  int rank() const { return spec_.rank; }
  int local_rank() const { return spec_.local_rank; }
  const Worker& worker() const { return worker_.value(); }
  bool running() const { return worker_ && worker_->running(); }
  /// Whether it runs, as this process.
  bool is_process(pid_t pid) const { return running() && worker_->pid() == pid; }
  /// It is this local rank from now on, and what it prints goes where that of this rank goes. Throws:
  /// SystemError for a file that cannot be written.
  void take_place(int local_rank, std::string prefix);

  /// Adds what poll() must wait for: its end, and what it prints if `with_output`.
  void add_waits(std::vector<pollfd>& waits, bool with_output) const;
  /// Passes on what it has printed, a bounded amount: one that prints without end holds up no other.
  void read();
  /// True once, when it has ended.
  bool reap();
  /// Kills it and waits for its end until the deadline.
  void end(base::Deadline deadline);
  /// How it ended badly; nothing where its status was 0. After reap().
  std::optional<RankFailure> failure(int node, int attempt) const;

 private:
  struct Channel {
    Fd pipe = Fd(), file = Fd();
    bool is_shown = true;
    std::optional<LineSplitter> lines = std::nullopt;
  };

  Fd open(Channel& channel, Stream stream);
  void direct_output();
  void direct(Channel& channel, bool is_redirected, bool is_teed, const char* name) const;

  const RunOptions& options_;
  RankSpec spec_;
  Console& console_;
  WarningFilter& warnings_;
  OrphanWatchdog& watchdog_;
  Channel out_, err_;
  Tail tail_;
  double ended_at_ = 0;  // seconds since 1970
  std::optional<Worker> worker_;
};

/// How a rank finds the job's secret; without one it is not to take that of this process for it.
Variables secret_variables(const RunOptions& options, int secret_fd);

/// Each rank that runs, and would not die of it, gets the signal. Returns what there is to say where one does
/// not get it, unless `withheld` has the signal already.
std::string notify_ranks(const std::vector<const RankProcess*>& ranks, int number, std::set<int>& withheld);

/// Takes away the ends of children that are no ranks, as far as they come before those of ranks. For process
/// 1 of a container, which is the parent of what ranks leave behind.
void reap_orphans(OrphanWatchdog& watchdog, const std::function<bool(pid_t)>& is_rank);

}  // namespace cohort::launch
