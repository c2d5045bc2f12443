// Each process keeps the lines of steps that may not be on disk yet, as the one that writes may die, or be
// kept from writing. So a process that writes again writes what is missing. To bring a file to disk takes
// milliseconds, which a step may not: it is done once a second, and before a checkpoint, which must not be
// newer than the ledger.
#include "cohort/train/internal/elastic/run_writer.h"

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/base/threads/wait.h"

namespace cohort::train {
namespace {

constexpr std::chrono::seconds kSyncPause(1);
constexpr std::chrono::milliseconds kLastPause(100);

}  // namespace

RunWriter::RunWriter(const std::filesystem::path& folder, ElasticCoordinator& ranks,
                     std::chrono::milliseconds last_time)
    : folder_(folder), ranks_(ranks), last_time_(last_time), fence_(folder) {}

bool RunWriter::write(const char* lost, std::int64_t step, const std::function<void()>& write) {
  if (fence_.write(ranks_.info().generation, write)) {
    warned_.clear();
    return true;
  }
  if (warned_.insert(lost).second) {
    base::log_warning(base::concat("after step ", step, " ", lost,
                                   ": an earlier process 0 writes to the run's folder, and is stopped"));
  }
  return false;
}

void RunWriter::write_last(std::int64_t step, const std::function<void()>& write) {
  const auto try_to_write = [&] {
    ranks_.check_members();
    return fence_.write(ranks_.info().generation, write);
  };
  if (try_to_write()) return;
  base::log_warning(
      base::concat("after step ", step,
                   " an earlier process 0 writes to the run's folder, and is stopped: the end of "
                   "the run waits for it"));
  if (base::poll_until(try_to_write, base::Deadline(last_time_), kLastPause)) return;
  throw SystemError(
      "train.elastic",
      base::concat("the end of the run, after step ", step,
                   ", cannot be written: a process that is stopped holds ", (folder_ / ".writer").string()),
      "to end that process, and the same command again: it resumes from the last checkpoint");
}

void RunWriter::open_ledger(std::int64_t start, bool is_new) {
  ledger_.emplace(folder_ / "ledger.csv");
  if (is_new) ledger_->truncate_after(start);
  const std::int64_t missing = ledger_->begin_after(start);
  last_sync_ = {};
  if (!is_new || missing == 0) return;
  base::log_warning(base::concat((folder_ / "ledger.csv").string(), " has no lines of steps ",
                                 start - missing + 1, " to ", start,
                                 ", which this run resumes after: they were made without it"));
}

void RunWriter::write_lines(const std::vector<LedgerLine>& lines, std::int64_t num_virtual_ranks) {
  if (!ledger_) return;
  for (const LedgerLine& line : lines) ledger_->write(line, num_virtual_ranks);
  if (Clock::now() - last_sync_ >= kSyncPause) sync_ledger();
}

void RunWriter::sync_ledger() {
  if (!ledger_) return;
  ledger_->sync();
  last_sync_ = Clock::now();
  ranks_.set_listed(ledger_->last_step());
}

}  // namespace cohort::train
