#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cohort/base/registry.h"
#include "cohort/base/text/named_options.h"
#include "cohort/optim/schedule.h"

/// Schedules by name: Cohort's, and those that a program or a library given to `--load` registers.
///
///     COHORT_REGISTER_SCHEDULE("square_root", [](const cohort::optim::ScheduleOptions& options) {
///       return cohort::optim::lambda([](std::int64_t step) { return 1 / std::sqrt(1.0 + step); },
///                                    options.name);
///     });
namespace cohort::optim {

/// A schedule by name, as a configuration file says it.
struct ScheduleOptions {
  std::string name = "constant";  ///< one of schedule_names()
  std::int64_t total_steps = 1;   ///< of the run
  std::int64_t unit_steps = 1;    ///< of a unit: of an epoch, or 1. Milestones and step_size count units.
  double lr = 0.1;                ///< that the optimizer begins with
  /// At most the run's; 0: no warm-up.
  std::int64_t warmup_steps = 0;
  double warmup_start = 0.01;                 ///< first factor of the warm-up
  std::vector<std::int64_t> milestones = {};  ///< multistep: units from the start of the run
  std::int64_t step_size = 30;                ///< step: units
  double gamma = 0.1;                         ///< step, multistep
  double eta_min = 0;                         ///< cosine, linear: the last rate
  OneCycleOptions one_cycle = {};             ///< but for total_steps
  base::NamedOptions extra = {};              ///< of a registered schedule (schedule.options)

  /// Returns the units that follow the warm-up, at least 1.
  std::int64_t units_after_warmup() const;
  /// Returns `inner`, whose steps are units, counted in steps.
  LRSchedulePtr in_units(LRSchedulePtr inner) const;
};

/// Returns a schedule that counts steps from the end of the warm-up on.
using ScheduleFactory = std::function<LRSchedulePtr(const ScheduleOptions& options)>;

/// Returns the schedule in steps, after its warm-up. Throws: UsageError for an unknown name, naming the
/// nearest and all, for one that two libraries registered, or for arguments out of range; ConfigError for an
/// option that the schedule does not have.
LRSchedulePtr make_schedule(const ScheduleOptions& options);

/// Throws: UsageError for an unknown name, or one that two libraries registered.
void check_schedule_name(const std::string& name);
/// Returns all names, sorted.
std::vector<std::string> schedule_names();

/// Makes `factory` known as `name`. Throws: UsageError if the name is taken or empty. Threads: any.
void register_schedule(const std::string& name, ScheduleFactory factory);

/// What COHORT_REGISTER_SCHEDULE calls while a library loads: a name that is taken stays with the first, and
/// make_schedule throws, naming both places.
bool register_schedule_at_load(const char* name, ScheduleFactory factory, const char* file,
                               int line) noexcept;

}  // namespace cohort::optim

/// Registers a schedule where it is written, at namespace scope.
#define COHORT_REGISTER_SCHEDULE(name, ...) \
  COHORT_REGISTER_AT_LOAD(optim::register_schedule_at_load, name, __VA_ARGS__)
