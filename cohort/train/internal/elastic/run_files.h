#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>

#include "cohort/train/internal/elastic/elastic_coordinator.h"
#include "cohort/train/internal/elastic/elastic_fit.h"
#include "cohort/train/internal/elastic/run_writer.h"
#include "cohort/train/internal/fit/fit_progress.h"
#include "cohort/train/internal/fit/fit_reports.h"
#include "cohort/train/internal/fit/run_saver.h"

namespace cohort::train {

/// What a fit writes to its run's folder, in order: nothing before the start counts, then the files are
/// opened, and what was not written yet comes before what follows it.
///
/// In an elastic run any process may become the one that writes. One that was stopped while it wrote keeps
/// the others out. Threads: one caller at a time.
class RunFiles {
 public:
  /// All must outlive this.
  RunFiles(RunSaver& saver, FitReports& reports, const FitProgress& progress)
      : saver_(saver), reports_(reports), progress_(progress) {}

  /// The run is elastic. `folder`: empty where it saves nothing. All must outlive this. Throws: as
  /// RunWriter().
  void begin_elastic(const std::filesystem::path& folder, ElasticFit& fit, ElasticCoordinator& ranks,
                     std::int64_t num_virtual_ranks);
  /// This process is in a generation of an elastic run. Throws: as RunWriter::enter().
  void enter();
  /// Another process may have written since this one did.
  void forget_opened();

  /// The start counts: from here on a kill resumes from what it has written. Throws: as write().
  void open();
  /// Calls `write`, after what had to be written before it. Returns whether it did; `lost` is what is not
  /// done where it did not. Throws: as RunWriter::write().
  bool write(const char* lost, const std::function<void()>& write);
  /// The same at the end of the run, where nobody would write it later. Throws: as RunWriter::write_last().
  void write_last(const char* lost, const std::function<void()>& write);
  /// Within write(): the ledger is on disk, where there is one.
  void sync_ledger();

 private:
  bool is_writer() const { return writer_ && saver_.writes(); }
  void write_after_owed(const std::function<void()>& write);
  void open_now();
  std::filesystem::path resumed_from() const;

  RunSaver& saver_;
  FitReports& reports_;
  const FitProgress& progress_;
  ElasticFit* elastic_ = nullptr;        // of an elastic run
  ElasticCoordinator* ranks_ = nullptr;  // likewise
  std::int64_t num_virtual_ranks_ = 0;   // likewise
  std::optional<RunWriter> writer_;      // likewise, where it has a folder
  bool owes_opening_ = false;            // the start counts, and the files are not open yet
};

}  // namespace cohort::train
