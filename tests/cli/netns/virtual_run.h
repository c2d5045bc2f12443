#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tests/cli/job.h"
#include "tests/cli/netns/virtual_hosts.h"
#include "tests/support/environment.h"

namespace cohort::test {

/// A run of `cohort run --elastic` over virtual hosts, an agent and a rank on each. Ranks train an MLP
/// (tests/elastic/mlp_program.cpp), and each committed step is compared with that of one process which
/// nothing disturbs.
///
///     VirtualRun run({});
///     for (int host = 0; host < 3; ++host) run.start(host);
///     ASSERT_TRUE(run.come_to_train({0, 1, 2})) << run.story();
///     run.hosts().isolate(2);
///     ASSERT_TRUE(run.come_to_train({0, 1})) << run.story();
///     EXPECT_EQ(run.finish({0, 1}), "") << run.story();
class VirtualRun {
 public:
  struct Options {
    int num_hosts = 3, min_nodes = 1;
    int num_steps = 300;
    std::uint64_t seed = 1;
    std::string endpoint = VirtualHosts::address(0) + ":29400";
    std::string rdzv_conf = "join_timeout=60";
    int silence_ms = 300;
    std::vector<std::string> flags = {};  ///< of each agent, further ones
    bool has_agent_points = false;        ///< act_at() is for points of agents too
  };
  using Hosts = std::set<int>;

  /// Throws: std::runtime_error where this process may not make hosts.
  explicit VirtualRun(const Options& options);
  ~VirtualRun();

  VirtualHosts& hosts() { return hosts_; }
  const TempDir& folder() const { return folder_; }

  /// Starts the agent of a host, which has none, or whose last one has ended.
  void start(int host);
  Job& agent(int host) { return *agents_.at(host); }
  /// The host is gone: nothing passes to or from it, and then its agent and rank are killed. heal() and
  /// start() bring it back.
  void fail_host(int host);

  /// A generation whose ranks have all begun.
  struct Generation {
    std::uint64_t number = 0;
    std::map<int, pid_t> ranks = {};  ///< by host
    int first_host = 0;               ///< of process 0, and so of the agent that decides where all may
  };
  Generation newest() const;
  /// When the rank of this host entered it, in seconds since 1970, as it saw them.
  std::int64_t time_of_entry(int host) const;
  /// Committed steps so far.
  std::uint64_t steps() const;
  /// The step that the rank of this host has begun last, so the number of those that it has committed.
  std::uint64_t step_begun_by(int host) const;
  /// Whether a rank of each of these hosts trains, and no others: a step is committed in a generation of
  /// them. Within a minute.
  bool come_to_train(const Hosts& hosts) const;
  /// What becomes of these hosts within a minute: they train as come_to_train() says, or their agents end.
  enum class Outcome { kTrains, kEnds, kNeither };
  Outcome outcome_of(const Hosts& hosts);
  /// Whether so many more steps are committed, within a minute.
  bool make_steps(std::uint64_t more) const;
  /// The rank of the host, or its agent, does it at this point (base/internal/fault_points.h): "kill rank",
  /// "kill agent", "stop rank" or "stop agent".
  void act_at(int host, const std::string& point, const std::string& action);
  bool has_acted(int host, const std::string& point) const;
  /// Nobody does anything at a point any more.
  void forget_points();

  /// All agents have ended, or will have nothing to do with those that start from here on: theirs is another
  /// run, whose generations and steps count from the first one. Returns what was wrong with the bits so far.
  std::string begin_anew();

  /// Lets the run end, and waits for the agents of these hosts. Returns what does not hold; empty: they end
  /// with status 0, each step was committed, and all bits are those of one process alone.
  std::string finish(const Hosts& hosts);
  /// What is wrong with the steps that were committed so far.
  std::string wrong_bits() const;
  /// What all agents and ranks wrote.
  std::string story() const;

 private:
  std::vector<std::string> command(int host) const;
  bool does_train(const Hosts& hosts, std::uint64_t& number, std::uint64_t& steps_before) const;

  const Options options_;
  const ScopedEnv threads_{"OMP_NUM_THREADS", "1"};
  const TempDir folder_;
  VirtualHosts hosts_;
  std::map<int, std::unique_ptr<Job>> agents_;
  std::vector<std::pair<int, std::unique_ptr<Job>>> ended_;
  mutable std::map<std::uint64_t, std::string> expected_;  // hash by number of steps
};

}  // namespace cohort::test
