#include "cohort/launch/failure.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cohort/core/error.h"

namespace cohort::launch {
namespace {

using core::concat;
using nlohmann::json;

// Each line of `text` behind four spaces.
std::string indented(const std::string& text) {
  std::string result;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    result += "\n    " + text.substr(begin, end - begin);
    begin = end + 1;
  }
  return result;
}

json write(const RankFailure& failure) {
  return {{"rank", failure.rank},       {"local_rank", failure.local_rank},
          {"node", failure.node},       {"host", failure.host},
          {"pid", failure.pid},         {"attempt", failure.attempt},
          {"status", failure.status},   {"what", failure.what},
          {"message", failure.message}, {"details", failure.details},
          {"time", failure.time},       {"last_lines", failure.last_lines}};
}

RankFailure read(const json& data) {
  RankFailure failure;
  data.at("rank").get_to(failure.rank);
  data.at("local_rank").get_to(failure.local_rank);
  data.at("node").get_to(failure.node);
  data.at("host").get_to(failure.host);
  data.at("pid").get_to(failure.pid);
  data.at("attempt").get_to(failure.attempt);
  data.at("status").get_to(failure.status);
  data.at("what").get_to(failure.what);
  data.at("message").get_to(failure.message);
  data.at("details").get_to(failure.details);
  data.at("time").get_to(failure.time);
  data.at("last_lines").get_to(failure.last_lines);
  return failure;
}

}  // namespace

std::string AttemptReport::to_json() const {
  json list = json::array();
  for (const RankFailure& failure : failures) list.push_back(write(failure));
  const json data = {{"restart", restart}, {"status", status}, {"signal", signal}, {"failures", list}};
  return data.dump(-1, ' ', false, json::error_handler_t::replace);
}

AttemptReport AttemptReport::from_json(const std::string& text) {
  try {
    const json data = json::parse(text);
    AttemptReport report;
    data.at("restart").get_to(report.restart);
    data.at("status").get_to(report.status);
    data.at("signal").get_to(report.signal);
    for (const json& failure : data.at("failures")) report.failures.push_back(read(failure));
    return report;
  } catch (const json::exception& error) {
    throw CommError("launch.agent", concat("another agent's report cannot be read: ", error.what()),
                    "the same version of cohort on all nodes");
  }
}

const RankFailure& first_of(const std::vector<RankFailure>& failures) {
  return *std::min_element(failures.begin(), failures.end(),
                           [](const auto& a, const auto& b) { return a.time < b.time; });
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
  std::vector<const RankFailure*> others;
  for (const RankFailure& failure : failures) {
    if (&failure != &first) others.push_back(&failure);
  }
  std::sort(others.begin(), others.end(), [](const auto* a, const auto* b) { return a->time < b->time; });
  constexpr std::size_t kMostOthers = 8;
  for (std::size_t i = 0; i < std::min(kMostOthers, others.size()); ++i) {
    const std::string& message = others[i]->message;
    text += concat("\n  then rank ", others[i]->rank, " ", others[i]->what, message.empty() ? "" : ": ",
                   message.substr(0, message.find('\n')));
  }
  if (others.size() > kMostOthers) text += concat("\n  and ", others.size() - kMostOthers, " more");
  return text;
}

}  // namespace cohort::launch
