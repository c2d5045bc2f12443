#include <algorithm>
#include <set>

#include "cohort/base/error.h"
#include "simulated_agent.h"
#include "simulated_run.h"

namespace cohort::test {

using base::concat;
using membership::MemberInfo;
using membership::RunState;
using std::chrono::seconds;

namespace {

constexpr seconds kFaultTime(10);

}  // namespace

void SimulatedRun::make_faults() {
  world_.set_slow(world_.chance(30) ? 5 : 0);
  store_.set_delay(world_.chance(30) ? 300 : 4);
  for (std::uint64_t i = 1 + world_.pick(14); i > 0; --i) {
    world_.at(world_.now() + world_.between(300, 10'000), [this] { make_fault(); });
  }
}

void SimulatedRun::make_fault() {
  const SimTime end = SimTime() + std::chrono::hours(10) + kFaultTime;
  const int hosts = num_hosts();
  const auto until = [&](milliseconds time) { return std::min(world_.now() + time, end); };
  const auto any_host = [&] { return static_cast<int>(world_.pick(static_cast<std::uint64_t>(hosts))); };
  const int host = any_host();
  std::shared_ptr<Agent> agent;
  for (const auto& candidate : agents_) {
    if (candidate->is_alive && candidate->host == host) agent = candidate;
  }
  const bool is_kept = options_.is_embedded && host == 0 && !world_.chance(3);
  const std::uint64_t kind = world_.pick(14);
  world_.trace(
      [&] { return concat("fault ", kind, " at host ", host, agent ? " with agent" : " without agent"); });
  switch (kind) {
    case 0:
    case 1:
      if (agent && !is_kept) kill_agent(agent, world_.chance(50));
      break;
    case 2:
    case 3: {
      // In some runs ranks fail again and again, those of one agent, or of all agents at the same time.
      const bool is_hopeless = options_.seed % 8 == 5;
      if (agent) kill_process(agent, world_.pick(agent->processes.size()), 0, is_hopeless);
      for (std::size_t i = 0; is_hopeless && kind == 2 && i < agents_.size(); ++i) {
        const std::shared_ptr<Agent> other = agents_[i];
        if (other->is_alive && other != agent) kill_process(other, 0, 0, true);
      }
      break;
    }
    case 4:
      if (agent)
        world_.stop_host(host, std::min(world_.between(50, 3'000),
                                        std::chrono::duration_cast<milliseconds>(end - world_.now())));
      break;
    case 5:
    case 6: {
      const bool is_one_way = world_.chance(40);
      const SimTime time = until(world_.between(50, 5'000));
      std::vector<bool> sides;
      for (int i = 0; i < hosts; ++i) sides.push_back(world_.chance(50));
      for (int i = 0; i < hosts; ++i) {
        for (int k = 0; k < hosts; ++k) {
          if (sides[static_cast<std::size_t>(i)] != sides[static_cast<std::size_t>(k)] &&
              (!is_one_way || sides[static_cast<std::size_t>(i)])) {
            world_.cut(i, k, time);
          }
        }
      }
      break;
    }
    case 7: {
      const int other = any_host();
      const SimTime time = until(world_.between(50, 5'000));
      world_.cut(host, other, time);
      if (world_.chance(70)) world_.cut(other, host, time);
      break;
    }
    case 8:
      if (agent && !is_kept) {
        agent->report.is_leaving = true;
        report(agent);
        world_.at(world_.now() + seconds(5), [this, agent] {
          if (!is_healed_) kill_agent(agent, false);
        });
        // Its host may be gone before it has left.
        if (world_.chance(30)) {
          world_.at(world_.now() + world_.between(1, 1'500), [this, agent] {
            if (!is_healed_) kill_agent(agent, true);
          });
        }
      }
      break;
    case 9:
    case 10:
      if (!agent && (host != 0 || !options_.is_embedded)) start_agent(host);
      break;
    case 11:
      if (world_.chance(50)) {
        store_.set_away(until(world_.between(50, 4'000)));
      } else {
        store_.set_away(host, until(world_.between(50, 4'000)));
      }
      break;
    case 13:
      if (agent) {
        // Its agent kills one that never runs again.
        const milliseconds time = world_.between(50, 9'000);
        stop_process(agent, world_.pick(agent->processes.size()),
                     world_.chance(30)
                         ? milliseconds(seconds(100))
                         : std::min(time, std::chrono::duration_cast<milliseconds>(end - world_.now())));
      }
      break;
    case 12:  // a node that comes and goes
      if (is_kept || host == 0) break;
      for (int i = 0; i < 3; ++i) {
        world_.at(world_.now() + i * milliseconds(700), [this, host] {
          if (agent_on(host) == nullptr && !is_healed_) start_agent(host);
        });
        world_.at(world_.now() + i * milliseconds(700) + world_.between(50, 690), [this, host] {
          for (const auto& candidate : agents_) {
            if (candidate->host == host && !is_healed_) kill_agent(candidate, false);
          }
        });
      }
      break;
  }
}

// From now on all that lives can work, and there are agents enough.
void SimulatedRun::heal() {
  is_healed_ = true;
  world_.set_slow(0);
  store_.set_delay(4);
  for (const auto& agent : agents_) {
    if (agent->is_alive && agent->report.is_leaving) kill_agent(agent, false);
  }
  end_stopped_process();
  for (int host = 0; host < num_hosts(); ++host) {
    const bool is_needed = num_agents() < static_cast<std::size_t>(settings_.min_nodes);
    if (agent_on(host) == nullptr && (is_needed || world_.chance(30)) && !is_endpoint_lost_)
      start_agent(host);
  }
}

// Processes that are all stopped hold nobody up: it is for their user to end one.
void SimulatedRun::end_stopped_process() {
  std::set<std::uint64_t> seen;
  for (const auto& agent : agents_) {
    const auto& record = agent->protocol->record();
    if (!agent->is_alive || !record) continue;
    const membership::Generation& generation = record->generation;
    const auto is_stopped_in_it = [&](const std::unique_ptr<Process>& process) {
      return process->is_alive && process->steps.generation() == generation.number &&
             process->stopped_until > world_.now() + seconds(20);
    };
    const auto are_stopped = [&](const MemberInfo& member) {
      const Agent* const other = agent_of(member.incarnation);
      return other != nullptr && other->is_alive &&
             std::all_of(other->processes.begin(), other->processes.end(), is_stopped_in_it);
    };
    const auto is_own = [&](const MemberInfo& member) { return member.incarnation == agent->incarnation; };
    const auto& members = generation.members;
    if (std::any_of(members.begin(), members.end(), is_own) && seen.insert(generation.number).second &&
        std::all_of(members.begin(), members.end(), are_stopped)) {
      kill_process(agent, 0, generation.number);
    }
  }
}

bool SimulatedRun::is_over() const {
  return is_endpoint_lost_ || (store_.record() && store_.record()->has_ended());
}

std::string SimulatedRun::run() {
  const SimTime begin = world_.now();
  const auto is_over_now = [this] { return is_over(); };
  world_.run_until(begin + kFaultTime, is_over_now);
  if (options_.has_faults && !is_over()) heal();
  const std::uint64_t before = newest_steps_;
  // Agents that were dropped may have to wait 16 s, and processes 2 s for the loss of links.
  const seconds most = std::chrono::duration_cast<seconds>(settings_.join_timeout) + seconds(15);
  world_.run_until(begin + kFaultTime + most, [&] { return is_over() || newest_steps_ > before; });
  if (world_.error().empty() && !is_over() && newest_steps_ == before) {
    world_.fail(concat("no step was committed in the ", most.count(), " s after the last fault; ", before,
                       " of ", total_steps_, " are, and generation ",
                       store_.record() ? store_.record()->generation.number : 0, " is the newest"));
  }
  const seconds end = kFaultTime + most + seconds(90);
  world_.run_until(begin + end, is_over_now);
  if (world_.error().empty() && !is_over()) {
    world_.fail(concat("the run has not ended after ", end.count(), " s: ", newest_steps_, " of ",
                       total_steps_, " steps"));
  }
  if (world_.error().empty()) check_end();
  return world_.error();
}

void SimulatedRun::Counts::add(const Counts& other) {
  generations += other.generations;
  steps += other.steps;
  copies += other.copies;
  redone += other.redone;
  planned += other.planned;
  restarts += other.restarts;
  failed_runs += other.failed_runs;
  failed_with_state += other.failed_with_state;
  unexplained += other.unexplained;
  gave_up += other.gave_up;
  side_by_side += other.side_by_side;
  handovers += other.handovers;
  lost_states += other.lost_states;
  two_deciders += other.two_deciders;
  dropped_alive += other.dropped_alive;
  lost_links += other.lost_links;
  stopped += other.stopped;
  hung += other.hung;
}

std::string SimulatedRun::Counts::text() const {
  return concat(generations, " generations, ", planned, " of them planned; ", steps, " commits, ", redone,
                " of steps made again; ", copies, " copies of the state; ", restarts, " restarts; ",
                dropped_alive, " agents dropped that lived; ", lost_links, " lost links; ", stopped,
                " processes stopped, ", hung, " of them killed by their agent; ", two_deciders,
                " times two agents decided; ", gave_up, " agents gave up; ", failed_runs, " runs failed, ",
                failed_with_state, " while an agent had the state, ", unexplained,
                " of them for no known reason; ", side_by_side, " steps made while a process was two ahead; ",
                handovers, " generations with a member that leaves; ", lost_states,
                " waits for a lost state");
}

void SimulatedRun::watch_deciders() {
  world_.at(world_.now() + milliseconds(250), [this] {
    const auto decides = [](const auto& agent) { return agent->is_alive && agent->protocol->is_deciding(); };
    if (std::count_if(agents_.begin(), agents_.end(), decides) > 1) ++counts.two_deciders;
    if (!is_over()) watch_deciders();
  });
}

bool SimulatedRun::have_all_entered(std::uint64_t generation) const {
  return std::all_of(agents_.begin(), agents_.end(), [&](const auto& agent) {
    return !agent->is_alive || agent->report.entered >= generation;
  });
}

std::string SimulatedRun::run_to_generation() {
  world_.run_until(world_.now() + seconds(5), [this] {
    return num_agents() == static_cast<std::size_t>(num_hosts()) && have_all_entered(1);
  });
  if (!have_all_entered(1)) world_.fail("not all agents have entered the first generation after 5 s");
  return world_.error();
}

std::string SimulatedRun::replace_a_member() {
  kill_agent(agents_.back(), false);
  const std::uint64_t number = store_.record()->generation.number;
  world_.run_until(world_.now() + seconds(1),
                   [this] { return store_.record()->state == RunState::kForming; });
  start_agent(agents_.back()->host);
  world_.run_until(world_.now() + seconds(5), [&] { return have_all_entered(number + 1); });
  if (!have_all_entered(number + 1)) world_.fail("not all agents have entered the next generation after 5 s");
  return world_.error();
}

std::uint64_t SimulatedRun::leaf(std::uint64_t step, int virtual_rank, int element) const {
  return mix(mix(step + 1, static_cast<std::uint64_t>(virtual_rank) + 77),
             static_cast<std::uint64_t>(element));
}

std::string SimulatedRun::expected_sums(std::uint64_t step) const {
  std::vector<std::uint64_t> sums(kElements);
  for (int element = 0; element < kElements; ++element) {
    for (int rank = 0; rank < settings_.virtual_ranks; ++rank) {
      sums[static_cast<std::size_t>(element)] += leaf(step, rank, element);
    }
  }
  return bytes_of(sums);
}

std::uint64_t SimulatedRun::expected_state(std::uint64_t steps) {
  while (states_.size() <= steps) {
    const std::uint64_t step = states_.size() - 1;
    std::uint64_t next = mix(states_.back(), step);
    for (const std::uint64_t element : numbers_of(expected_sums(step))) next = mix(next, element);
    states_.push_back(next);
  }
  return states_[steps];
}

// Whether a process that lives has committed so many steps. What nobody has any more is made again, if its
// loss is not noticed: a member reports what it has committed a tenth of a second later.
bool SimulatedRun::has_state(std::uint64_t steps, bool is_any_asked) const {
  return std::any_of(agents_.begin(), agents_.end(), [&](const auto& agent) {
    const membership::Report& report = agent->report;
    const bool is_asked =
        is_any_asked ||
        !(report.ends_run || (report.is_leaving && store_.record()->find(agent->incarnation) == nullptr));
    if (!agent->is_alive || !is_asked) return false;
    return std::any_of(agent->processes.begin(), agent->processes.end(), [&](const auto& process) {
      return process->is_alive && process->steps.committed_steps() >= steps;
    });
  });
}

// A step has one content, whoever commits it, and a generation makes no step that a later one has left. A
// member that nobody reaches any more may be two steps ahead, as docs/design/elastic.md says; hardly ever.
void SimulatedRun::check_commit(std::uint64_t generation, std::uint64_t step, std::uint64_t state) {
  if (state != expected_state(step + 1)) {
    return world_.fail(
        concat("the state after step ", step, ", of generation ", generation, ", is another one"));
  }
  world_.trace([&] { return concat("generation ", generation, " commits step ", step); });
  ++counts.steps;
  const auto [entry, is_new] = steps_of_.emplace(generation, std::pair(step, step));
  if (is_new && step < newest_steps_) ++counts.redone;
  newest_steps_ = std::max(newest_steps_, step + 1);
  auto& [first, last] = entry->second;
  first = std::min(first, step);
  last = std::max(last, step);
  for (const auto& [number, steps] : steps_of_) {
    const bool is_side_by_side =
        (number < generation && steps.second > step) || (number > generation && step > steps.first);
    if (is_side_by_side && has_state(step + 2)) ++counts.side_by_side;
    if (is_side_by_side && has_state(step + 3)) {
      world_.fail(
          concat("generations ", number, " and ", generation, " make steps side by side: step ", step));
    }
  }
}

void SimulatedRun::write_ledger(std::uint64_t step, const std::string& sums) {
  if (sums != expected_sums(step)) world_.fail(concat("the ledger gets other samples for step ", step));
  const auto [entry, is_new] = ledger_.emplace(step, sums);
  if (!is_new && entry->second != sums) world_.fail(concat("the ledger has step ", step, " twice"));
}

// Agents that leave or give up do not continue it, and one that gives up, or leaves and was dropped, gives
// its state to nobody. Nor does one continue of which the record does not know, as all that it knows leave,
// or one gives up and too few are left; nor does any where who had the state is silent for join_timeout, as
// it may be making steps on the other side of a cut network. Where all members of the newest generation are
// dead, and nobody is left that has heard of its steps, whoever was dropped before may lack them. The agent
// at the endpoint ends it with its only record.
bool SimulatedRun::may_fail_with_state(const membership::RendezvousRecord& record) const {
  const auto stays = [](const std::shared_ptr<Agent>& agent) {
    return agent->is_alive && !agent->report.is_leaving && !agent->report.ends_run;
  };
  if (!has_state(newest_steps_, false)) return true;
  if (std::count_if(agents_.begin(), agents_.end(), stays) < settings_.min_nodes) return true;
  const auto num_known = std::count_if(agents_.begin(), agents_.end(), [&](const auto& agent) {
    return stays(agent) && record.find(agent->incarnation) != nullptr;
  });
  const auto has = [&](const char* piece) { return record.end_cause.find(piece) != std::string::npos; };
  const bool is_holder_silent =
      ((has("is silent") && has("no agent is left that had")) ||
       (!record.holders.empty() && has("none that had the state"))) &&
      std::all_of(agents_.begin(), agents_.end(), [&](const auto& agent) {
        const MemberInfo* const member = record.find(agent->incarnation);
        return !agent->is_alive || member == nullptr ||
               std::count(record.holders.begin(), record.holders.end(), member->id) == 0;
      });
  const auto informed = informed_.find(record.generation.number);
  const auto is_alive_agent = [&](const std::string& incarnation) { return agent_of(incarnation)->is_alive; };
  const bool are_steps_unknown =
      has("no agent is left that had") && record.awaited.empty() &&
      std::ranges::none_of(record.generation.members, is_alive_agent, &MemberInfo::incarnation) &&
      (informed == informed_.end() || std::ranges::none_of(informed->second, is_alive_agent));
  const bool does_give_up =
      has("failed again and again") && (num_known < settings_.min_nodes || options_.is_embedded);
  return num_known == 0 || is_holder_silent || are_steps_unknown || does_give_up || has("leaves, and it has");
}

void SimulatedRun::check_end() {
  if (is_endpoint_lost_) return;
  const membership::RendezvousRecord& record = *store_.record();
  counts.generations = record.generation.number;
  counts.lost_states = store_.num_lost_states();
  for (const auto& [number, generation] : generations_) {
    counts.planned += generation.is_planned ? 1U : 0U;
    const auto is_named = [&cause = generation.cause](const MemberInfo& member) {
      return cause.find(concat("agent ", member.id, " at ", member.address, " leaves")) != std::string::npos;
    };
    const auto& members = generation.members;
    counts.handovers += std::any_of(members.begin(), members.end(), is_named) ? 1U : 0U;
  }
  if (record.state == RunState::kFailed) {
    ++counts.failed_runs;
    if (newest_steps_ > 0 && has_state(newest_steps_)) {
      ++counts.failed_with_state;
      if (!may_fail_with_state(record)) ++counts.unexplained;
    }
    for (const char* const cause :
         {"no agent is left", "none that had the state", "no process has the state", "had finished",
          "leaves, and it has", "all members leave", "no member can continue", "failed again and again"}) {
      if (record.end_cause.find(cause) != std::string::npos) return;
    }
    // Nobody starts another agent for one that has given up.
    if (counts.gave_up > 0 && record.end_cause.starts_with("only ")) return;
    return world_.fail("the run failed: " + record.end_cause);
  }
  for (std::uint64_t step = 0; step < total_steps_; ++step) {
    if (ledger_.count(step) == 0) return world_.fail(concat("the ledger lacks step ", step));
  }
}

}  // namespace cohort::test
