#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "cohort/rpc/codec.h"

/// How the workers find out that no call is under way, so that all may leave. No thread, clock or socket, so
/// a test runs it with messages in any order.
namespace cohort::rpc {

/// What a worker tells the others when it is in shutdown() and has nothing to do.
struct IdleReport {
  std::vector<std::uint64_t> sent, received;  ///< calls to each worker, and from each, by its id
  bool operator==(const IdleReport&) const = default;
};
COHORT_NESTED(IdleReport, sent, received)

/// The last report of each worker, as one of them knows it. Threads: one at a time.
class IdleReports {
 public:
  /// For workers 0 to `size` - 1.
  void resize(std::size_t size) { workers_.resize(size); }
  /// Takes over a report; none: the worker has come to shutdown() anew, or has given up, and is not known to
  /// be idle. Throws: CommError for a report about another number of workers.
  void set(std::size_t worker, std::optional<IdleReport> report);
  /// The worker is gone. Calls to it and from it do not count any more.
  void remove(std::size_t worker) { workers_.at(worker).is_gone = true; }

  bool has(std::size_t worker) const { return workers_.at(worker).report.has_value(); }
  /// Whether each worker that is not gone has nothing to do, and never will have.
  bool is_over() const;
  /// Sender and receiver of a call that may be on its way; none where each that was reported as sent has
  /// come.
  std::optional<std::pair<std::size_t, std::size_t>> find_call() const;

 private:
  struct Worker {
    std::optional<IdleReport> report;
    bool is_gone = false;
  };
  std::vector<Worker> workers_;
};

}  // namespace cohort::rpc
