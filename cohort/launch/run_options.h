#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cohort/launch/rendezvous_options.h"

/// What `cohort run` is asked for.
/// No LibTorch.
namespace cohort::launch {

/// Whether each rank gets cores of its own, or may run where the agent may.
enum class BindTo { kCores, kNone };

/// Whether "[rank 3] " stands before each line; kAuto: when the job has more than one rank.
enum class Prefix { kAuto, kOn, kOff };

/// Which of stdout (1) and stderr (2) are meant, for all local ranks or each: "3", "0:1,2:3".
class StreamChoice {
 public:
  /// Throws: UsageError naming `flag`.
  static StreamChoice parse(std::string_view text, const std::string& flag);

  /// Whether stdout of this local rank is meant.
  bool out(int local_rank) const { return (bits(local_rank) & 1) != 0; }
  /// Whether its stderr is meant.
  bool err(int local_rank) const { return (bits(local_rank) & 2) != 0; }
  /// Whether any stream of any rank is meant.
  bool any() const;
  /// The highest local rank that is named; -1 when none is.
  int highest_rank() const { return of_rank_.empty() ? -1 : of_rank_.rbegin()->first; }

 private:
  int bits(int local_rank) const;

  int all_ = 0;
  std::map<int, int> of_rank_;
};

/// RunOptions::max_restarts where failures are not counted.
inline constexpr int kUnlimitedRestarts = 1'000'000;

inline constexpr std::uint16_t kDefaultPort = 29500;  ///< where node 0 of several listens, as torchrun's

/// What `cohort run` does. check() (cohort/launch/read_options.h) says which options go together.
struct RunOptions {
  std::vector<std::string> command;  ///< program and its arguments
  int nnodes = 1;                    ///< the most, where RendezvousOptions::min_nodes is less
  int nproc_per_node = 1;
  int node_rank = 0;
  /// Address of the agent of node 0. Default: 127.0.0.1, with one node.
  std::optional<std::string> master_addr = std::nullopt;
  /// Nothing: the system chooses with one node, 29500 with several.
  std::optional<std::uint16_t> master_port = std::nullopt;
  RendezvousOptions rendezvous = {};
  /// One node, whatever else; master_addr and master_port must not be given.
  bool standalone = false;
  std::string run_id = {};  ///< empty: made up with one node, "none" with several, as torchrun's
  /// The same secret on all nodes, with which agents prove who they are; handed to the ranks. Empty: one is
  /// made up with one node.
  std::filesystem::path secret_file = {};
  /// Several hosts without a secret: who reaches the port of node 0 can end the job.
  bool no_secret = false;
  /// ROLE_NAME of the ranks.
  std::string role = "default";
  /// How often all ranks are started again after one has failed; how often ranks of an elastic run may fail.
  /// With kUnlimitedRestarts an elastic run ends only where ranks of one place fail more than three times in
  /// a row, without a step of the run between.
  int max_restarts = 0;
  std::chrono::milliseconds monitor_interval{100};  ///< between two looks at the other nodes
  /// For the rendezvous of all nodes' agents.
  std::chrono::milliseconds rendezvous_timeout = std::chrono::minutes(10);
  /// An agent that gives no sign for keep_alive_interval * keep_alive_max_attempt is gone.
  std::chrono::milliseconds keep_alive_interval = std::chrono::seconds(5);
  int keep_alive_max_attempt = 3;
  std::chrono::milliseconds shutdown_timeout = std::chrono::seconds(30);  ///< from a signal to SIGKILL
  std::vector<int> signals_to_handle = default_signals();
  /// Where the files of `redirects` and `tee`, and the errors of ranks, are kept.
  std::filesystem::path log_dir = {};
  /// Streams that go into files instead of here, and as well as here.
  StreamChoice redirects = {}, tee = {};
  std::vector<int> local_ranks_filter = {};  ///< empty: all are shown
  BindTo bind_to = BindTo::kCores;
  Prefix prefix = Prefix::kAuto;
  std::vector<std::pair<std::string, std::string>> environment = {};  ///< added to that of the ranks
  /// Take away the ends of all children of this process that are no ranks. For a program that has no other
  /// children and is process 1 of a container, as `cohort run` may be.
  bool reaps_orphans = false;

  /// SIGTERM, SIGINT, SIGHUP and SIGQUIT.
  static std::vector<int> default_signals();
  bool limits_restarts() const { return max_restarts < kUnlimitedRestarts; }
  /// Of an elastic program; 0 for any other one.
  int num_virtual_ranks() const {
    if (!rendezvous.is_elastic) return 0;
    return rendezvous.virtual_ranks > 0 ? rendezvous.virtual_ranks : nnodes * nproc_per_node;
  }
  /// Whether there is one node, whatever happens.
  bool is_alone() const { return nnodes + rendezvous.num_spares == 1; }
  /// Whether nobody beyond this host is to reach node 0: one node that names no address, or 127.0.0.1,
  /// localhost or ::1 for all. A proxy of etcd may listen there on each host: then there must be no secret.
  bool is_on_one_host() const;
};

}  // namespace cohort::launch
