// What a failed rank tells its agent, the agents tell each other as JSON, and the user reads at the end. The
// rank that failed first is named in full: the others mostly fail since they lost it.
#include "cohort/launch/internal/failure.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cohort/base/error.h"

namespace cohort::launch {
namespace {

using base::concat;
using nlohmann::json;

// Each line of `text` after four spaces.
std::string indented(const std::string& text) {
  std::string result;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    result += "\n    " + text.substr(begin, end - begin);
    begin = end + 1;
  }
  return result;
}

}  // namespace

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankFailure, rank, local_rank, node, host, pid, attempt, status, what,
                                   message, details, time, last_lines)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(AttemptReport, restart, status, signal, failures)

std::string AttemptReport::to_json() const {
  // What ranks print may be no UTF-8.
  return json(*this).dump(-1, ' ', false, json::error_handler_t::replace);
}

AttemptReport AttemptReport::from_json(const std::string& text) {
  try {
    return json::parse(text).get<AttemptReport>();
  } catch (const json::exception& error) {
    throw CommError("launch.agent", concat("another agent's report cannot be read: ", error.what()),
                    "the same version of cohort on all nodes");
  }
}

AttemptReport combine(const std::vector<AttemptReport>& reports, bool may_restart) {
  AttemptReport result;
  for (const AttemptReport& report : reports) {
    if (result.signal == 0) result.signal = report.signal;
    if (result.status == 0) result.status = report.status;
    result.failures.insert(result.failures.end(), report.failures.begin(), report.failures.end());
  }
  // A signal ends the job; only a failure is a reason to start again.
  if (result.signal == 0 && !result.failures.empty()) {
    result.status = first_of(result.failures).status;
    result.restart = may_restart;
  }
  return result;
}

// Each time is that of the node's own clock: clocks that differ may put the wrong rank first.
const RankFailure& first_of(const std::vector<RankFailure>& failures) {
  return *std::min_element(failures.begin(), failures.end(),
                           [](const auto& a, const auto& b) { return a.time < b.time; });
}

std::string summarize(const RankFailure& failure) {
  constexpr std::size_t kMaxBytes = 500;
  const std::string& message = failure.message;
  std::string text =
      concat("rank ", failure.rank, " ", failure.what, " (host ", failure.host, ", process ", failure.pid,
             ")", message.empty() ? "" : ": ", message.substr(0, message.find('\n')));
  if (text.size() > kMaxBytes) text.resize(kMaxBytes);
  return text;
}

std::string describe(const std::vector<RankFailure>& failures, int world_size) {
  const RankFailure& first = first_of(failures);
  std::string text = concat("rank ", first.rank, " of ", world_size, " failed first: it ", first.what,
                            " (node ", first.node, ", host ", first.host, ", local rank ", first.local_rank,
                            ", process ", first.pid, ", attempt ", first.attempt, ")");
  if (!first.message.empty()) text += "\n  its error:" + indented(first.message);
  if (!first.details.empty()) text += "\n  where:" + indented(first.details);
  if (!first.last_lines.empty()) {
    text += "\n  the last it printed:";
    for (const std::string& line : first.last_lines) text += "\n    " + line;
  } else if (first.message.empty()) {
    text += "\n  it printed nothing, and recorded no error";
  }
  std::vector<const RankFailure*> other_failures;
  for (const RankFailure& failure : failures) {
    if (&failure != &first) other_failures.push_back(&failure);
  }
  std::sort(other_failures.begin(), other_failures.end(),
            [](const auto* a, const auto* b) { return a->time < b->time; });
  // The others mostly say that they lost the first one.
  constexpr std::size_t kMaxOthers = 8;
  for (std::size_t i = 0; i < std::min(kMaxOthers, other_failures.size()); ++i) {
    const std::string& message = other_failures[i]->message;
    text += concat("\n  then rank ", other_failures[i]->rank, " ", other_failures[i]->what,
                   message.empty() ? "" : ": ", message.substr(0, message.find('\n')));
  }
  if (other_failures.size() > kMaxOthers)
    text += concat("\n  and ", other_failures.size() - kMaxOthers, " more");
  return text;
}

}  // namespace cohort::launch
