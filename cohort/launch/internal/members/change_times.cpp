// A line has the parts whose ends this node has seen. What was under way when another generation came is a
// part that has taken as long at least. Parts add up to the total, which is an upper bound where `detect` is
// one, and a lower one without `detect` where the change did not end.
#include "cohort/launch/internal/members/change_times.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"

namespace cohort::launch {
namespace {

std::string ms_between(ChangeTimes::Time begin, ChangeTimes::Time end) {
  char text[32] = "";
  std::snprintf(text, sizeof text, "%.1f ms", std::chrono::duration<double, std::milli>(end - begin).count());
  return text;
}

}  // namespace

void ChangeTimes::note_cause(Time now, std::optional<Time> alive_at) {
  if (!next_) next_ = Cause{now, alive_at};
}

std::string ChangeTimes::note_generation(std::uint64_t number, std::string cause, std::uint64_t detect_ms,
                                         Time now) {
  const std::string before = number_ != 0 ? line(now) + "; another generation came first" : "";
  number_ = number;
  text_ = std::move(cause);
  cause_ = std::exchange(next_, std::nullopt);
  detect_ = std::chrono::milliseconds(detect_ms);
  agreed_at_ = now;
  recovered_at_.reset();
  stepped_at_.reset();
  return before;
}

std::string ChangeTimes::note_ranks(std::uint64_t recovered, std::uint64_t stepped, Time now) {
  if (number_ == 0) return "";
  if (!recovered_at_ && recovered >= number_) recovered_at_ = now;
  if (stepped < number_) return "";
  stepped_at_ = now;
  return finish();
}

std::string ChangeTimes::finish() {
  if (number_ == 0) return "";
  const std::string text = line(std::nullopt);
  number_ = 0;
  return text;
}

std::string ChangeTimes::line(const std::optional<Time>& ended_at) const {
  base::TextList parts;
  const auto add = [&](const char* part, const std::optional<Time>& from, const std::optional<Time>& to,
                       const char* relation = " ") {
    if (!from || !to) return;
    parts.add(part, relation, ms_between(*from, *to));
  };
  // When another agent was known to live is told as a time before the decision, of which this node has heard
  // a moment later.
  std::optional<Time> alive_at = cause_ ? cause_->alive_at : std::nullopt;
  if (detect_.count() > 0) alive_at = std::min(alive_at.value_or(agreed_at_), agreed_at_ - detect_);
  std::optional<Time> seen_at;
  if (cause_) seen_at = cause_->seen_at;
  if (alive_at && seen_at) alive_at = std::min(*alive_at, *seen_at);
  add("detect", alive_at, seen_at.value_or(agreed_at_), " <= ");
  add("agree", seen_at, agreed_at_);
  add("rebuild", agreed_at_, recovered_at_);
  add("redo", recovered_at_, stepped_at_);
  if (ended_at) {  // the part that was under way, and the whole without `detect`, which is an upper bound
    if (recovered_at_) add("redo", recovered_at_, ended_at, " >= ");
    if (!recovered_at_) add("rebuild", agreed_at_, ended_at, " >= ");
    add("total", seen_at.value_or(agreed_at_), ended_at, " >= ");
  } else {
    const Time begin = alive_at ? *alive_at : seen_at.value_or(agreed_at_);
    add("total", begin, stepped_at_ ? stepped_at_ : recovered_at_, alive_at ? " <= " : " ");
  }
  return base::concat("generation ", number_, ": ", text_, parts.empty() ? "" : "; ", parts.text());
}

}  // namespace cohort::launch
