#include "cohort/bench/profile.h"

#include <torch/csrc/autograd/profiler_kineto.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "cohort/bench/timeit.h"
#include "cohort/core/atomic_file.h"
#include "cohort/core/error.h"
#include "cohort/core/timeline.h"

namespace cohort::bench {
namespace {

using core::Timeline;
using torch::autograd::profiler::KinetoEvent;
namespace impl = torch::profiler::impl;

// LibTorch's profiler writes to stderr when it begins and ends, unless it is told not to in the environment
// before its first use. Done while the library loads, when no thread reads the environment.
[[maybe_unused]] const bool profiler_is_quiet = ::setenv("KINETO_LOG_LEVEL", "99", /*overwrite=*/0) == 0;

constexpr std::int64_t kFirstRow = 1 << 25;  // rows of operators, above the timeline's own numbers

/// One call of an operator. Times in nanoseconds since 1970, as LibTorch gives them.
struct Call {
  std::int64_t begin;
  std::int64_t end;
  std::int64_t thread;  // the system's number
  std::string name;
  std::string shapes;
};

std::string shapes_of(const KinetoEvent& event) {
  std::string text = "[";
  for (const std::vector<std::int64_t>& shape : event.shapes()) {
    if (text.size() > 1) text += ", ";
    text += "[";
    for (std::size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
    text += "]";
  }
  return text + "]";
}

/// The calls that began and ended on one thread, by thread and begin, the one that contains another first.
std::vector<Call> calls_of(const std::vector<KinetoEvent>& events, bool shapes) {
  std::vector<Call> calls;
  for (const KinetoEvent& event : events) {
    if (event.deviceType() != c10::DeviceType::CPU || event.isAsync() || event.isPythonFunction()) continue;
    if (event.startThreadId() != event.endThreadId() || event.endNs() <= event.startNs()) continue;
    calls.push_back({static_cast<std::int64_t>(event.startNs()), static_cast<std::int64_t>(event.endNs()),
                     event.deviceResourceId(), event.name(), shapes ? shapes_of(event) : ""});
  }
  std::sort(calls.begin(), calls.end(), [](const Call& a, const Call& b) {
    return a.thread != b.thread ? a.thread < b.thread
           : a.begin != b.begin ? a.begin < b.begin
                                : a.end > b.end;
  });
  return calls;
}

std::vector<OperatorRow> rows_of(const std::vector<Call>& calls) {
  std::map<std::pair<std::string, std::string>, OperatorRow> rows;
  std::vector<const Call*> stack;  // the calls around the current one
  for (const Call& call : calls) {
    while (!stack.empty() && (stack.back()->thread != call.thread || stack.back()->end <= call.begin)) {
      stack.pop_back();
    }
    const std::chrono::nanoseconds length(call.end - call.begin);
    OperatorRow& row = rows[{call.name, call.shapes}];
    row.name = call.name;
    row.shapes = call.shapes;
    ++row.calls;
    row.self += length;
    const bool within_itself = std::any_of(stack.begin(), stack.end(), [&](const Call* outer) {
      return outer->name == call.name && outer->shapes == call.shapes;
    });
    if (!within_itself) row.total += length;
    if (!stack.empty()) rows[{stack.back()->name, stack.back()->shapes}].self -= length;
    stack.push_back(&call);
  }
  std::vector<OperatorRow> result;
  for (auto& [key, row] : rows) result.push_back(std::move(row));
  std::stable_sort(result.begin(), result.end(),
                   [](const OperatorRow& a, const OperatorRow& b) { return a.self > b.self; });
  return result;
}

std::string json_text(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

/// The calls as events of a Chrome trace, in microseconds since `zero` (nanoseconds since 1970).
std::string events_of(const std::vector<Call>& calls, std::int64_t zero) {
  const int process = ::getpid();
  std::map<std::int64_t, std::int64_t> rows;  // of each thread
  for (const Call& call : calls)
    rows.try_emplace(call.thread, kFirstRow + static_cast<std::int64_t>(rows.size()));
  std::string text;
  for (const auto& [thread, row] : rows) {
    text += core::concat(R"(,{"ph":"M","name":"thread_name","pid":)", process, R"(,"tid":)", row,
                         R"(,"args":{"name":"operators of thread )", thread, "\"}}\n");
  }
  char numbers[160];
  for (const Call& call : calls) {
    std::snprintf(numbers, sizeof numbers, R"(,"pid":%d,"tid":%lld,"ts":%.3f,"dur":%.3f)", process,
                  static_cast<long long>(rows.at(call.thread)), static_cast<double>(call.begin - zero) / 1e3,
                  static_cast<double>(call.end - call.begin) / 1e3);
    text += R"(,{"ph":"X","cat":"operator","name":)" + json_text(call.name) + numbers;
    if (!call.shapes.empty()) text += R"(,"args":{"shapes":)" + json_text(call.shapes) + "}";
    text += "}\n";
  }
  return text;
}

std::int64_t since_1970(std::chrono::system_clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

}  // namespace

struct Profiler::State {
  bool shapes = false;
  bool own_timeline = false;
  Timeline::Clock::time_point begin;
  std::int64_t begin_since_1970 = 0;
};

Profiler::Profiler(const ProfileOptions& options) : state_(std::make_unique<State>()) {
  if (impl::profilerEnabled() || impl::ProfilerStateBase::get(/*global=*/true) != nullptr) {
    throw UsageError("bench.profile", "a profiler of LibTorch is running already; there can be one",
                     "stop that one first");
  }
  state_->shapes = options.shapes();
  impl::ProfilerConfig config(impl::ProfilerState::KINETO, /*report_input_shapes=*/options.shapes());
  config.experimental_config.profile_all_threads = true;
  const std::set<impl::ActivityType> activities = {impl::ActivityType::CPU};
  torch::autograd::profiler::prepareProfiler(config, activities);
  torch::autograd::profiler::enableProfiler(config, activities);
  state_->own_timeline = !Timeline::enabled();
  if (state_->own_timeline) Timeline::start();
  state_->begin = Timeline::Clock::now();
  state_->begin_since_1970 = since_1970(std::chrono::system_clock::now());
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
  if (steps < 1) throw UsageError("bench.profile", core::concat("got ", steps, " steps, expected 1 or more"));
  const auto end = Timeline::Clock::now();
  const std::unique_ptr<State> state = std::move(state_);
  if (state->own_timeline) Timeline::stop();
  const auto recorded = torch::autograd::profiler::disableProfiler();
  const std::vector<Call> calls = calls_of(recorded->events(), state->shapes);
  Profile profile;
  profile.operators_ = rows_of(calls);
  profile.wall_ = std::chrono::duration_cast<std::chrono::nanoseconds>(end - state->begin);
  profile.steps_ = steps;
  profile.num_events_ = static_cast<std::int64_t>(calls.size());
  // The timeline counts from its own start, by a clock that is not LibTorch's: both are told from `begin`.
  const Timeline::Clock::time_point zero = std::min(state->begin, Timeline::origin());
  const auto before = std::chrono::duration_cast<std::chrono::nanoseconds>(state->begin - zero).count();
  const std::string timeline = Timeline::events(::getpid(), "", zero);
  profile.trace_ = R"({"displayTimeUnit":"ms","traceEvents":[)";
  // Every event of ours begins with a comma, so something has to stand before the first.
  profile.trace_ += timeline.empty() ? core::concat(R"({"ph":"M","name":"process_name","pid":)", ::getpid(),
                                                    R"(,"args":{"name":"cohort"}})")
                                     : timeline;
  profile.trace_ += "\n" + events_of(calls, state->begin_since_1970 - before) + "]}\n";
  return profile;
}

void Profile::write_trace(const std::filesystem::path& path) const {
  core::write_file_atomically(path, trace_);
}

std::string Profile::table(std::size_t max_rows) const {
  std::int64_t all = 0;
  for (const OperatorRow& row : operators_) all += row.self.count();
  const auto per_step = [&](std::chrono::nanoseconds time) {
    return to_text(std::chrono::duration<double>(time).count() / static_cast<double>(steps_));
  };
  char line[192];
  std::snprintf(line, sizeof line, "%-44s %9s %11s %7s %11s %11s\n", "operator, times per step", "calls",
                "self", "share", "total", "one call");
  std::string text = line;
  std::chrono::nanoseconds rest{0};
  std::int64_t rest_calls = 0;
  for (std::size_t i = 0; i < operators_.size(); ++i) {
    const OperatorRow& row = operators_[i];
    if (i >= max_rows) {
      rest += row.self;
      rest_calls += row.calls;
      continue;
    }
    const double share = all > 0 ? 100 * static_cast<double>(row.self.count()) / static_cast<double>(all) : 0;
    const std::string name = row.name.size() > 44 ? row.name.substr(0, 41) + "..." : row.name;
    std::snprintf(
        line, sizeof line, "%-44s %9.4g %11s %5.1f %% %11s %11s", name.c_str(),
        static_cast<double>(row.calls) / static_cast<double>(steps_), per_step(row.self).c_str(), share,
        per_step(row.total).c_str(),
        to_text(std::chrono::duration<double>(row.total).count() / static_cast<double>(row.calls)).c_str());
    text += line + (row.shapes.empty() ? "" : "  " + row.shapes) + "\n";
  }
  if (operators_.size() > max_rows) {
    text += core::concat(operators_.size() - max_rows, " more operators: ", rest_calls, " calls, ",
                         per_step(rest), " of their own\n");
  }
  return text + core::concat(steps_, steps_ == 1 ? " step" : " steps", ", ", per_step(wall_),
                             " each by wall clock, ", per_step(std::chrono::nanoseconds(all)),
                             " of it in operators\n");
}

Profile profile(const std::function<void()>& step, const ProfileOptions& options) {
  if (options.steps() < 1 || options.warm_up() < 0) {
    throw UsageError("bench.profile", core::concat("got ", options.warm_up(), " steps of warm-up and ",
                                                   options.steps(), " to record; expected 0 and 1 or more"));
  }
  for (int i = 0; i < options.warm_up(); ++i) step();
  Profiler profiler(options);
  for (int i = 0; i < options.steps(); ++i) {
    const core::TimelineScope scope("step");
    step();
  }
  return profiler.stop(options.steps());
}

}  // namespace cohort::bench
