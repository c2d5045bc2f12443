// An event is a small record of fixed size; text is made only when the trace is written. Names are pointers
// to texts that live for ever, so to record an event copies no text. Always: all records are under one mutex,
// and a record is kept only where recording is on and its begin is not before start(). Rows that are no
// threads have numbers above those of all threads.
#include "cohort/base/timeline.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/files/atomic_file.h"

namespace cohort::base {
namespace {

using Clock = Timeline::Clock;

struct Event {
  const char* name;
  Clock::time_point begin;
  Clock::time_point end;
  double value;  // the bits of an arrow's id
  const char* key;
  int thread;
  char phase;  // as the format has it: 'X' a span, 'C' a counter, 'i' an instant, 's', 't' and 'f' an arrow
};
// A million events are 48 MB.
static_assert(sizeof(Event) <= 48);

struct Recorder {
  std::mutex mutex;
  std::vector<Event> events;
  std::size_t max_events = 0;
  std::size_t dropped = 0;
  Clock::time_point origin;
  std::map<int, std::string> thread_names;
  std::set<int> ended;  // threads whose names go with the events that they may have recorded
  std::map<std::string, int, std::less<>> tracks;
  std::string process_name;
  std::set<std::string, std::less<>> names;
};

// It is leaked on purpose: worker threads may still record while statics are destroyed.
Recorder& recorder() {
  static Recorder* instance = new Recorder;
  return *instance;
}

int thread_id() {
  // A system call, so once for each thread. The number is the kernel's, as in LibTorch's profiler.
  thread_local const int id = static_cast<int>(::syscall(SYS_gettid));
  return id;
}

// Lives as long as its thread.
struct ThreadEnd {
  ~ThreadEnd() {
    Recorder& state = recorder();
    const std::lock_guard lock(state.mutex);
    state.ended.insert(thread_id());
  }
};

void record(const Event& event) {
  Recorder& state = recorder();
  const std::lock_guard lock(state.mutex);
  if (!Timeline::enabled() || event.begin < state.origin) return;  // stopped, or began before recording did
  if (state.events.size() < state.max_events) {
    state.events.push_back(event);
  } else {
    ++state.dropped;
  }
}

// Appends to JSON text. A trace can have a million events: as a tree of JSON values they would take a
// gigabyte.
class Writer {
 public:
  explicit Writer(std::string& out) : out_(out) {}

