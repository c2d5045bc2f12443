// A triangular learning rate (Smith 2017): from the lowest rate up to the base rate and down again, over and
// over. It keeps no state: each rate follows from the step alone.
#include <cohort/optim/schedule_factory.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>

namespace {

class Triangular : public cohort::optim::LRSchedule {
 public:
  Triangular(std::int64_t half, double lowest) : half_(half), lowest_(lowest) {}

  double lr(std::int64_t step, double base_lr) const override {
    const double position = static_cast<double>(step % (2 * half_)) / static_cast<double>(half_);
    const double height = 1 - std::abs(position - 1);  // 0 at the ends of a cycle, 1 at its peak
    return base_lr * (lowest_ + (1 - lowest_) * height);
  }

  std::string describe() const override {
    return "triangular(half=" + std::to_string(half_) + ", lowest=" + std::to_string(lowest_) + ")";
  }

 private:
  const std::int64_t half_;
  const double lowest_;
};

COHORT_REGISTER_SCHEDULE("triangular", [](const cohort::optim::ScheduleOptions& options) {
  const auto schedule = std::make_shared<const Triangular>(options.extra.integer("half", 2, 1, 1'000'000'000),
                                                           options.extra.number("lowest", 0.1));
  return options.in_units(schedule);  // the steps of `lr` are units of schedule.unit
});

}  // namespace
