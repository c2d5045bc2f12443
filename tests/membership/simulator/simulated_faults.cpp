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

void SimulatedRun::make_faults() {
  world_.set_slow(world_.chance(30) ? 5 : 0);
  store_.set_delay(world_.chance(30) ? 300 : 4);
  lost_percent_ = world_.chance(70) ? 0 : (world_.chance(70) ? 1 : 5);
  num_faults_ = 1 + world_.pick(14);
  if (world_.chance(10)) cut_off_a_host();
  for (std::uint64_t i = num_faults_; i > 0; --i) {
    world_.at(world_.now() + world_.between(300, 10'000), [this] { make_fault(); });
  }
}

// For ever, in some runs in one direction only. The others are enough for the run. Its agent does not reach a
// common store either, and nobody hears it then: two agents that reach a store, and not each other, change
// the record for ever; and one that is heard, and does not reach the store, is waited for.
void SimulatedRun::cut_off_a_host() {
  const int first = options_.is_embedded ? 1 : 0, hosts = num_hosts();
  if (hosts <= settings_.min_nodes || hosts <= first) return;
  const int host = first + static_cast<int>(world_.pick(static_cast<std::uint64_t>(hosts - first)));
  const bool is_one_way = options_.is_embedded && world_.chance(20), hears = world_.chance(50);
  world_.at(world_.now() + world_.between(300, 10'000), [this, host, hosts, is_one_way, hears] {
    if (is_over()) return;
    world_.trace([&] { return concat("host ", host, " is cut off for ever"); });
    cut_host_ = host;
    ++counts.cut_off;
    const SimTime end = world_.now() + std::chrono::hours(10);
    for (int other = 0; other < hosts; ++other) {
      if (other == host) continue;
      if (!is_one_way || hears) world_.cut(host, other, end);
      if (!is_one_way || !hears) world_.cut(other, host, end);
    }
    if (!options_.is_embedded) store_.cut_off(host);
  });
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
  const std::uint64_t kind = world_.pick(16);
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
        const bool is_hung = world_.chance(30);
        is_any_hung_ = is_any_hung_ || is_hung;
        stop_process(agent, world_.pick(agent->processes.size()),
                     is_hung ? milliseconds(seconds(100))
                             : std::min(time, std::chrono::duration_cast<milliseconds>(end - world_.now())));
      }
      break;
    case 12:  // a node that comes and goes
      if (is_kept || (options_.is_embedded && host == 0)) break;
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
    case 14: {  // a port that says that nobody listens, for too short a time to be taken for an end
      SimTime& rejects = rejects_until_[host];
      const milliseconds most = std::min(milliseconds(5'000), 15 * settings_.silence);
      if (rejects <= world_.now()) rejects = until(std::min(world_.between(50, 5'000), most));
      break;
    }
    case 15:
      store_.set_full(until(world_.between(50, 4'000)));
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
    const auto num_reachable =
        std::ranges::count_if(agents_, [&](const auto& agent) { return is_reachable(agent); });
    const bool is_needed = num_reachable < settings_.min_nodes && host != cut_host_;
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

}  // namespace cohort::test
