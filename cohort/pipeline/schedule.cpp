// Each schedule is an order of turns and two numbers: how many forwards come before the first backward, and
// how many weight gradients may wait. So a new one needs no generator of its own.
#include "cohort/pipeline/schedule.h"

#include <utility>

#include "cohort/base/error.h"

namespace cohort::pipeline {
namespace {

constexpr const char* kWhereSchedule = "pipeline.schedule";
constexpr const char* kFillDrainToo = "gpipe";  // fill_drain's other name

int placements_after(const PlaceInPipeline& place) {
  return place.num_placements - place.placement - 1;
}

ActionOrder fill_drain(const PlaceInPipeline& place) {
  return {.group = place.num_micro_batches, .warm_up = place.num_micro_batches * place.num_stages};
}
ActionOrder one_f_one_b(const PlaceInPipeline& place) {
  return {.group = place.num_micro_batches, .warm_up = placements_after(place)};
}
ActionOrder interleaved(const PlaceInPipeline& place) {
  return {.group = place.num_placements,
          .warm_up = 2 * placements_after(place) + (place.num_stages - 1) * place.num_placements};
}
// Placement p holds p fewer activations than the first in 1F1B; that many weight gradients may wait.
ActionOrder zero_bubble(const PlaceInPipeline& place) {
  return {
      .group = place.num_micro_batches, .warm_up = placements_after(place), .max_waiting = place.placement};
}

double time_of(const StageCosts& costs) {
  return costs.forward + costs.input_gradient + costs.weight_gradient;
}
// Idle time of 1F1B: (p - 1) steps of one micro-batch, and a chunk's share of it where chunks interleave
// (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
// 2021). zb_h1 fills in weight gradients: (p - 1)(F + B - W) remain (Qi et al., "Zero Bubble Pipeline
// Parallelism", 2023).
double idle_plain(const PlaceInPipeline& place, const StageCosts& costs) {
  return (place.num_placements - 1) * time_of(costs) * place.num_stages;
}
double idle_interleaved(const PlaceInPipeline& place, const StageCosts& costs) {
  return idle_plain(place, costs) / place.num_stages;
}
double idle_zero_bubble(const PlaceInPipeline& place, const StageCosts& costs) {
  return idle_plain(place, costs) - 2 * (place.num_placements - 1) * costs.weight_gradient;
}

base::Registry<ScheduleType>& registry() {
  static auto* instance = new base::Registry<ScheduleType>(
      "pipeline schedule", kWhereSchedule,
      {{Schedule::kFillDrain.name(), {.order = fill_drain, .idle_time = idle_plain}},
       {Schedule::kOneFOneB.name(), {.order = one_f_one_b, .max_stages = 1, .idle_time = idle_plain}},
       {Schedule::kInterleaved.name(),
        {.order = interleaved, .min_stages = 2, .idle_time = idle_interleaved}},
       {Schedule::kZeroBubble.name(),
        {.order = zero_bubble, .splits_backward = true, .max_stages = 1, .idle_time = idle_zero_bubble}}},
      {kFillDrainToo});
  return *instance;
}

void check_schedule_type(const std::string& name, const ScheduleType& type) {
  if (!type.order) {
    throw UsageError(kWhereSchedule, base::concat("schedule '", name, "' was registered without an order"));
  }
  const bool has_most = type.max_stages != 0;
  if (type.min_stages < 1 || (has_most && type.max_stages < type.min_stages)) {
    throw UsageError(kWhereSchedule,
                     base::concat("schedule '", name, "' was registered with min_stages = ", type.min_stages,
                                  " and max_stages = ", type.max_stages),
                     "min_stages from 1 on, and max_stages from min_stages on, or 0 for any number");
  }
}

}  // namespace

Schedule parse_schedule(const std::string& text) {
  registry().check(text);  // a library may have registered the other name
  if (text == kFillDrainToo) return Schedule::kFillDrain;
  registry().get(text);  // throws for an unknown one
  return Schedule(text);
}

std::string to_string(const Schedule& schedule) {
  return schedule.name();
}

ScheduleType schedule_type(const Schedule& schedule) {
  ScheduleType type = registry().get(schedule.name());
  // Registration while a library loads cannot throw, so a wrong type is found on the first use.
  check_schedule_type(schedule.name(), type);
  return type;
}

std::vector<std::string> schedule_names() {
  return registry().names();
}

void register_schedule(const std::string& name, ScheduleType type) {
  check_schedule_type(name, type);
  registry().add(name, std::move(type), "register_schedule");
}

bool register_schedule_at_load(const char* name, ScheduleType type, const char* file, int line) noexcept {
  return registry().add_at_load(name, std::move(type), file, line);
}

}  // namespace cohort::pipeline
