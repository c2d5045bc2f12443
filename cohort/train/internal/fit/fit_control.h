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
  /// What was agreed so far: the same on all ranks.
  struct Agreed {
    int stop_signal = 0;
    std::int64_t num_saves_told = 0;  ///< saves before the last poll
  };

  /// Both must outlive this.
  FitControl(const TrainerOptions& options, RankCoordinator& ranks) : options_(options), ranks_(ranks) {}

  /// Where the options say so, signals of this process no longer end it but are heard, while this lives.
  /// Throws: UsageError where another fit hears them.
  void begin() {
    if (options_.handle_signals() && !signals_) signals_.emplace();
  }

  /// The signal that all ranks agreed to stop at; 0: none.
  int stop_signal() const { return agreed_.stop_signal; }
  bool stopping() const { return stop_signal() != 0; }
  const Agreed& agreed() const { return agreed_; }
  void set_agreed(const Agreed& agreed) { agreed_ = agreed; }

  /// Returns what all ranks are to do now, never what this rank alone requests: a save is a collective. The
  /// first signal that it tells stays stop_signal(). Collective.
  RankCoordinator::ControlRequests poll(const SavePolicy& policy) {
    RankCoordinator::ControlRequests requests;
    if (signals_) {
      requests.save_now = signals_->take_save_request();
      requests.stop_signal = signals_->stop_signal();
    }
    // Of an elastic run each process: the clock stays when another one becomes the first.
    requests.save_due = ranks_.may_write() && policy.is_due_by_clock();
    RankCoordinator::ControlRequests agreed = ranks_.agree_on(requests);
    // Several ranks hear what was requested at the poll before. A save since then is what was requested.
    if (ranks_.agrees_late() && policy.num_saves() != agreed_.num_saves_told) {
      agreed.save_now = agreed.save_due = false;
    }
    agreed_.num_saves_told = policy.num_saves();
    if (!stopping()) agreed_.stop_signal = agreed.stop_signal;
    return agreed;
  }

 private:
  const TrainerOptions& options_;
  RankCoordinator& ranks_;
  std::optional<base::TrainingSignals> signals_;
  Agreed agreed_;
};

}  // namespace cohort::train
