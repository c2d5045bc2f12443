#include "cohort/train/internal/elastic/run_files.h"

namespace cohort::train {

void RunFiles::begin_elastic(const std::filesystem::path& folder, ElasticFit& fit, ElasticCoordinator& ranks,
                             std::int64_t num_virtual_ranks) {
  elastic_ = &fit;
  ranks_ = &ranks;
  num_virtual_ranks_ = num_virtual_ranks;
  if (!folder.empty()) writer_.emplace(folder, ranks);
}

void RunFiles::enter() {
  if (writer_) writer_->enter();
}

void RunFiles::forget_opened() {
  owes_opening_ = false;
  saver_.forget_written();
  if (writer_) writer_->close_ledger();
}

void RunFiles::open() {
  owes_opening_ = true;
  write("the files of the run are not opened", [] {});
}

bool RunFiles::write(const char* lost, const std::function<void()>& write) {
  const auto write_all = [&] { write_after_owed(write); };
  if (is_writer()) return writer_->write(lost, progress_.state.step, write_all);
  write_all();
  return true;
}

void RunFiles::write_last(const char* lost, const std::function<void()>& write) {
  if (is_writer() && !elastic_->is_done()) {
    writer_->write_last(progress_.state.step, [&] { write_after_owed(write); });
  } else {
    this->write(lost, write);
  }
}

void RunFiles::sync_ledger() {
  if (is_writer()) writer_->sync_ledger();
}

void RunFiles::write_after_owed(const std::function<void()>& write) {
  if (owes_opening_) open_now();
  if (is_writer()) writer_->write_lines(elastic_->state().unlisted, num_virtual_ranks_);
  write();
}

void RunFiles::open_now() {
  owes_opening_ = false;
  // `last` is moved before the logs are cut: killed from here on, `auto` starts there too.
  saver_.start_counts(resumed_from());
  reports_.start_counts();
  // Lines of an earlier start, which a checkpoint has gone back before, are cut.
  if (is_writer()) writer_->open_ledger(elastic_->start().step, !reports_.start().continues);
  if (ranks_ != nullptr && ranks_->is_first()) ranks_->set_opened();
}

// The checkpoint that `last` goes back to when the start counts; empty: it stays.
std::filesystem::path RunFiles::resumed_from() const {
  if (elastic_ == nullptr) return saver_.last();
  return reports_.start().continues ? "" : elastic_->start().resumed_from;
}

}  // namespace cohort::train
