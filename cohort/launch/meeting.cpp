#include "cohort/launch/meeting.h"

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>

#include "cohort/core/error.h"
#include "cohort/core/log.h"
#include "cohort/core/numbered.h"
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

using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

Addresses resolve(const std::string& host, std::uint16_t port, std::string& error) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  const int code = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (code != 0) error = concat("the name cannot be resolved: ", ::gai_strerror(code));
  return {code == 0 ? found : nullptr, &::freeaddrinfo};
}

std::string numeric(const addrinfo& address) {
  std::array<char, NI_MAXHOST> text{};
  if (::getnameinfo(address.ai_addr, address.ai_addrlen, text.data(), text.size(), nullptr, 0,
                    NI_NUMERICHOST) != 0) {
    return "";
  }
  return text.data();
}

bool connects(const addrinfo& address, milliseconds most, std::string& error) {
  const Fd fd(::socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.is_open()) {
    error = std::strerror(errno);
    return false;
  }
  int failure = 0;
  if (::connect(fd.get(), address.ai_addr, address.ai_addrlen) != 0) {
    failure = errno;
    if (failure == EINPROGRESS) {
      pollfd wait{fd.get(), POLLOUT, 0};
      failure = ETIMEDOUT;
      if (::poll(&wait, 1, static_cast<int>(most.count())) > 0) {
        socklen_t size = sizeof failure;
        ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &failure, &size);
      }
    }
  }
  if (failure != 0) error = std::strerror(failure);
  return failure == 0;
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
    if (all["reached"] == "" && node > 0 && !is_loopback(theirs.at("reached"))) {
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
  if (options.node_rank == 0 && !reached.empty() && is_loopback(place.master_addr))
    place.master_addr = reached;
  return place;
}

}  // namespace

std::optional<std::string> reach(const std::string& host, std::uint16_t port, core::Deadline deadline,
                                 const std::function<bool()>& interrupted) {
  std::string error = "nobody tried";
  const core::Deadline patience{seconds(5)};
  bool said = false;
  while (!interrupted()) {
    const Addresses addresses = resolve(host, port, error);
    for (const addrinfo* at = addresses.get(); at != nullptr; at = at->ai_next) {
      const milliseconds most(std::min(2000, deadline.remaining_ms()));
      if (connects(*at, most, error)) return numeric(*at);
    }
    if (deadline.expired()) {
      const auto waited = std::chrono::duration_cast<milliseconds>(deadline.elapsed()).count();
      fail(concat("cannot reach node 0 at ", host, ":", port, " (waited ", waited, " ms): ", error),
           "check that node 0 runs, and that --master-addr and --master-port name its host and port");
    }
    if (patience.expired() && !std::exchange(said, true)) {
      core::log_info(concat("waiting for node 0 at ", host, ":", port, " (", error, ")"));
    }
    ::poll(nullptr, 0, std::min(100, deadline.remaining_ms()));
  }
  return std::nullopt;
}

bool is_loopback(const std::string& host) {
  std::string error;
  const Addresses addresses = resolve(host, 1, error);
  for (const addrinfo* at = addresses.get(); at != nullptr; at = at->ai_next) {
    if (at->ai_family == AF_INET) {
      const auto* v4 = reinterpret_cast<const sockaddr_in*>(at->ai_addr);
      if ((ntohl(v4->sin_addr.s_addr) >> 24) == 127) return true;
    } else if (at->ai_family == AF_INET6) {
      const auto* v6 = reinterpret_cast<const sockaddr_in6*>(at->ai_addr);
      if (IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr)) return true;
    }
  }
  return false;
}

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