  Writer& raw(std::string_view text) {
    out_ += text;
    return *this;
  }
  Writer& number(double value) {
    if (!std::isfinite(value)) return raw("null");  // JSON has no name for it
    std::array<char, 40> text{};
    const auto result = std::to_chars(text.data(), text.data() + text.size(), value);
    return raw({text.data(), static_cast<std::size_t>(result.ptr - text.data())});
  }
  Writer& microseconds(Clock::duration duration) {
    // In whole numbers: a double would lose nanoseconds in a long run.
    const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
    out_ += std::to_string(nanoseconds / 1000);
    const auto rest = static_cast<int>(nanoseconds % 1000);
    if (rest == 0) return *this;
    const std::array<char, 4> digits = {'.', static_cast<char>('0' + rest / 100),
                                        static_cast<char>('0' + rest / 10 % 10),
                                        static_cast<char>('0' + rest % 10)};
    return raw({digits.data(), digits.size()});
  }
  // As text: readers of JSON take a long number for a double.
  Writer& id(std::uint64_t value) {
    std::array<char, 16> text{};
    const auto result = std::to_chars(text.data(), text.data() + text.size(), value, 16);
    return raw("\"0x").raw({text.data(), static_cast<std::size_t>(result.ptr - text.data())}).raw("\"");
  }
  Writer& quoted(std::string_view text) {
    // Names may come from users; bytes that are no UTF-8 are replaced, not thrown about.
    return raw(nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  }

 private:
  std::string& out_;
};

void write_name(Writer& out, const char* what, int process, int thread, std::string_view name) {
  out.raw(R"({"ph":"M","name":)").quoted(what).raw(R"(,"pid":)").raw(std::to_string(process));
  out.raw(R"(,"tid":)").raw(std::to_string(thread)).raw(R"(,"args":{"name":)").quoted(name).raw("}}");
}

// Letters and fields are those of Chrome's Trace Event Format: times in microseconds.
void write_event(Writer& out, const Event& event, int process, Clock::time_point origin) {
  out.raw(R"({"ph":")").raw({&event.phase, 1}).raw(R"(","name":)").quoted(event.name);
  out.raw(R"(,"pid":)").raw(std::to_string(process)).raw(R"(,"tid":)").raw(std::to_string(event.thread));
  out.raw(R"(,"ts":)").microseconds(event.begin - origin);
  if (event.phase == 'X') out.raw(R"(,"dur":)").microseconds(event.end - event.begin);
  if (event.key != nullptr) out.raw(R"(,"args":{)").quoted(event.key).raw(":").number(event.value).raw("}");
  if (event.phase == 'C') out.raw(R"(,"args":{"value":)").number(event.value).raw("}");
  if (event.phase == 'i') out.raw(R"(,"s":"t")");
  if (event.phase == 's' || event.phase == 't' || event.phase == 'f') {
    out.raw(R"(,"cat":"arrow","id":)").id(std::bit_cast<std::uint64_t>(event.value));
    if (event.phase == 'f') out.raw(R"(,"bp":"e")");  // in the span that is there, as the other points
  }
  out.raw("}");
}

}  // namespace

std::atomic<bool> Timeline::enabled_{false};

void Timeline::start(std::size_t max_events) {
  Recorder& state = recorder();
  const std::lock_guard lock(state.mutex);
  state.events.clear();
  for (const int thread : state.ended) state.thread_names.erase(thread);
  state.ended.clear();
  // Not all of it: the limit may be millions, and memory is taken as events come.
  state.events.reserve(std::min<std::size_t>(max_events, 4096));
  state.max_events = max_events;
  state.dropped = 0;
  state.origin = Clock::now();
  enabled_ = true;
}

void Timeline::stop() {
  // Without the lock: record() looks again while it has it.
  enabled_ = false;
}

void Timeline::name_thread(std::string_view name) {
  thread_local const ThreadEnd end{};
  Recorder& state = recorder();
  const std::lock_guard lock(state.mutex);
  state.ended.erase(thread_id());  // an earlier thread had the same number
  state.thread_names[thread_id()] = name;
}

std::string Timeline::thread_name(int thread) {
  Recorder& state = recorder();
  const std::lock_guard lock(state.mutex);
  const auto found = state.thread_names.find(thread);
  return found == state.thread_names.end() ? "" : found->second;
}

void Timeline::name_process(std::string_view name) {
  Recorder& state = recorder();
  const std::lock_guard lock(state.mutex);
  state.process_name = name;
}

void Timeline::counter(const char* name, double value) {
  if (!enabled()) return;
  const auto now = Clock::now();
  record({name, now, now, value, nullptr, thread_id(), 'C'});
}

void Timeline::instant(const char* name) {
  if (!enabled()) return;
  const auto now = Clock::now();
  record({name, now, now, 0, nullptr, thread_id(), 'i'});
}

void Timeline::complete(const char* name, Clock::time_point begin) {
  complete(name, begin, Detail{});
}

void Timeline::complete(const char* name, Clock::time_point begin, const Detail& detail) {
  record({name, begin, Clock::now(), detail.value, detail.key, detail.track == 0 ? thread_id() : detail.track,
          'X'});
}

void Timeline::arrow(const char* name, const ArrowPoint& point) {
  if (!enabled()) return;
  const Clock::time_point time = point.time ? *point.time : Clock::now();
  record({name, time, time, std::bit_cast<double>(point.id), nullptr,
          point.track == 0 ? thread_id() : point.track, static_cast<char>(point.type)});
}

int Timeline::track(std::string_view name) {
  constexpr int kFirst = 1 << 24;  // above every thread's number
  Recorder& state = recorder();
  const std::lock_guard lock(state.mutex);
  const auto [found, made] =
      state.tracks.try_emplace(std::string(name), kFirst + static_cast<int>(state.tracks.size()));
  if (made) state.thread_names[found->second] = name;
  return found->second;
}

const char* Timeline::intern(std::string_view name) {
  Recorder& state = recorder();
  const std::lock_guard lock(state.mutex);
  // Texts of a std::set do not move, so the pointer holds for ever.
  return state.names.emplace(name).first->c_str();
}

std::string Timeline::events(int process, std::string_view name, Clock::time_point zero) {
  Recorder& state = recorder();
  const std::lock_guard lock(state.mutex);
  std::string text;
  // About what an event takes as text.
  text.reserve(128 * (state.events.size() + 1));
  Writer out(text);
  bool first = true;
  const auto separate = [&]() { out.raw(std::exchange(first, false) ? "\n" : ",\n"); };
  if (!state.process_name.empty()) name = state.process_name;
  if (!name.empty()) {
    separate();
    write_name(out, "process_name", process, process, name);
  }
  for (const auto& [thread, thread_name] : state.thread_names) {
    separate();
    write_name(out, "thread_name", process, thread, thread_name);
  }
  for (const Event& event : state.events) {
    separate();
    write_event(out, event, process, zero);
  }
  return text;
}

Timeline::Clock::time_point Timeline::origin() {
  Recorder& state = recorder();
  const std::lock_guard lock(state.mutex);
  return state.origin;
}

std::size_t Timeline::dropped() {
  Recorder& state = recorder();
  const std::lock_guard lock(state.mutex);
  return state.dropped;
}

std::string Timeline::json() {
  return concat(R"({"displayTimeUnit":"ms","traceEvents":[)", events(::getpid(), "", origin()),
                "\n],\"otherData\":{\"dropped_events\":", dropped(), "}}\n");
}

void Timeline::write(const std::filesystem::path& path) {
  write_file_atomically(path, json());
}

}  // namespace cohort::base
