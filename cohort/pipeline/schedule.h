#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/registry.h"

/// Schedules of a pipeline by name: Cohort's, and those that a program or a library given to `--load`
/// registers. Without LibTorch.
///
///     // 1F1B with one more micro-batch on the way.
///     COHORT_REGISTER_PIPELINE_SCHEDULE("eager_1f1b", {
///       .order = [](const cohort::pipeline::PlaceInPipeline& place) {
///         return cohort::pipeline::ActionOrder{.group = place.num_micro_batches,
///                                              .warm_up = place.num_placements - place.placement};
///       },
///       .max_stages = 1});
namespace cohort::pipeline {

/// The name of a schedule. `Schedule("eager_1f1b")` is one that was registered.
class Schedule {
 public:
  explicit Schedule(std::string name) : name_(std::move(name)) {}
  const std::string& name() const { return name_; }
  bool operator==(const Schedule&) const = default;

  static const Schedule kFillDrain;    ///< every forward, then every backward
  static const Schedule kOneFOneB;     ///< a backward as soon as there is one: fewer activations
  static const Schedule kInterleaved;  ///< 1F1B with several stages per placement: less idle time
  static const Schedule kZeroBubble;   ///< ZB-H1: 1F1B whose weight gradients fill idle time

 private:
  std::string name_;
};
inline const Schedule Schedule::kFillDrain{"fill_drain"};
inline const Schedule Schedule::kOneFOneB{"1f1b"};
inline const Schedule Schedule::kInterleaved{"interleaved_1f1b"};
inline const Schedule Schedule::kZeroBubble{"zb_h1"};

/// Returns the schedule of this name; gpipe is fill_drain. Throws: UsageError for an unknown name, naming the
/// nearest and all, or for one that two libraries registered.
Schedule parse_schedule(const std::string& text);
/// Writes it as parse_schedule() reads it.
std::string to_string(const Schedule& schedule);

/// What one micro-batch costs in one stage. Times in any unit, memory in any unit.
struct StageCosts {
  double forward = 1;          ///< of the forward
  double input_gradient = 1;   ///< of the gradient by the inputs, which the stage before waits for
  double weight_gradient = 1;  ///< a backward is both gradients
  double send = 0;             ///< from the end of a computation until the next stage may use the result
  double activation = 1;       ///< memory from the forward until the (input) gradient
  double weight_part = 1;      ///< of that, what stays until the weight gradient of a split backward
};

/// A placement of a pipeline, for which a schedule says the order.
struct PlaceInPipeline {
  int placement = 0;  ///< from 0
  int num_placements = 1;
  int num_stages = 1;  ///< on each placement
  int num_micro_batches = 1;
};

/// The order of a placement's actions. Its stages take turns by groups of micro-batches. Forwards and
/// backwards each run in that order; a stage's backwards always in the order of the micro-batches.
struct ActionOrder {
  /// Micro-batches that go through a stage before the placement's next stage has its turn. From 1 to the
  /// larger of num_micro_batches and 65536.
  int group = 1;
  /// Forwards before the first pair of a forward and a backward; from there on such pairs, while there are
  /// forwards. So a placement holds up to warm_up + 1 activations. More than there are forwards: all of them
  /// come first.
  int warm_up = 0;
  /// Weight gradients that may wait, where backwards are split; one more: the oldest runs.
  int max_waiting = 0;
};

/// What a schedule is. `group` must be the same on all placements, or they would wait for each other for
/// ever: simulate() finds such a plan.
struct ScheduleType {
  std::function<ActionOrder(const PlaceInPipeline& place)> order;
  bool splits_backward = false;  ///< a backward is an input gradient and, later, a weight gradient
  int min_stages = 1;            ///< on each placement, at least 1
  int max_stages = 0;            ///< on each placement, at least min_stages; 0: any number
  /// Returns the idle time of each placement by a formula, where all stages cost the same: for
  /// bubble_formula().
  std::function<double(const PlaceInPipeline& place, const StageCosts& costs)> idle_time = nullptr;
};

/// Returns what was registered. Throws: as parse_schedule() and register_schedule().
ScheduleType schedule_type(const Schedule& schedule);
/// Returns all names, sorted.
std::vector<std::string> schedule_names();

/// Makes a schedule known as `name`. Throws: UsageError if the name is taken, as gpipe is, or empty, for no
/// order, or for numbers of stages that no pipeline can have.
/// Threads: any.
void register_schedule(const std::string& name, ScheduleType type);

/// What COHORT_REGISTER_PIPELINE_SCHEDULE calls while a library loads: a name that is taken stays with the
/// first, and parse_schedule throws, naming both places.
bool register_schedule_at_load(const char* name, ScheduleType type, const char* file, int line) noexcept;

}  // namespace cohort::pipeline

/// Registers a schedule where it is written, at namespace scope.
#define COHORT_REGISTER_PIPELINE_SCHEDULE(name, ...) \
  COHORT_REGISTER_AT_LOAD(pipeline::register_schedule_at_load, name, __VA_ARGS__)
