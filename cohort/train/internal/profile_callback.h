#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "cohort/bench/profile.h"
#include "cohort/train/callback.h"

namespace cohort::train {

/// Profiles `steps` steps after the first kWarmUp of this process: reading, forward, backward, optimizer, and
/// what stands between those steps (an evaluation, a checkpoint). Writes the trace to `file`, and keeps the
/// table. A run that ends before is profiled as far as it got; one that ends within the warm-up is a warning.
class ProfileCallback : public Callback {
 public:
  static constexpr std::int64_t kWarmUp = 3;

  ProfileCallback(std::filesystem::path file, std::int64_t steps);
  void on_step_end(const StepReport& report) override;
  void on_fit_end(const FitResult& result) override;

  /// The table of operators; empty before the last profiled step is over.
  const std::string& table() const { return table_; }

 private:
  void finish();

  std::filesystem::path file_;
  std::int64_t steps_;
  std::int64_t seen_ = 0;
  std::optional<bench::Profiler> profiler_;
  std::string table_;
};

}  // namespace cohort::train
