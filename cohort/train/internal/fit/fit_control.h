#pragma once

#include <cstdint>
#include <optional>

#include "cohort/base/signals.h"
#include "cohort/train/internal/fit/rank_coordinator.h"
#include "cohort/train/internal/fit/save_policy.h"
#include "cohort/train/trainer_options.h"

namespace cohort::train {

/// What signals, and the clock, of any rank ask a fit to do.
class FitControl {
 public:
  /// Both must outlive this.
  FitControl(const TrainerOptions& options, RankCoordinator& ranks) : options_(options), ranks_(ranks) {}

  /// Where the options say so, signals of this process no longer end it but are heard, while this lives.
  /// Throws: UsageError where another fit hears them.
  void begin() {
    if (options_.handle_signals()) signals_.emplace();
  }

  /// The signal that all ranks agreed to stop at; 0: none.
  int stop_signal() const { return stop_signal_; }
  bool stopping() const { return stop_signal_ != 0; }

  /// Returns what all ranks are to do now, never what this rank alone requests: a save is a collective. The
  /// first signal that it tells stays stop_signal(). Collective.
  RankCoordinator::ControlRequests poll(const SavePolicy& policy) {
    RankCoordinator::ControlRequests requests;
    if (signals_) {
      requests.save_now = signals_->take_save_request();
      requests.stop_signal = signals_->stop_signal();
    }
    requests.save_due = ranks_.is_first() && policy.is_due_by_clock();
    RankCoordinator::ControlRequests agreed = ranks_.agree_on(requests);
    // Several ranks hear what was requested at the poll before. A save since then is what was requested.
    if (ranks_.size() > 1 && policy.num_saves() != num_saves_told_) agreed.save_now = agreed.save_due = false;
    num_saves_told_ = policy.num_saves();
    if (!stopping()) stop_signal_ = agreed.stop_signal;
    return agreed;
  }

 private:
  const TrainerOptions& options_;
  RankCoordinator& ranks_;
  std::optional<base::TrainingSignals> signals_;
  std::int64_t num_saves_told_ = 0;  // saves before the last poll
  int stop_signal_ = 0;
};

}  // namespace cohort::train
