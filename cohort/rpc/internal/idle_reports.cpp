// Termination of a computation whose processes are activated by messages alone (F. Mattern, "Algorithms for
// distributed termination detection", 1987: vector counters). Reports are made at different times, so none of
// them says that all workers are idle at once. It suffices that for each pair the calls which the sender has
// reported are those which the receiver has reported.
//
// Suppose that this holds, and that some worker became active after its report. Take the first one. A call
// activated it that it had not counted. The sender made that call before its own report: after it the sender
// would have been active earlier. For the same reason the sender had counted all calls that the receiver had.
// So the sender had counted at least one call more.
#include "cohort/rpc/internal/idle_reports.h"

#include <algorithm>

#include "cohort/base/error.h"

namespace cohort::rpc {

void IdleReports::set(std::size_t worker, std::optional<IdleReport> report) {
  if (report && (report->sent.size() != workers_.size() || report->received.size() != workers_.size())) {
    throw CommError("rpc.receive",
                    base::concat("a report about ", report->sent.size(), " workers, not ", workers_.size()),
                    "the same program on all workers");
  }
  workers_.at(worker).report = std::move(report);
}

bool IdleReports::is_over() const {
  const bool all_are_idle = std::all_of(workers_.begin(), workers_.end(), [](const Worker& worker) {
    return worker.is_gone || worker.report.has_value();
  });
  return all_are_idle && !find_call();
}

std::optional<std::pair<std::size_t, std::size_t>> IdleReports::find_call() const {
  for (std::size_t from = 0; from < workers_.size(); ++from) {
    for (std::size_t to = 0; to < workers_.size(); ++to) {
      const Worker &sender = workers_[from], &receiver = workers_[to];
      if (sender.is_gone || receiver.is_gone || !sender.report || !receiver.report) continue;
      if (sender.report->sent[to] != receiver.report->received[from]) return std::pair(from, to);
    }
  }
  return std::nullopt;
}

}  // namespace cohort::rpc
