// What must hold at each commit and at the end of a run, and how long it may take.
#include <algorithm>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"
#include "simulated_agent.h"
#include "simulated_run.h"

namespace cohort::test {

using base::concat;
using membership::MemberInfo;
using membership::RunState;
using std::chrono::seconds;

namespace {

using Counts = SimulatedRun::Counts;

constexpr std::pair<std::uint64_t Counts::*, const char*> kCounts[] = {
    {&Counts::generations, "generations"},
    {&Counts::planned, "of them planned"},
    {&Counts::steps, "commits"},
    {&Counts::redone, "of steps made again"},
    {&Counts::late_commits, "after the end of their generation"},
    {&Counts::copies, "copies of the state"},
    {&Counts::restarts, "restarts"},
    {&Counts::dropped_alive, "agents dropped that lived"},
    {&Counts::lost_links, "lost links"},
    {&Counts::stopped, "processes stopped"},
    {&Counts::hung, "of them killed by their agent"},
    {&Counts::two_deciders, "times two agents decided"},
    {&Counts::gave_up, "agents gave up"},
    {&Counts::unheard, "agents that did not hear the endpoint"},
    {&Counts::lost_endpoints, "lost endpoints"},
    {&Counts::cut_off, "hosts cut off for ever"},
    {&Counts::quick_runs, "runs of one fault"},
    {&Counts::next_runs, "agents that began another run"},
    {&Counts::failed_runs, "runs failed"},
    {&Counts::failed_with_state, "while an agent had the state"},
    {&Counts::unexplained, "of them for no known reason"},
    {&Counts::side_by_side, "steps made while a process was two ahead"},
    {&Counts::handovers, "generations with a member that leaves"},
    {&Counts::lost_states, "waits for a lost state"},
};

}  // namespace

void SimulatedRun::Counts::add(const Counts& other) {
  for (const auto& [count, name] : kCounts) this->*count += other.*count;
}

std::string SimulatedRun::Counts::text() const {
  base::TextList list("; ");
  for (const auto& [count, name] : kCounts) list.add(this->*count, ' ', name);
  return list.text();
}

bool SimulatedRun::is_over() const {
  return is_endpoint_lost_ || (store_.record() && store_.record()->has_ended());
}

std::string SimulatedRun::run() {
  const auto is_over_now = [this] { return is_over(); };
  world_.run_until(begin_ + kFaultTime, is_over_now);
  if (options_.has_faults && !is_over()) heal();
  const std::uint64_t before = newest_steps_;
  const milliseconds most = is_over() ? milliseconds(0) : most_time_to_step();
  world_.run_until(begin_ + kFaultTime + most, [&] { return is_over() || newest_steps_ > before; });
  if (world_.error().empty() && !is_over() && newest_steps_ == before) {
    world_.fail(concat("no step was committed in the ", most.count(), " ms after the last fault; ", before,
                       " of ", total_steps_, " are, and generation ",
                       store_.record() ? store_.record()->generation.number : 0, " is the newest"));
  }
  const seconds end = kFaultTime + std::chrono::duration_cast<seconds>(settings_.join_timeout) + seconds(105);
  world_.run_until(begin_ + end, is_over_now);
  if (world_.error().empty() && !is_over()) {
    world_.fail(concat("the run has not ended after ", end.count(), " s: ", newest_steps_, " of ",
                       total_steps_, " steps"));
  }
  if (world_.error().empty()) check_end();
  if (world_.error().empty()) hear_of_end();
  return world_.error();
}

// Whether agents enough live that can reach each other, and one of those that have the state.
bool SimulatedRun::can_continue() const {
  const auto stays = [&](const std::shared_ptr<Agent>& agent) {
    return is_reachable(agent) && !agent->report.is_leaving && !agent->report.ends_run;
  };
  const auto& record = store_.record();
  if (!record || std::ranges::count_if(agents_, stays) < settings_.min_nodes) return false;
  return std::ranges::any_of(agents_, [&](const auto& agent) {
    const MemberInfo* const member = record->find(agent->incarnation);
    if (!stays(agent) || member == nullptr || std::ranges::count(record->holders, member->id) == 0)
      return false;
    return std::ranges::any_of(agent->processes, [&](const auto& process) {
      return process->is_alive && process->stopped_until <= world_.now() &&
             process->steps.committed_steps() >= newest_steps_;
    });
  });
}

// After the last fault. Without a holder that is reached the run waits for join_timeout. Agents that were
// dropped may have to wait for 32 times the silence.
milliseconds SimulatedRun::most_time_to_step() {
  const milliseconds longest =
      settings_.join_timeout + std::max<milliseconds>(seconds(15), 20 * settings_.silence);
  if (!can_continue()) return longest;
  const bool is_quick = num_faults_ == 1 && cut_host_ < 0 && !is_any_hung_;
  if (is_quick) ++counts.quick_runs;
  return std::min(longest,
                  is_quick ? 4 * settings_.silence + seconds(3) : 36 * settings_.silence + seconds(5));
}

// Each agent that lives hears that the run has ended, or finds out that nobody can tell it: the agent at the
// endpoint is gone, or its own host is cut off from the store. The last of these is so only for an agent that
// needs another generation. One that waits for a place waits on.
void SimulatedRun::hear_of_end() {
  const auto is_out = [](const auto& agent) { return !agent->is_alive || agent->has_stopped; };
  const auto is_cut_off = [&](const auto& agent) { return store_.is_cut_off(agent->host); };
  const auto needs_nobody = [&](const std::shared_ptr<Agent>& agent) {
    const auto& record = agent->protocol->record();
    if (!record) return false;
    const MemberInfo* const member = record->find(agent->incarnation);
    return record->state != RunState::kRunning || member == nullptr ||
           record->generation.find(member->id) == nullptr || record->generation.members.size() == 1;
  };
  const auto run_on = [&](milliseconds time, const auto& is_done) {
    const auto are_all_done = [&] { return std::ranges::all_of(agents_, is_done); };
    world_.run_until(std::max(world_.now(), begin_ + kFaultTime) + time, are_all_done);
    if (!world_.error().empty() || are_all_done()) return;
    const auto& agent = *std::ranges::find_if_not(agents_, is_done);
    world_.fail(concat("agent ", agent->incarnation, " at host ", agent->host, " has not heard of the end ",
                       time.count(), " ms after it"));
  };
  const milliseconds slack = seconds(5) + 8 * settings_.silence;
  if (is_endpoint_lost_) {
    run_on(20 * settings_.silence + slack,
           [&](const auto& agent) { return is_out(agent) || !agent->protocol->record(); });
  }
  run_on(settings_.join_timeout + slack,
         [&](const auto& agent) { return is_out(agent) || is_cut_off(agent); });
  run_on(2 * settings_.join_timeout + slack,
         [&](const auto& agent) { return is_out(agent) || needs_nobody(agent); });
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
    if (!agent->is_alive || !is_asked || (!is_any_asked && !is_reachable(agent))) return false;
    return std::any_of(agent->processes.begin(), agent->processes.end(), [&](const auto& process) {
      return process->is_alive && process->steps.committed_steps() >= steps;
    });
  });
}

