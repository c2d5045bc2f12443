#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cohort/membership/internal/member_protocol.h"
#include "cohort/membership/internal/step_protocol.h"
#include "simulated_store.h"
#include "simulated_world.h"

namespace cohort::test {

struct SimulationOptions {
  std::uint64_t seed = 1;
  bool is_embedded = true;
  bool has_faults = true;
  int num_hosts = 0;  ///< 0: the seed decides
  Planted planted = Planted::kNothing;
};

/// Agents, their processes and a store, through a whole run.
class SimulatedRun {
 public:
  explicit SimulatedRun(const SimulationOptions& options);
  ~SimulatedRun();
  /// Returns what does not hold, or "".
  std::string run();

  /// What happened, so that tests see that it did.
  struct Counts {
    std::uint64_t generations = 0, steps = 0, copies = 0, redone = 0, planned = 0, restarts = 0;
    std::uint64_t failed_runs = 0, failed_with_state = 0, two_deciders = 0, dropped_alive = 0, lost_links = 0;
    /// Runs that failed while an agent had the state, against may_fail_with_state().
    std::uint64_t unexplained = 0;
    /// Steps that a generation makes while a process of another one is two ahead.
    std::uint64_t side_by_side = 0;
    /// Commits in a generation of which all agents have heard that it is over.
    std::uint64_t late_commits = 0;
    std::uint64_t handovers = 0;          ///< generations in which a member that leaves gives its state away
    std::uint64_t lost_states = 0;        ///< times that a run waited for an agent that may have the state
    std::uint64_t stopped = 0, hung = 0;  ///< processes, and those of them that their agent has killed
    std::uint64_t gave_up = 0;            ///< agents whose ranks failed again and again
    std::uint64_t lost_endpoints = 0;     ///< runs that end with the agent that has their only record
    std::uint64_t cut_off = 0;            ///< runs that continue while one host is cut off for ever
    std::uint64_t unheard = 0;            ///< agents that gave up while the one at the endpoint lived
    std::uint64_t quick_runs = 0;         ///< of one fault, after which the next step must come soon
    std::uint64_t next_runs = 0;          ///< agents that begin another run, as this one has failed
    void add(const Counts& other);
    std::string text() const;
  };
  /// Runs until a generation has been entered by all hosts' agents; then with one killed and another one in
  /// its place.
  std::string run_to_generation();
  std::string replace_a_member();
  std::uint64_t num_agent_messages() const { return num_agent_messages_; }
  Counts counts;
  SimulatedWorld& world() { return world_; }
  const SimulatedStore& store() const { return store_; }
  std::size_t num_agents() const;  ///< that live
  int num_hosts() const;

 private:
  struct Agent;
  class Process;
  friend class Process;

  Agent* agent_of(const std::string& incarnation) const;
  Agent* agent_on(int host);
  /// It lives, and its host is not cut off for ever.
  bool is_reachable(const std::shared_ptr<Agent>& agent) const;
  void start_agent(int host);
  void apply(const std::shared_ptr<Agent>& agent, membership::MemberProtocol::Effects& effects);
  void send(const std::shared_ptr<Agent>& from, const std::string& address,
            const membership::AgentMessage& message);
  void tell_closed_port(const std::shared_ptr<Agent>& from, int host);
  void check_failure(const Agent& agent);
  void arm(const std::shared_ptr<Agent>& agent);
  void on_record(const std::shared_ptr<Agent>& agent);
  bool may_leave_forming_run(const Agent& agent) const;
  void report(const std::shared_ptr<Agent>& agent);
  void kill_agent(const std::shared_ptr<Agent>& agent, bool is_host_lost);
  void kill_process(const std::shared_ptr<Agent>& agent, std::size_t index, std::uint64_t told = 0,
                    bool is_hopeless = false);
  void end_stopped_process();
  void give_up_stopped(const std::shared_ptr<Agent>& agent, std::size_t index, std::uint64_t number);
  void give_up_stopped_of(const membership::Generation& generation);
  void stop_process(const std::shared_ptr<Agent>& agent, std::size_t index, milliseconds time);
  void deliver(const std::shared_ptr<Agent>& agent, std::size_t index,
               const membership::StepMessage& message);
  void on_process(const std::shared_ptr<Agent>& agent, Process& process, SimTime time,
                  std::function<void()> run);
  void tell_process(const std::shared_ptr<Agent>& agent, std::size_t index,
                    const membership::Generation& told, std::optional<int> number);
  void ask_process(const std::shared_ptr<Agent>& agent, std::size_t index, Process& process,
                   std::uint64_t generation, int unanswered);
  void make_faults();
  void make_fault();
  void cut_off_a_host();
  bool may_disturb() const { return options_.has_faults && !is_healed_; }
  void heal();
  void link_lost(const std::string& incarnation, std::size_t process, membership::MemberId other,
                 std::uint64_t generation);
  bool have_all_entered(std::uint64_t generation) const;
  void watch_deciders();
  void tell_links(const std::shared_ptr<Agent>& agent, std::optional<std::size_t> process, bool is_host_lost);

  void check_commit(const Process& process, std::uint64_t generation, std::uint64_t step,
                    std::uint64_t state);
  void check_late_commit(const Process& process, std::uint64_t generation);
  /// How far behind the newest step a generation may begin.
  std::uint64_t most_steps_again() const;
  bool has_state(std::uint64_t steps, bool is_any_asked = true) const;
  void write_ledger(std::uint64_t step, const std::string& sums);
  std::uint64_t expected_state(std::uint64_t steps);
  std::string expected_sums(std::uint64_t step) const;
  std::uint64_t leaf(std::uint64_t step, int virtual_rank, int element) const;
  bool can_continue() const;
  milliseconds most_time_to_step();
  void check_end();
  void hear_of_end();
  bool may_fail_with_state(const membership::RendezvousRecord& record) const;
  bool is_over() const;

  static constexpr std::chrono::seconds kFaultTime{10};

  const SimulationOptions options_;
  SimulatedWorld world_;
  const SimTime begin_ = world_.now();
  membership::RunSettings settings_;
  SimulatedStore store_;
  std::vector<std::shared_ptr<Agent>> agents_;  // all that ever were
  std::vector<std::uint64_t> states_;           // expected, by number of steps
  std::map<std::uint64_t, std::string> ledger_;
  std::map<std::uint64_t, std::pair<std::uint64_t, std::uint64_t>>
      steps_of_;  // first and last, by generation
  std::map<std::uint64_t, membership::Generation> generations_;
  // Who has heard of a generation's steps by a report of a member, by generation.
  std::map<std::uint64_t, std::set<std::string>> informed_;
  std::uint64_t total_steps_ = 0, newest_steps_ = 0;
  std::vector<std::unique_ptr<Process>> graveyard_;  // that died, and of which events are left
  int num_incarnations_ = 0;
  std::uint64_t num_agent_messages_ = 0;
  bool is_endpoint_lost_ = false, is_healed_ = false;
  std::uint64_t num_faults_ = 0;
  bool is_any_hung_ = false;  // a process, until its agent ends it
  int cut_host_ = -1;         // for ever
  std::uint64_t lost_percent_ = 0;
  std::map<int, SimTime> rejects_until_;  // hosts that say that nobody listens there
  // Steps of a process in a generation of which all agents had heard that it is over.
  std::map<std::pair<const Process*, std::uint64_t>, int> late_;
};

}  // namespace cohort::test
