// A place is behind from the look that finds a generation which its rank has not entered. Its clock begins
// then, and anew with each word of the rank that is progress. What a thread of the rank says by itself is
// none.
#include "cohort/launch/internal/members/rank_watch.h"

#include <algorithm>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"

namespace cohort::launch {
namespace {

using base::concat;
using membership::RankStatus;

// Whether a rank waits is no progress of its own, nor that it answers its agent: a thread of its own does
// that.
bool has_moved(RankStatus before, RankStatus now) {
  before.is_waiting = now.is_waiting = false;
  before.heard = now.heard = 0;
  return before != now;
}

std::string where_it_is(const RankStatus& status) {
  if (status.entered == 0 && !status.is_ready) return "it has not come to its first Session::enter()";
  return concat("it is in generation ", status.entered, ", after step ", status.committed_steps);
}

}  // namespace

std::vector<std::string> RankWatch::note(const std::vector<ObservedRank>& ranks, Time now) {
  places_.resize(ranks.size());
  if (noted_at_ && now - *noted_at_ > kLongestPause) {
    for (Place& place : places_) place.changed_at += now - *noted_at_;
  }
  noted_at_ = now;
  std::vector<std::string> lines;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    Place& place = places_[i];
    const ObservedRank& seen = ranks[i];
    const bool is_behind = seen.is_behind();
    if (place.pid != seen.pid || has_moved(place.status, seen.status)) {
      if (place.is_told && place.pid == seen.pid) {
        lines.push_back(concat("local rank ", i, " makes progress again"));
      }
      place = {.status = seen.status, .pid = seen.pid, .changed_at = now};
    }
    // Its time begins when it is told of a generation, and not anew with each further one.
    if (is_behind && !place.is_behind) place.changed_at = now;
    place.is_behind = is_behind;
    place.status.is_waiting = seen.status.is_waiting;
    if (std::string line = check_progress(i, place, seen, now); !line.empty())
      lines.push_back(std::move(line));
    if (std::string line = check_times(seen.status); !line.empty()) lines.push_back(std::move(line));
  }
  return lines;
}

// How long ranks wait for each other is a setting of their program.
std::string RankWatch::check_times(const RankStatus& status) {
  const auto timeout = static_cast<std::chrono::milliseconds::rep>(status.timeout_ms);
  const bool is_progress = progress_.count() > timeout;
  if (timeout == 0 || has_told_times_ || (!is_progress && enter_.count() <= timeout)) return "";
  has_told_times_ = true;
  const char* const key = is_progress ? "progress_timeout" : "enter_timeout";
  return concat(
      "--rdzv-conf ", key, " is ", (is_progress ? progress_ : enter_).count(), " ms, expected at most ",
      timeout,
      " ms, for which ranks of this program wait for each other: they give up one that hangs before "
      "it is named. Try: a smaller ",
      key, "; or a larger comm.timeout of cohort train, SessionOptions::timeout of another program");
}

std::string RankWatch::check_progress(std::size_t number, Place& place, const ObservedRank& seen,
                                      Time now) const {
  // Without a generation a rank waits for one, once it has said that it can enter it.
  const bool is_starting = seen.status.entered == 0 && !seen.status.is_ready;
  if (seen.pid == 0 || (seen.to_enter == 0 && !is_starting)) return "";
  const auto still = std::chrono::duration_cast<std::chrono::milliseconds>(now - place.changed_at);
  const auto name = [&] {
    const std::string in =
        seen.to_enter == 0 ? "" : concat("process ", seen.process, " of generation ", seen.to_enter, ", ");
    return concat("local rank ", number, " (", in, "process id ", seen.pid, ")");
  };
  // One that has been in the run may be in a step, or in what its program does between two.
  const bool has_no_limit = seen.status.entered != 0 && progress_.count() == 0;
  const auto enter = seen.status.entered == 0 ? enter_ : std::max(enter_, progress_);
  if (place.is_behind && !has_no_limit && still >= enter && place.stuck.empty()) {
    place.stuck =
        concat(name(), " has not entered it for ", still.count(), " ms: ", where_it_is(seen.status));
    return concat(place.stuck, ". This node is given up until it does. Try: gdb -p ", seen.pid,
                  " to see where it is; --rdzv-conf ",
                  enter > enter_ ? "progress_timeout=SECONDS for steps or evaluations that take longer"
                                 : "enter_timeout=SECONDS for a program that begins slowly");
  }
  const bool may_wait = seen.status.is_waiting || seen.status.is_finished || place.is_behind;
  if (may_wait || progress_.count() == 0 || still < progress_ || place.is_told) return "";
  place.is_told = true;
  return concat(
      name(), " has made no progress for ", still.count(),
      " ms, and does not wait for others: ", where_it_is(seen.status), ". Try: gdb -p ", seen.pid,
      " to see where it is; --rdzv-conf progress_timeout=SECONDS for steps or evaluations that take longer");
}

std::string RankWatch::stuck() const {
  base::TextList list("; ");
  for (const Place& place : places_) {
    if (!place.stuck.empty()) list.add(place.stuck);
  }
  return list.text();
}

}  // namespace cohort::launch
