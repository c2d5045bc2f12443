// Each node posts what came of its ranks. Node 0 reads the reports in the order of nodes, joins them, and
// posts the result, which holds for all. Always: the store goes with node 0, so after the last attempt node
// 0 may not leave until each node has read the result, or is lost.
#include "cohort/launch/internal/store_agent_group.h"

#include <signal.h>

#include <algorithm>
#include <charconv>

#include "cohort/base/error.h"

namespace cohort::launch {
namespace {

using base::concat;

// The signal that another agent says has asked to stop: one of those that this agent takes, else SIGTERM, as
// nodes may have other --signals-to-handle. 0 where the word, which came over the network, names none that
// an agent could have taken.
int signal_in(const std::string& word, const std::vector<int>& taken) {
  int number = 0;
  const char* const end = word.data() + word.size();
  const auto [next, error] = std::from_chars(word.data(), end, number);
  if (error != std::errc() || next != end || number < 1 || number >= SIGRTMIN) return 0;
  for (const int never : {SIGKILL, SIGSTOP, SIGUSR1, SIGUSR2, SIGTSTP}) {
    if (number == never) return 0;
  }
  return std::ranges::find(taken, number) != taken.end() ? number : SIGTERM;
}

}  // namespace

StoreAgentGroup::StoreAgentGroup(const RunOptions& options, AgentStoreClient& client)
    : options_(options), client_(client) {
  client_.watch("signal");
  client_.watch("abort");
}

// The store client is to be asked often enough who is lost, whatever the interval is.
std::chrono::milliseconds StoreAgentGroup::poll_interval() const {
  return std::min(options_.monitor_interval, client_.round_time());
}

void StoreAgentGroup::begin_attempt(int number) {
  attempt_ = number;
  reports_.clear();
  client_.watch(key("fail"));
}

void StoreAgentGroup::announce_stop(int signal) {
  client_.post("signal", std::to_string(signal));
}

void StoreAgentGroup::announce_failure() {
  client_.post(key("fail"), std::to_string(options_.node_rank));
}

void StoreAgentGroup::announce_abort(const std::string& why) {
  client_.post("abort", concat("node ", options_.node_rank, ": ", why));
}

int StoreAgentGroup::stop_signal() const {
  return signal_in(client_.received("signal").value_or(""), options_.signals_to_handle);
}

bool StoreAgentGroup::is_attempt_over() const {
  return client_.received(key("fail")) || client_.received("abort") || !client_.lost().empty();
}

void StoreAgentGroup::post_report(const AttemptReport& own_report) {
  client_.post(key("end", options_.node_rank), own_report.to_json());
  if (options_.node_rank != 0) {
    client_.watch(key("result"));
    return;
  }
  // All nodes are watched from now on, so their words come while the report of one is waited for.
  for (int node = 1; node < options_.nnodes; ++node) {
    client_.watch(key("end", node));
    client_.watch(key("result_seen", node));
  }
  reports_ = {own_report};
}

std::optional<AttemptReport> StoreAgentGroup::result() {
  if (options_.node_rank != 0) {
    const auto text = received_if_alive(key("result"));
    if (!text) return std::nullopt;
    AttemptReport result = AttemptReport::from_json(*text);
    client_.post(key("result_seen", options_.node_rank), "1");
    return result;
  }
  while (reports_.size() < static_cast<std::size_t>(options_.nnodes)) {
    const auto text = received_if_alive(key("end", static_cast<int>(reports_.size())));
    if (!text) return std::nullopt;
    reports_.push_back(AttemptReport::from_json(*text));
  }
  const AttemptReport result = combine(reports_, attempt_ < options_.max_restarts);
  client_.post(key("result"), result.to_json());
  return result;
}

// A lost node never reads the result. The others still need the store for it.
bool StoreAgentGroup::may_leave() const {
  if (options_.node_rank != 0) return true;
  for (int node = 1; node < options_.nnodes; ++node) {
    if (!client_.received(key("result_seen", node)) && !client_.is_lost(node)) return false;
  }
  return true;
}

// The word under `key`. As long as the other agents live they may take their time: the ranks of another node
// may have more to do than ours.
std::optional<std::string> StoreAgentGroup::received_if_alive(const std::string& key) const {
  if (auto value = client_.received(key)) return value;
  if (const auto reason = client_.received("abort")) {
    throw PeerError("launch.run", concat("another agent gave up: ", *reason));
  }
  if (const std::string lost = client_.lost(); !lost.empty()) {
    throw PeerError("launch.run", lost, "look at that node's output");
  }
  return std::nullopt;
}

std::string StoreAgentGroup::key(const char* what) const {
  return concat(what, "/", attempt_);
}

std::string StoreAgentGroup::key(const char* what, int node) const {
  return concat(what, "/", attempt_, "/", node);
}

}  // namespace cohort::launch
