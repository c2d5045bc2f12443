#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "cohort/elastic/writer_fence.h"
#include "cohort/train/internal/elastic/elastic_coordinator.h"
#include "cohort/train/internal/elastic/sample_ledger.h"

namespace cohort::train {

/// Writes to the folder of an elastic run, on the process that is the first one. Threads: one caller at a
/// time.
class RunWriter {
 public:
  /// `ranks` must outlive this. `last_time`: of write_last(). Throws: SystemError where the folder cannot be
  /// made.
  RunWriter(const std::filesystem::path& folder, ElasticCoordinator& ranks,
            std::chrono::milliseconds last_time = std::chrono::seconds(60));

  /// This process is in a generation: the folder is that of its run. Throws: as WriterFence::claim().
  void enter() { fence_.claim(ranks_.info().origin); }

  /// Calls `write`. Returns false where a process that is stopped holds the folder: nothing is written, and a
  /// warning says once what is `lost`. Throws: as WriterFence::write().
  bool write(const char* lost, std::int64_t step, const std::function<void()>& write);

  /// The same at the end of the run, where nobody would write it later: waits `last_time` for a process that
  /// is stopped. Throws: as write(); SystemError where that process holds the folder all the time;
  /// elastic::GenerationEnded where the processes of the run change meanwhile.
  void write_last(std::int64_t step, const std::function<void()>& write);

  // Within write().

  /// Opens the ledger of a run that has begun after step `start`. `is_new`: no later step has a line.
  void open_ledger(std::int64_t start, bool is_new);
  /// Another process may write it.
  void close_ledger() { ledger_.reset(); }
  /// Writes the lines that are not there, where the ledger is open. Once a second all are on disk then, and
  /// the others hear of it.
  void write_lines(const std::vector<LedgerLine>& lines, std::int64_t num_virtual_ranks);
  /// All lines are on disk.
  void sync_ledger();

 private:
  using Clock = std::chrono::steady_clock;

  const std::filesystem::path folder_;
  ElasticCoordinator& ranks_;
  const std::chrono::milliseconds last_time_;
  elastic::WriterFence fence_;
  std::optional<SampleLedger> ledger_;
  Clock::time_point last_sync_;
  std::set<std::string> warned_;  // of what was lost since write() has written last
};

}  // namespace cohort::train
