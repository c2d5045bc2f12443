#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "cohort/rpc/internal/agent/worker_table.h"
#include "cohort/rpc/internal/idle_reports.h"

namespace cohort::rpc {

/// What an agent must know to leave when no call is under way: the counts of its calls, what the workers have
/// reported, and how far its own shutdown() is. Threads: one at a time.
class ShutdownState {
 public:
  /// Before the first call. Of a static group.
  void set_num_workers(std::size_t size);
  /// A worker of a dynamic group, before the first call to it.
  void add_worker(std::int32_t id);

  void count_sent(std::int32_t to) { ++counts_.sent[static_cast<std::size_t>(to)]; }
  /// A call that was counted is never sent.
  void count_unsent(std::int32_t to) { --counts_.sent[static_cast<std::size_t>(to)]; }
  void count_received(std::int32_t from) { ++counts_.received[static_cast<std::size_t>(from)]; }
  const IdleReport& counts() const { return counts_; }

  /// IdleReports::set() of another worker, which is in shutdown().
  void on_report(std::int32_t worker, std::optional<IdleReport> report);
  /// The worker is gone.
  void on_down(std::int32_t worker) { reports_.remove(static_cast<std::size_t>(worker)); }

  /// A thread begins to leave, or has ended to. The others are told anew when there is nothing to do.
  void begin_leaving();
  void end_leaving() { is_leaving_ = false; }
  bool is_leaving() const { return is_leaving_; }
  /// No call begins any more, and none is answered.
  void stop() { is_stopped_ = true; }
  bool is_stopped() const { return is_stopped_; }

  /// Of worker `self`, which has nothing to do: what the others have yet to hear.
  std::optional<IdleReport> next_report(std::int32_t self);
  /// Whether the others know the counts, and no worker will have anything to do.
  bool is_over() const { return last_report_ == counts_ && reports_.is_over(); }

  /// The workers that is_over() waits for, each with the reason.
  std::vector<std::string> describe_missing(const WorkerTable& workers, std::int32_t self) const;
  /// A call that is_over() waits for; "" where there is none.
  std::string describe_missing_call(const WorkerTable& workers) const;

 private:
  IdleReport counts_;                      // of the calls of this worker
  std::optional<IdleReport> last_report_;  // that was sent
  IdleReports reports_;
  std::set<std::int32_t> in_shutdown_;  // workers that have come to it
  bool is_leaving_ = false, is_stopped_ = false;
};

}  // namespace cohort::rpc
