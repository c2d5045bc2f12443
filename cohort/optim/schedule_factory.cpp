// A factory makes what follows the warm-up, and make_schedule puts the warm-up before it. Milestones count
// from the start of the run, so they are moved back by the warm-up. The length of a run is saturated by who
// counts it: products of units are checked before they are made, so a huge number of epochs cannot overflow.
#include "cohort/optim/schedule_factory.h"

#include <algorithm>
#include <limits>

#include "cohort/base/error.h"
#include "cohort/base/text/make_named.h"

namespace cohort::optim {
namespace {

using base::concat;
constexpr const char* kScheduleOptions = "schedule.options";

// A quarter of the range, so that sums of a few such numbers do not overflow.
constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max() / 4;  // in steps

// A number that no run reaches where it is too large.
std::int64_t steps_of(const ScheduleOptions& options, std::int64_t units) {
  return units > kNever / options.unit_steps ? kNever : units * options.unit_steps;
}

std::int64_t after_warmup(const ScheduleOptions& options, std::int64_t step) {
  // A milestone within the warm-up takes effect as soon as the warm-up is over.
  return std::max<std::int64_t>(0, step - options.warmup_steps);
}

LRSchedulePtr make_step(const ScheduleOptions& options) {
  std::vector<std::int64_t> steps;
  const std::int64_t size = steps_of(options, options.step_size);
  if (size < 1) {
    throw UsageError("optim.make_schedule",
                     concat("step_size is ", options.step_size, ", expected 1 or more"));
  }
  // A list in place of step_decay(): steps count from the start of the run, and the warm-up shifts them.
  for (std::int64_t step = size; step < options.total_steps; step += size) {
    steps.push_back(after_warmup(options, step));
  }
  return multistep(std::move(steps), options.gamma);
}

LRSchedulePtr make_multistep(const ScheduleOptions& options) {
  std::vector<std::int64_t> steps;
  for (const std::int64_t milestone : options.milestones) {
    steps.push_back(after_warmup(options, steps_of(options, milestone)));
  }
  return multistep(std::move(steps), options.gamma);
}

LRSchedulePtr make_cosine(const ScheduleOptions& options) {
  return options.in_units(cosine(options.units_after_warmup(), options.eta_min));
}

LRSchedulePtr make_linear(const ScheduleOptions& options) {
  // linear() takes factors, eta_min is a rate. With rate 0 any factor gives 0.
  const double end = options.lr > 0 ? options.eta_min / options.lr : 0.0;
  return options.in_units(linear(1.0, end, options.units_after_warmup()));
}

LRSchedulePtr make_one_cycle(const ScheduleOptions& options) {
  if (options.warmup_steps > 0) {
    throw UsageError("optim.make_schedule", "one_cycle has a warm-up of its own", "warmup_steps = 0");
  }
  OneCycleOptions cycle = options.one_cycle;
  cycle.total_steps = options.total_steps;
  return one_cycle(cycle);
}

// Cohort's own have no other options than ScheduleOptions'.
template <typename Make>
ScheduleFactory built_in_schedule(Make make) {
  return base::without_extra("schedule", kScheduleOptions, std::move(make));
}

// What the factory throws says which schedule it was, and no option is ignored.
ScheduleFactory checked(const std::string& name, ScheduleFactory factory) {
  return [name, factory = std::move(factory)](const ScheduleOptions& given) {
    const std::string owner = concat("schedule '", name, "'");
    if (!factory) throw UsageError("optim.registry", concat(owner, " was registered without a factory"));
    const auto make = [&](const base::NamedOptions& extra) {
      ScheduleOptions options = given;
      options.extra = extra;
      return factory(options);
    };
    return base::make_named<UsageError>("optim.registry", kScheduleOptions, owner, given.extra, make);
  };
}

base::Registry<ScheduleFactory>& schedule_registry() {
  static auto* instance = new base::Registry<ScheduleFactory>(
      "schedule", "optim.make_schedule",
      {{"constant", built_in_schedule([](const ScheduleOptions&) { return constant(); })},
       {"step", built_in_schedule(make_step)},
       {"multistep", built_in_schedule(make_multistep)},
       {"cosine", built_in_schedule(make_cosine)},
       {"linear", built_in_schedule(make_linear)},
       {"one_cycle", built_in_schedule(make_one_cycle)}});
  return *instance;
}

}  // namespace

std::int64_t ScheduleOptions::units_after_warmup() const {
  // Rounded up: the last unit may be cut short by the end of the run.
  return std::max<std::int64_t>(1, (total_steps - warmup_steps + unit_steps - 1) / unit_steps);
}

LRSchedulePtr ScheduleOptions::in_units(LRSchedulePtr inner) const {
  return unit_steps == 1 ? inner : per_epoch(std::move(inner), unit_steps);
}

LRSchedulePtr make_schedule(const ScheduleOptions& options) {
  if (options.unit_steps < 1 || options.total_steps < 1 || options.warmup_steps < 0) {
    throw UsageError("optim.make_schedule",
                     concat("got ", options.total_steps, " steps, units of ", options.unit_steps,
                            " steps and a warm-up of ", options.warmup_steps));
  }
  LRSchedulePtr schedule = schedule_registry().get(options.name)(options);
  if (options.warmup_steps == 0) return schedule;
  return warmup(options.warmup_steps, options.warmup_start, std::move(schedule));
}

void check_schedule_name(const std::string& name) {
  schedule_registry().get(name);
}

std::vector<std::string> schedule_names() {
  return schedule_registry().names();
}

void register_schedule(const std::string& name, ScheduleFactory factory) {
  if (!factory) throw UsageError("optim.registry", "a schedule needs a factory");
  schedule_registry().add(name, checked(name, std::move(factory)), "register_schedule");
}

bool register_schedule_at_load(const char* name, ScheduleFactory factory, const char* file,
                               int line) noexcept {
  return schedule_registry().add_at_load(name, checked(name, std::move(factory)), file, line);
}

}  // namespace cohort::optim
