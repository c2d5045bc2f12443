// Spans of a row must not overlap. A call is recorded as it ends, onto the first row whose last span ended
// before the call began. A row's last span is recorded under the mutex: what begins later begins after it.
//
// Caller and callee know an arrow by the caller's name and the number of the call. Within a context of
// distributed autograd the arrow continues from the handler to the backward of the call. Else it ends there.
#include "cohort/rpc/internal/telemetry/call_trace.h"

#include <algorithm>
#include <chrono>

#include "cohort/base/error.h"

namespace cohort::rpc {
namespace {

using base::Timeline;
using PointType = Timeline::ArrowPoint::Type;

constexpr const char* kArrowName = "rpc";
constexpr std::size_t kMaxRows = 256;  // calls beyond are left out
constexpr std::chrono::milliseconds kBetweenCounters(100);

std::uint64_t arrow_of(std::string_view caller, std::uint64_t call) {
  std::uint32_t hash = 2166136261;  // FNV-1a
  for (const char c : caller) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619;
  return (std::uint64_t{hash} << 32) | (call & 0xFFFFFFFF);
}

const char* name_of_span(std::string_view function, std::string_view callee) {
  return Timeline::intern(base::concat(function, " on ", callee));
}

}  // namespace

void CallTrace::add(std::string_view function, std::string_view callee, std::uint64_t call, Time begun) {
  if (!Timeline::enabled()) return;
  const char* const name = name_of_span(function, callee);
  const std::lock_guard lock(mutex_);
  auto row = std::find_if(rows_.begin(), rows_.end(), [&](const Row& known) { return known.end <= begun; });
  if (row == rows_.end()) {
    if (rows_.size() == kMaxRows) return;
    const std::string number = rows_.empty() ? "" : base::concat(" (", rows_.size() + 1, ')');
    row = rows_.insert(rows_.end(), Row{Timeline::track(base::concat("calls of ", worker_, number)), {}});
  }
  Timeline::complete(name, begun, {.track = row->track, .key = "call", .value = static_cast<double>(call)});
  row->end = Timeline::Clock::now();
  // Viewers take a point at the very begin for one of the span before.
  Timeline::arrow(kArrowName, {.type = PointType::kBegin,
                               .id = arrow_of(worker_, call),
                               .track = row->track,
                               .time = begun + std::chrono::nanoseconds(1)});
}

bool CounterTrace::is_due() {
  if (!Timeline::enabled()) return false;
  const Time now = Timeline::Clock::now();
  Time::rep last = last_.load();
  if (last != 0 && now < Time(Time::duration(last)) + kBetweenCounters) return false;
  return last_.compare_exchange_strong(last, now.time_since_epoch().count());  // else another thread does
}

void CounterTrace::record(const Values& values) const {
  const auto add = [&](const char* what, auto value) {
    Timeline::counter(Timeline::intern(base::concat(what, " of ", worker_)), static_cast<double>(value));
  };
  add("pending calls", values.pending_calls);
  add("bytes on the way", values.bytes_on_the_way);
  add("references", values.references);
}

MakeTrace::MakeTrace(std::string_view function, std::string_view caller, std::string_view callee,
                     std::uint64_t call)
    : scope_(Timeline::enabled() ? name_of_span(function, callee) : nullptr) {
  if (Timeline::enabled()) {
    Timeline::arrow(kArrowName, {.type = PointType::kBegin, .id = arrow_of(caller, call)});
  }
}

HandlerTrace::HandlerTrace(std::string_view function, std::string_view caller, std::uint64_t call,
                           bool is_recorded)
    : scope_(Timeline::enabled() ? Timeline::intern(function) : nullptr) {
  if (Timeline::enabled()) {
    Timeline::arrow(kArrowName,
                    {.type = is_recorded ? PointType::kNext : PointType::kEnd, .id = arrow_of(caller, call)});
  }
}

void trace_gradient(std::string_view caller, std::uint64_t call, bool is_last) {
  if (Timeline::enabled()) {
    Timeline::arrow(kArrowName,
                    {.type = is_last ? PointType::kEnd : PointType::kNext, .id = arrow_of(caller, call)});
  }
}

}  // namespace cohort::rpc
