#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <vector>

namespace cohort::train {

class AppendFile;

/// A line of a SampleLedger.
struct LedgerLine {
  std::int64_t step = 0, epoch = 0;  ///< both from 1
  /// Indices in the data set, by virtual rank.
  std::map<std::int64_t, std::vector<std::int64_t>> samples = {};
};

/// The list of the samples of each step of an elastic run, `ledger.csv`: a line a step, in order, with its
/// epoch (from 1) and, between bars, the indices of each virtual rank in the data set.
///
///     step,epoch,samples
///     1,1,17 4|9 2|11 0|5 8
///
/// A step has one line, whoever writes it: a line that is there is not written again. A line that was cut off
/// by a crash is no line. Threads: one caller at a time. Throws: SystemError naming the file.
class SampleLedger {
 public:
  /// Opens `path`, or makes it. Removes a line that was cut off.
  explicit SampleLedger(std::filesystem::path path);
  ~SampleLedger();
  SampleLedger(const SampleLedger&) = delete;
  SampleLedger& operator=(const SampleLedger&) = delete;

  /// The last step that has a line, or that needs none; 0: none.
  std::int64_t last_step() const { return last_step_; }
  /// Removes lines of steps after `step`, which are made again: a run resumes from a checkpoint.
  void truncate_after(std::int64_t step);
  /// Steps up to `step` need no line: the run has begun after it. Returns how many of the last ones have
  /// none, as of a run that was not elastic.
  std::int64_t begin_after(std::int64_t step);
  /// Writes the line of a step, unless it is there. Throws: SystemError also where the step before it has
  /// none.
  void write(const LedgerLine& line, std::int64_t num_virtual_ranks);
  /// All lines are on disk when it returns.
  void sync();

 private:
  void cut_after(std::int64_t step);

  const std::filesystem::path path_;
  std::int64_t last_step_ = 0;
  std::unique_ptr<AppendFile> file_;
};

}  // namespace cohort::train
