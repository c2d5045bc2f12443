// LibTorch's profiler and this program's timeline record together, each by a clock of its own. A moment is
// read by both clocks at the start, the closest of several tries; it puts both into a single trace. Only
// calls that begin and end on the same thread, and work on GPUs, become events.
#include "cohort/bench/profile.h"

#include <torch/csrc/autograd/profiler_kineto.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <set>

#include "cohort/base/error.h"
#include "cohort/base/files/atomic_file.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/timeline.h"
#include "cohort/bench/internal/accelerator.h"
#include "cohort/bench/internal/profile_events.h"
#include "cohort/core/torch_compat.h"

namespace cohort::bench {
namespace {

using base::Timeline;
using torch::autograd::profiler::KinetoEvent;
namespace impl = torch::profiler::impl;

// LibTorch's profiler writes to stderr when it begins and ends, unless it is told not to in the environment
// before its first use. Done while the library loads, when no thread reads the environment.
[[maybe_unused]] const bool profiler_is_quiet = ::setenv("KINETO_LOG_LEVEL", "99", /*overwrite=*/0) == 0;

// libkineto's ActivityType, whose header is not in every LibTorch.
constexpr std::uint8_t kOperator = 0, kAnnotation = 1, kAnnotationOnGpu = 2;

std::string shapes_of(const KinetoEvent& event) {
  base::TextList shapes;
  for (const std::vector<std::int64_t>& shape : event.shapes()) shapes.add("[", base::join(shape), "]");
  return "[" + shapes.text() + "]";
}

/// The calls that began and ended on one thread, and work on GPUs.
std::vector<detail::Event> events_of(const std::vector<KinetoEvent>& recorded, bool shapes) {
  std::vector<detail::Event> events;
  for (const KinetoEvent& event : recorded) {
    // Such as calls that still ran when the profiler stopped.
    if (event.endNs() <= event.startNs()) continue;
    const bool on_thread = event.deviceType() == c10::DeviceType::CPU;
    const bool on_gpu = event.deviceType() == c10::DeviceType::CUDA;
    const bool is_call =
        event.startThreadId() == event.endThreadId() && !event.isAsync() && !event.isPythonFunction();
    // An annotation on a GPU lies around work that is recorded itself.
    if (on_thread ? !is_call : !on_gpu || event.activityType() == kAnnotationOnGpu) continue;
    const bool has_id = event.activityType() == kOperator || event.activityType() == kAnnotation;
    events.push_back({.begin = static_cast<std::int64_t>(event.startNs()),
                      .end = static_cast<std::int64_t>(event.endNs()),
                      .row = event.deviceResourceId(),
                      .gpu = on_thread ? -1 : event.deviceIndex(),
                      .name = event.name(),
                      .shapes = shapes && on_thread ? shapes_of(event) : "",
                      .id = on_thread && has_id ? event.correlationId() : 0,
                      .started_by = on_thread ? 0 : event.linkedCorrelationId()});
  }
  detail::sort(events);
  return events;
}

/// One moment by the timeline's clock and by LibTorch's.
struct Moment {
  Timeline::Clock::time_point time;
  std::int64_t since_1970 = 0;
};

Moment now_by_both_clocks() {
  Moment best;
  auto least = Timeline::Clock::duration::max();
  for (int i = 0; i < 9; ++i) {  // whoever is interrupted between the two tries again
    const auto before = Timeline::Clock::now();
    const auto between = std::chrono::system_clock::now().time_since_epoch();
    const auto took = Timeline::Clock::now() - before;
    if (took >= least) continue;
    least = took;
    best = {before + took / 2, std::chrono::duration_cast<std::chrono::nanoseconds>(between).count()};
  }
  return best;
}

}  // namespace

struct Profiler::State {
  bool shapes = false;
  bool own_timeline = false;
  Moment begin;
};

Profiler::Profiler(const ProfileOptions& options) : state_(std::make_unique<State>()) {
  if (impl::profilerEnabled() || COHORT_GLOBAL_PROFILER() != nullptr) {
    throw UsageError("bench.profile", "a profiler of LibTorch is running already; there can be one",
                     "stop that one first");
  }
  state_->shapes = options.shapes();
  impl::ProfilerConfig config(impl::ProfilerState::KINETO, /*report_input_shapes=*/options.shapes());
  // Backward runs on threads of autograd's, and data are loaded on others.
  config.experimental_config.profile_all_threads = true;
  std::set<impl::ActivityType> activities = {impl::ActivityType::CPU};
  if (detail::has_accelerator()) activities.insert(impl::ActivityType::CUDA);
  torch::autograd::profiler::prepareProfiler(config, activities);
  torch::autograd::profiler::enableProfiler(config, activities);
  state_->own_timeline = !Timeline::enabled();
  if (state_->own_timeline) Timeline::start();
  // Last, so that to start the profiler is no part of what it measures.
  state_->begin = now_by_both_clocks();
}

Profiler::~Profiler() {
  if (!state_) return;
  if (state_->own_timeline) Timeline::stop();
  try {
    torch::autograd::profiler::disableProfiler();
  } catch (const std::exception&) {  // nothing was asked of it, so nothing is missed
  }
}

Profile Profiler::stop(std::int64_t steps) {
  if (!state_) throw UsageError("bench.profile", "stop() was called twice");
  if (steps < 1) throw UsageError("bench.profile", base::concat("got ", steps, " steps, expected 1 or more"));
  // What the steps started on a GPU is theirs, so the end comes after it.
  detail::wait_for_accelerator();
  const auto end = Timeline::Clock::now();
  const std::unique_ptr<State> state = std::move(state_);
  if (state->own_timeline) Timeline::stop();
  const auto recorded = torch::autograd::profiler::disableProfiler();
  const std::vector<detail::Event> events = events_of(recorded->events(), state->shapes);
  Profile profile;
  profile.operators_ = detail::rows_of(events);
  profile.wall_ = std::chrono::duration_cast<std::chrono::nanoseconds>(end - state->begin.time);
  profile.steps_ = steps;
  profile.num_events_ = static_cast<std::int64_t>(events.size());
  // The timeline counts from its own start, by a clock that is not LibTorch's: both are told from `begin`.
  const Timeline::Clock::time_point zero = std::min(state->begin.time, Timeline::origin());
  const auto before = std::chrono::duration_cast<std::chrono::nanoseconds>(state->begin.time - zero).count();
  const std::string timeline = Timeline::events(::getpid(), "", zero);
  profile.trace_ = R"({"displayTimeUnit":"ms","traceEvents":[)";
  // Every event of ours begins with a comma, so something has to stand before the first.
  profile.trace_ += timeline.empty() ? base::concat(R"({"ph":"M","name":"process_name","pid":)", ::getpid(),
                                                    R"(,"args":{"name":"cohort"}})")
                                     : timeline;
  profile.trace_ += "\n" + detail::trace_of(events, state->begin.since_1970 - before) + "]}\n";
  return profile;
}

void Profile::write_trace(const std::filesystem::path& path) const {
  base::write_file_atomically(path, trace_);
}

std::string Profile::table(std::size_t max_rows) const {
  return detail::table_of(operators_, steps_, wall_, max_rows);
}

Profile profile(const std::function<void()>& step, const ProfileOptions& options) {
  if (options.steps() < 1 || options.warm_up() < 0) {
    throw UsageError("bench.profile", base::concat("got ", options.warm_up(), " steps of warm-up and ",
                                                   options.steps(), " to record; expected 0 and 1 or more"));
  }
  for (int i = 0; i < options.warm_up(); ++i) step();
  Profiler profiler(options);
  for (int i = 0; i < options.steps(); ++i) {
    const base::TimelineScope scope("step");
    step();
  }
  return profiler.stop(options.steps());
}

}  // namespace cohort::bench
