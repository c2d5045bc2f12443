#include "cohort/core/timeline.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <vector>

#include "cohort/core/atomic_file.h"

namespace cohort::core {
namespace {

using Clock = Timeline::Clock;

struct Event {
  const char* name;
  char phase;  // 'X' a span, 'C' a counter
  int thread;
  Clock::time_point begin;
  Clock::time_point end;
  double value;
};

struct Recorder {
  std::mutex mutex;
  std::vector<Event> events;
  std::size_t max_events = 0;
  std::size_t dropped = 0;
  Clock::time_point origin;
  std::map<int, std::string> thread_names;
};

// Leaked on purpose: worker threads may still record while statics are destroyed.
Recorder& recorder() {
  static Recorder* instance = new Recorder;
  return *instance;
}

int thread_id() {
  thread_local const int id = static_cast<int>(syscall(SYS_gettid));
  return id;
}

void record(const Event& event) {
  Recorder& state = recorder();
  std::lock_guard lock(state.mutex);
  if (!Timeline::enabled()) return;
  if (state.events.size() < state.max_events) {
    state.events.push_back(event);
  } else {
    ++state.dropped;
  }
}

double microseconds(Clock::duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

}  // namespace

std::atomic<bool> Timeline::enabled_{false};

void Timeline::start(std::size_t max_events) {
  Recorder& state = recorder();
  std::lock_guard lock(state.mutex);
  state.events.clear();
  state.events.reserve(std::min<std::size_t>(max_events, 4096));
  state.max_events = max_events;
  state.dropped = 0;
  state.origin = Clock::now();
  enabled_ = true;
}

void Timeline::stop() {
  enabled_ = false;
}

void Timeline::name_thread(const std::string& name) {
  Recorder& state = recorder();
  std::lock_guard lock(state.mutex);
  state.thread_names[thread_id()] = name;
}

void Timeline::counter(const char* name, double value) {
  if (!enabled()) return;
  const auto now = Clock::now();
  record({name, 'C', thread_id(), now, now, value});
}

void Timeline::complete(const char* name, Clock::time_point begin) {
  record({name, 'X', thread_id(), begin, Clock::now(), 0});
}

std::string Timeline::json() {
  Recorder& state = recorder();
  std::lock_guard lock(state.mutex);
  const int process = getpid();
  nlohmann::json events = nlohmann::json::array();
  for (const auto& [thread, name] : state.thread_names) {
    events.push_back({{"name", "thread_name"},
                      {"ph", "M"},
                      {"pid", process},
                      {"tid", thread},
                      {"args", {{"name", name}}}});
  }
  for (const Event& event : state.events) {
    if (event.begin < state.origin) continue;  // began before recording did
    nlohmann::json entry = {{"name", event.name},
                            {"ph", std::string(1, event.phase)},
                            {"pid", process},
                            {"tid", event.thread},
                            {"ts", microseconds(event.begin - state.origin)}};
    if (event.phase == 'X') entry["dur"] = microseconds(event.end - event.begin);
    if (event.phase == 'C') entry["args"] = {{"value", event.value}};
    events.push_back(std::move(entry));
  }
  return nlohmann::json{
      {"traceEvents", events}, {"displayTimeUnit", "ms"}, {"otherData", {{"dropped_events", state.dropped}}}}
      .dump();
}

void Timeline::write(const std::filesystem::path& path) {
  write_file_atomically(path, json());
}

}  // namespace cohort::core
