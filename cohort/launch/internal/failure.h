#pragma once

#include <string>
#include <vector>

/// A rank that ended badly, as agents tell each other and the user. No LibTorch.
namespace cohort::launch {

struct RankFailure {
  int rank = 0;
  int local_rank = 0;
  int node = 0;
  std::string host;
  int pid = 0;
  int attempt = 0;
  int status = 1;                       ///< as a shell shows it: 128 + N for signal N
  std::string what;                     ///< "ended with status 3", "was killed by signal 9 (Killed)"
  std::string message;                  ///< from its error file; may be empty
  std::string details;                  ///< a call stack; may be empty
  double time = 0;                      ///< when it failed, in seconds since 1970 by its node's clock
  std::vector<std::string> last_lines;  ///< of its output

  bool operator==(const RankFailure&) const = default;
};

/// What one node, or all together, say of an attempt that has ended.
struct AttemptReport {
  bool restart = false;  ///< another one follows
  int status = 0;        ///< the job's, if none does
  int signal = 0;        ///< the one that asked to stop, or 0
  std::vector<RankFailure> failures;

  std::string to_json() const;
  /// Throws: CommError for text that to_json() does not write.
  static AttemptReport from_json(const std::string& text);
};

/// Returns what comes of an attempt of all nodes: each report is that of a node, in the order of nodes. A
/// signal of any ends the job. Else the first failure gives the status, and the ranks are started again if
/// `may_restart`.
AttemptReport combine(const std::vector<AttemptReport>& reports, bool may_restart);

/// Returns the one that failed first, by time; `failures` is not empty.
const RankFailure& first_of(const std::vector<RankFailure>& failures);

/// Returns a line that says which rank failed, where, and the first line of its error; 500 bytes at most.
std::string summarize(const RankFailure& failure);

/// Returns the report for the user: the first failure with message and last lines, then the others, a line
/// each.
std::string describe(const std::vector<RankFailure>& failures, int world_size);

}  // namespace cohort::launch
