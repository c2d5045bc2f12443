#pragma once

#include <chrono>
#include <cstdint>

#include "cohort/train/trainer_options.h"

namespace cohort::train {

/// When a run saves: by steps, by minutes, and at the end of epochs. What falls due at the last step of an
/// epoch is saved after the epoch's evaluation. Threads: one caller at a time.
class SavePolicy {
 public:
  using Clock = std::chrono::steady_clock;

  /// What was saved and requested so far: the same on all ranks.
  struct History {
    std::int64_t num_saves = 0, saved_step = -1;
    bool is_requested = false, is_due_at_epoch_end = false;
    bool operator==(const History&) const = default;
  };

  explicit SavePolicy(const TrainerOptions& options) : options_(options) {}

  const History& history() const { return history_; }
  void set_history(const History& history) { history_ = history; }

  /// Starts the clock, unless it runs.
  void begin() {
    if (!runs()) last_save_ = Clock::now();
  }
  /// The time since the last save, or since begin(); 0 where the clock does not run.
  double seconds_since_save() const {
    return runs() ? std::chrono::duration<double>(Clock::now() - last_save_).count() : 0;
  }
  /// The clock runs, and shows that much, as that of another process.
  void set_seconds_since_save(double seconds) {
    last_save_ =
        Clock::now() - std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  }
  Clock::time_point last_save() const { return last_save_; }
  /// Saves so far: the same number on all ranks.
  std::int64_t num_saves() const { return history_.num_saves; }
  /// The step of the last checkpoint; -1: none was saved.
  std::int64_t saved_step() const { return history_.saved_step; }

  /// True: save_every_minutes have passed. It is enough that one rank asks, for all.
  bool is_due_by_clock() const {
    const std::chrono::duration<double> since = Clock::now() - last_save_;
    return options_.save_every_minutes() > 0 && since.count() > 60 * options_.save_every_minutes();
  }
  /// All ranks agreed to save when a step may be saved.
  void request() { history_.is_requested = true; }

  /// After step `step`: returns true if it is to be saved now. `ends_epoch`: no step of the epoch is left.
  bool is_due_after_step(std::int64_t step, bool ends_epoch) {
    const bool by_step = options_.save_every_steps() > 0 && step % options_.save_every_steps() == 0;
    if (!by_step && !history_.is_requested) return false;
    if (ends_epoch) history_.is_due_at_epoch_end = true;
    return !ends_epoch;
  }
  /// At the end of epoch `epoch`, from 1 on.
  bool is_due_after_epoch(std::int64_t epoch) const {
    return history_.is_due_at_epoch_end || is_due(epoch, options_.save_every(), options_.epochs());
  }
  void epoch_ended() { history_.is_due_at_epoch_end = false; }

  /// A save of `step` begins, which makes what was requested before it needless.
  void saving() {
    last_save_ = Clock::now();
    ++history_.num_saves;
    history_.is_requested = false;
  }
  void saved(std::int64_t step) { history_.saved_step = step; }

  /// Whether something happens in epoch `epoch`: in the first, the last, and each `every`-th.
  static bool is_due(std::int64_t epoch, std::int64_t every, std::int64_t last) {
    return every > 0 && (epoch == 1 || epoch == last || epoch % every == 0);
  }

 private:
  bool runs() const { return last_save_ != Clock::time_point(); }

  const TrainerOptions& options_;
  Clock::time_point last_save_ = {};  // that of the clock's start: it does not run
  History history_;
};

}  // namespace cohort::train