// A generation that begins without the newest steps lacks those of the time that a report takes, a fifth of
// the silence and its way, and two more where it is reached by nobody who has them
// (docs/design/elastic.md). A step takes 80 ms at least.
std::uint64_t SimulatedRun::most_steps_again() const {
  return 3 + static_cast<std::uint64_t>(settings_.silence / 5 / milliseconds(80));
}

// Members hear of the next generation from their agents, and finish the step that is under way at most. One
// that was stopped may finish it first, and then the next one where the change is planned.
void SimulatedRun::check_late_commit(const Process& process, std::uint64_t generation) {
  const auto has_left = [&](const MemberInfo& member) {
    const Agent* const agent = agent_of(member.incarnation);
    const auto& record = agent->protocol->record();
    return !agent->is_alive || (record && record->generation.number > generation);
  };
  if (!std::ranges::all_of(generations_.at(generation).members, has_left)) return;
  ++counts.late_commits;
  const auto next = generations_.find(generation + 1);
  const int most = next != generations_.end() && next->second.is_planned ? 2 : 1;
  if (++late_[{&process, generation}] <= most) return;
  world_.fail(concat("a process of generation ", generation, " makes steps that all its agents have left"));
}

// A step has one content, whoever commits it, and a generation makes no step that a later one has left. A
// member that nobody reaches any more may be two steps ahead, as docs/design/elastic.md says; hardly ever.
void SimulatedRun::check_commit(const Process& process, std::uint64_t generation, std::uint64_t step,
                                std::uint64_t state) {
  if (state != expected_state(step + 1)) {
    return world_.fail(
        concat("the state after step ", step, ", of generation ", generation, ", is another one"));
  }
  world_.trace([&] { return concat("generation ", generation, " commits step ", step); });
  ++counts.steps;
  const auto [entry, is_new] = steps_of_.emplace(generation, std::pair(step, step));
  if (is_new && step < newest_steps_) ++counts.redone;
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
  // A planted fault must be found by what is above.
  const bool is_newest = steps_of_.rbegin()->first == generation && options_.planted != Planted::kNoHolders;
  if (is_newest && step + most_steps_again() < newest_steps_) {
    world_.fail(concat("committed steps are made again: ", step, ", after ", newest_steps_));
  }
  newest_steps_ = std::max(newest_steps_, step + 1);
  check_late_commit(process, generation);
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
  const auto stays = [&](const std::shared_ptr<Agent>& agent) {
    return is_reachable(agent) && !agent->report.is_leaving && !agent->report.ends_run;
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
        return !is_reachable(agent) || member == nullptr ||
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
  if (has("restarts used of")) return true;
  return num_known == 0 || is_holder_silent || are_steps_unknown || does_give_up || has("leaves, and it has");
}

void SimulatedRun::check_end() {
  if (is_endpoint_lost_) return void(++counts.lost_endpoints);
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
          "leaves, and it has", "restarts used", "all members leave", "no member can continue",
          "failed again and again"}) {
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
