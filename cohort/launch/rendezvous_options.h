#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "cohort/membership/etcd_options.h"

/// How the agents of a job find each other, and which of them take part. No LibTorch.
namespace cohort::launch {

/// Where agents agree on who takes part.
enum class RendezvousBackend : std::uint8_t {
  kStatic,    ///< at node 0: all nodes come, and none is replaced
  kEmbedded,  ///< in the agent at the rendezvous endpoint; torchrun's c10d
  kEtcd,      ///< in etcd
};

inline constexpr std::uint16_t kDefaultEndpointPort = 29400;  ///< torchrun's for c10d

/// What is asked for beyond a fixed number of nodes. RunOptions::nnodes is the most of them.
struct RendezvousOptions {
  RendezvousBackend backend = RendezvousBackend::kStatic;
  int min_nodes = 1;   ///< the job continues with so many; ignored by kStatic
  int num_spares = 0;  ///< agents beyond nnodes that take the places of those that are gone
  /// "host:port" of the agent that has the record, or of a member of etcd: the same text on all nodes. Not
  /// for kStatic.
  std::string endpoint = {};
  /// Whether this agent is the one at the endpoint. Nothing: if the endpoint names this host, and nobody
  /// listens there.
  std::optional<bool> is_host = std::nullopt;
  /// By which name or address other nodes reach this one. Empty: by the one by which it reaches the endpoint;
  /// where that is etcd at 127.0.0.1, this host's name.
  std::string local_addr = {};
  /// How long the first ranks wait for more nodes once min_nodes are there.
  std::chrono::milliseconds last_call_timeout{0};
  /// An agent that two others have not heard for so long is given up.
  std::chrono::milliseconds silence{500};
  /// Of kEtcd: `endpoint` is one of its endpoints, and the run's id is filled in.
  membership::EtcdOptions etcd = {};
  /// The agent leaves once this file is there, as after a signal. Empty: there is none.
  std::filesystem::path notice_file = {};

  /// The program uses elastic::Session: ranks that live on are not started again.
  bool is_elastic = false;
  int virtual_ranks = 0;  ///< of an elastic program; 0: nnodes * nproc_per_node
  int warm_ranks = 0;  ///< processes of an elastic program that wait, started, for the place of one that dies
  /// How long a rank of an elastic program may take to enter a generation. Then the others do without its
  /// node until it does. One that has been in the run may be in a step, and has `progress_timeout` where that
  /// is more. Both belong below SessionOptions::timeout, the ten minutes for which ranks wait for each other.
  std::chrono::milliseconds enter_timeout = std::chrono::minutes(5);
  /// A rank that neither gets on nor waits for others for so long is named in the log. 0: none is.
  std::chrono::milliseconds progress_timeout = std::chrono::minutes(5);

  /// Whether members may come and go.
  bool is_dynamic() const { return backend != RendezvousBackend::kStatic; }
  /// The host in `endpoint`, without brackets.
  std::string endpoint_host() const;
};

/// Returns "host:port" for HOST, HOST:PORT, [IPV6] or [IPV6]:PORT; nothing where the text is none of them.
std::optional<std::string> read_endpoint_text(std::string_view text, std::uint16_t default_port);

/// A host, without brackets, and its port.
struct HostPort {
  std::string host;
  std::uint16_t port = 0;
};
/// Reads what read_endpoint_text() returns.
HostPort split_endpoint(std::string_view endpoint);
/// Returns "host:port", with brackets around an IPv6 address.
std::string endpoint_text(const HostPort& place);

/// Whether an address or a name is one of this host's: of the loopback, the host's name, or an address of one
/// of its interfaces. May ask the resolver.
bool names_this_host(const std::string& host);

/// Returns the numeric address of this host's interface by which it reaches `host`. Throws: RendezvousError
/// where `host` has no address or no way leads there.
std::string address_towards(const std::string& host);

}  // namespace cohort::launch
