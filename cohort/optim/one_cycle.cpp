// A step is placed between two of three levels, first, peak and last, with the share of the way that is done.
// Rate and momentum are interpolated at the same place, so they turn at the same steps. Arguments with which
// a phase would have no steps are rejected at the start, so no share divides by zero. The cycle is that of
// Smith and Topin 2018, "Super-Convergence", with the phases and the rounding of PyTorch's OneCycleLR.
#include <array>
#include <cmath>
#include <numbers>

#include "cohort/base/error.h"
#include "cohort/optim/schedule.h"

namespace cohort::optim {
namespace {

using base::concat;

/// Where in the cycle a step is: between which two levels, and how far.
struct Position {
  int from, to;  // 0: first, 1: peak, 2: last
  double share;
};

class OneCycleSchedule : public LRSchedule {
 public:
  explicit OneCycleSchedule(const OneCycleOptions& options) : options_(options) {}

  double lr(std::int64_t step, double base_lr) const override {
    const double peak = options_.max_lr.value_or(base_lr);
    const double first = peak / options_.div_factor;
    const std::array<double, 3> levels{first, peak, first / options_.final_div_factor};
    const Position at = position(step);
    return anneal(levels[at.from], levels[at.to], at.share);
  }

  std::optional<double> momentum(std::int64_t step) const override {
    if (!options_.cycle_momentum) return std::nullopt;
    const std::array<double, 3> levels{options_.max_momentum, options_.base_momentum, options_.max_momentum};
    const Position at = position(step);
    return anneal(levels[at.from], levels[at.to], at.share);
  }

  std::string describe() const override {
    return concat("one_cycle(total_steps=", options_.total_steps,
                  ", max_lr=", options_.max_lr ? concat(*options_.max_lr) : "initial",
                  ", pct_start=", options_.pct_start, ", anneal=", options_.linear_anneal ? "linear" : "cos",
                  options_.three_phase ? ", three_phase)" : ")");
  }

 private:
  Position position(std::int64_t step) const {
    if (step < 0 || step > options_.total_steps)
      throw UsageError("optim.one_cycle", concat("got step ", step, ", expected 0 to ", options_.total_steps),
                       "total_steps as long as the run");
    const auto total = static_cast<double>(options_.total_steps);
    const auto now = static_cast<double>(step);
    // Steps count from 0, so a phase of n steps ends at n - 1. The end may lie between two steps; PyTorch
    // rounds neither.
    const double rise_end = options_.pct_start * total - 1;
    if (now <= rise_end) return {0, 1, now / rise_end};
    if (!options_.three_phase) return {1, 2, (now - rise_end) / (total - 1 - rise_end)};
    const double fall_end = 2 * options_.pct_start * total - 2;
    if (now <= fall_end) return {1, 0, (now - rise_end) / (fall_end - rise_end)};
    return {0, 2, (now - fall_end) / (total - 1 - fall_end)};
  }

  double anneal(double start, double end, double share) const {
    if (options_.linear_anneal) return (end - start) * share + start;
    return end + (start - end) / 2.0 * (std::cos(std::numbers::pi * share) + 1);
  }

  OneCycleOptions options_;
};

}  // namespace

LRSchedulePtr one_cycle(const OneCycleOptions& options) {
  auto require = [](bool good, const std::string& what) {
    if (!good) throw UsageError("optim.one_cycle", what);
  };
  require(options.total_steps > 0, concat("total_steps is ", options.total_steps, ", expected 1 or more"));
  require(options.pct_start >= 0 && options.pct_start <= 1,
          concat("pct_start is ", options.pct_start, ", expected 0 to 1"));
  require(options.div_factor > 0, concat("div_factor is ", options.div_factor, ", expected above 0"));
  require(options.final_div_factor > 0,
          concat("final_div_factor is ", options.final_div_factor, ", expected above 0"));
  const double rise_end = options.pct_start * static_cast<double>(options.total_steps) - 1;
  require(rise_end != 0,
          concat("pct_start ", options.pct_start, " of ", options.total_steps,
                 " steps is one step, in which the rate cannot rise: expected 0 or more than one"));
  const double last_start = options.three_phase ? 2 * rise_end : rise_end;
  require(static_cast<double>(options.total_steps) - 1 > last_start,
          concat("pct_start ", options.pct_start, " leaves no steps for the last phase"));
  return std::make_shared<OneCycleSchedule>(options);
}

}  // namespace cohort::optim
