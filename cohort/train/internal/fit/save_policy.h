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

  explicit SavePolicy(const TrainerOptions& options) : options_(options) {}

  /// Starts the clock.
  void begin() { last_save_ = Clock::now(); }
  Clock::time_point last_save() const { return last_save_; }
  /// Saves so far: the same number on all ranks.
  std::int64_t num_saves() const { return num_saves_; }
  /// The step of the last checkpoint; -1: none was saved.
  std::int64_t saved_step() const { return saved_step_; }

  /// True: save_every_minutes have passed. One rank asks, for all.
  bool is_due_by_clock() const {
    const std::chrono::duration<double> since = Clock::now() - last_save_;
    return options_.save_every_minutes() > 0 && since.count() > 60 * options_.save_every_minutes();
  }
  /// All ranks agreed to save when a step may be saved.
  void request() { is_requested_ = true; }

  /// After step `step`: returns true if it is to be saved now. `ends_epoch`: no step of the epoch is left.
  bool is_due_after_step(std::int64_t step, bool ends_epoch) {
    const bool by_step = options_.save_every_steps() > 0 && step % options_.save_every_steps() == 0;
    if (!by_step && !is_requested_) return false;
    if (ends_epoch) is_due_at_epoch_end_ = true;
    return !ends_epoch;
  }
  /// At the end of epoch `epoch`, from 1 on.
  bool is_due_after_epoch(std::int64_t epoch) const {
    return is_due_at_epoch_end_ || is_due(epoch, options_.save_every(), options_.epochs());
  }
  void epoch_ended() { is_due_at_epoch_end_ = false; }

  /// A save of `step` begins, which makes what was requested before it needless.
  void saving() {
    last_save_ = Clock::now();
    ++num_saves_;
    is_requested_ = false;
  }
  void saved(std::int64_t step) { saved_step_ = step; }

  /// Whether something happens in epoch `epoch`: in the first, the last, and each `every`-th.
  static bool is_due(std::int64_t epoch, std::int64_t every, std::int64_t last) {
    return every > 0 && (epoch == 1 || epoch == last || epoch % every == 0);
  }

 private:
  const TrainerOptions& options_;
  Clock::time_point last_save_ = {};
  std::int64_t num_saves_ = 0, saved_step_ = -1;
  bool is_requested_ = false;
  bool is_due_at_epoch_end_ = false;
};

}  // namespace cohort::train
