#include "cohort/launch/internal/members/change_times.h"

#include <cstdio>
#include <utility>

#include "cohort/base/error.h"

namespace cohort::launch {
namespace {

std::string ms_between(ChangeTimes::Time begin, ChangeTimes::Time end) {
  char text[32] = "";
  std::snprintf(text, sizeof text, "%.1f ms", std::chrono::duration<double, std::milli>(end - begin).count());
  return text;
}

}  // namespace

void ChangeTimes::note_cause(Time now) {
  if (!seen_at_) seen_at_ = now;
}

std::string ChangeTimes::note_generation(std::uint64_t number, std::string cause, Time now) {
  const std::string before = number_ != 0 ? line("; another generation came first") : "";
  number_ = number;
  cause_ = std::move(cause);
  caused_at_ = std::exchange(seen_at_, std::nullopt);
  agreed_at_ = now;
  entered_at_.reset();
  recovered_at_.reset();
  return before;
}

std::string ChangeTimes::note_ranks(std::uint64_t entered, std::uint64_t recovered, Time now) {
  if (number_ == 0) return "";
  if (!entered_at_ && entered >= number_) entered_at_ = now;
  if (recovered < number_) return "";
  recovered_at_ = now;
  const std::string text = line("");
  number_ = 0;
  return text;
}

std::string ChangeTimes::line(const char* end) const {
  std::string text = base::concat("generation ", number_, ": ", cause_);
  const char* separator = "; ";
  const auto add = [&](const char* part, const std::optional<Time>& from, const std::optional<Time>& to) {
    if (!from || !to) return;
    text += base::concat(separator, part, " ", ms_between(*from, *to));
    separator = ", ";
  };
  add("agree", caused_at_, agreed_at_);
  add("rebuild", agreed_at_, entered_at_);
  add("redo", entered_at_, recovered_at_);
  add("total", caused_at_ ? caused_at_ : agreed_at_, recovered_at_);
  return text + end;
}

}  // namespace cohort::launch
