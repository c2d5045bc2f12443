#include "cohort/launch/meeting.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "cohort/core/error.h"
#include "cohort/core/numbered.h"
#include "cohort/core/reach.h"
#include "cohort/core/version.h"

namespace cohort::launch {
namespace {

using core::concat;
using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::seconds;

[[noreturn]] void fail(const std::string& what, const std::string& hint) {
  throw RendezvousError("launch.run", what, hint);
}

std::string key_of(int node) {
  return concat("here/", node);
}

// What nodes must agree on, as text.
std::string creed(const RunOptions& options) {
  return concat("--nnodes ", options.nnodes, ", --rdzv-id ", options.run_id, ", --max-restarts ",
                options.max_restarts, ", Cohort ", core::version());
}

// What node 0 tells all: how many ranks each node has, or why there will be no job.
json assemble(const RunOptions& options, const Peers& peers) {
  json all = {{"error", ""}, {"ranks", json::array()}, {"reached", ""}};
  for (int node = 0; node < options.nnodes; ++node) {
    const json theirs = json::parse(*peers.received(key_of(node)));
    const std::string said = theirs.at("creed");
    if (said != creed(options)) {
      all["error"] = concat("nodes disagree: node 0 has ", creed(options), "; node ", node, " has ", said);
    }
    all["ranks"].push_back(theirs.at("nproc"));
    if (all["reached"] == "" && node > 0 && !core::is_loopback(theirs.at("reached"))) {
      all["reached"] = theirs.at("reached");
    }
  }
  return all;
}

TeamPlace place_in(const RunOptions& options, const json& all) {
  TeamPlace place;
  place.world_size = 0;
  for (int node = 0; node < options.nnodes; ++node) {
    const int num_ranks = all.at("ranks").at(static_cast<std::size_t>(node));
    if (node < options.node_rank) place.first_rank += num_ranks;
    place.world_size += num_ranks;
  }
  place.run_id = options.run_id;
  place.master_addr = *options.master_addr;
  // On many a machine its own name leads to 127.0.1.1: true, but no address for others to come to.
  const std::string reached = all.at("reached");
  if (options.node_rank == 0 && !reached.empty() && core::is_loopback(place.master_addr))
    place.master_addr = reached;
  return place;
}

}  // namespace

std::optional<TeamPlace> meet(const RunOptions& options, Peers& peers, SignalInbox& signals,
                              const std::string& reached, core::Deadline deadline, int& signal) {
  const json mine = {{"creed", creed(options)}, {"nproc", options.nproc_per_node}, {"reached", reached}};
  peers.post(key_of(options.node_rank), mine.dump());
  const bool leads = options.node_rank == 0;
  for (int node = 0; leads && node < options.nnodes; ++node) peers.watch(key_of(node));
  if (!leads) peers.watch("go");
  const auto missing = [&] {
    std::vector<int> nodes;
    for (int node = 0; leads && node < options.nnodes; ++node) {
      if (!peers.received(key_of(node))) nodes.push_back(node);
    }
    return nodes;
  };
  const auto ready = [&] { return leads ? missing().empty() : peers.received("go").has_value(); };
  const core::Deadline mine_until = leads ? deadline : core::Deadline(deadline.remaining() + seconds(5));
  while (!ready()) {
    const auto waited = std::chrono::duration_cast<milliseconds>(deadline.elapsed()).count();
    if (mine_until.expired()) {
      const std::string text =
          leads ? concat(core::numbered("node", missing()), " of ", options.nnodes, " did not come within ",
                         waited, " ms")
                : concat("node 0 was there, but did not say who else is (waited ", waited, " ms)");
      if (leads) peers.post("go", json{{"error", text}}.dump());
      fail(text,
           "start cohort run on every node, each with its --node-rank; or raise --rdzv-conf timeout=SECONDS");
    }
    if (const std::string lost = peers.lost(); !lost.empty()) fail(lost, "look at node 0's output");
    std::array<pollfd, 2> waits{pollfd{signals.fd(), POLLIN, 0}, pollfd{peers.fd(), POLLIN, 0}};
    ::poll(waits.data(), waits.size(), std::min(100, std::max(1, mine_until.remaining_ms())));
    peers.news();
    while ((signal = signals.take()) != 0) {
      if (signal == SIGTSTP) ::raise(SIGSTOP);
      if (signal == SIGUSR1 || signal == SIGUSR2 || signal == SIGTSTP) continue;
      if (leads) peers.post("go", json{{"error", concat("node 0 was ended by signal ", signal)}}.dump());
      return std::nullopt;
    }
  }
  const json all = leads ? assemble(options, peers) : json::parse(*peers.received("go"));
  if (leads) peers.post("go", all.dump());
  if (const std::string error = all.at("error"); !error.empty()) {
    fail(error, "start cohort run alike on all nodes");
  }
  return place_in(options, all);
}

}  // namespace cohort::launch
