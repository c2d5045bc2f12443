#include "simulated_run.h"

#include <algorithm>
#include <utility>

#include "cohort/base/error.h"
#include "simulated_agent.h"

namespace cohort::test {

using base::concat;
using membership::AgentMessage;
using membership::Generation;
using membership::MemberId;
using membership::MemberInfo;
using membership::MemberProtocol;
using membership::RendezvousRecord;
using membership::RunState;
using std::chrono::seconds;

namespace {

std::string address_of(int host) {
  return concat('h', host, ":29400");
}
int host_of(const std::string& address) {
  return std::stoi(address.substr(1));
}

int hosts_of(const SimulationOptions& options) {
  return options.num_hosts > 0 ? options.num_hosts : 2 + static_cast<int>(options.seed * 7 % 5);
}

}  // namespace

SimulatedRun::SimulatedRun(const SimulationOptions& options)
    : options_(options),
      world_(options.seed, hosts_of(options)),
      store_(world_, options.is_embedded, options.planted) {
  const int hosts = num_hosts();
  settings_.is_embedded = options.is_embedded;
  settings_.max_nodes =
      options.has_faults ? 1 + static_cast<int>(world_.pick(static_cast<std::uint64_t>(hosts))) : hosts;
  settings_.min_nodes =
      options.has_faults ? 1 + static_cast<int>(world_.pick(static_cast<std::uint64_t>(settings_.max_nodes)))
                         : hosts;
  settings_.num_spares = static_cast<int>(world_.pick(3));
  settings_.virtual_ranks = 1 + static_cast<int>(world_.pick(8));
  settings_.max_restarts = 100;
  if (options.has_faults && world_.chance(15)) settings_.max_restarts = world_.chance(50) ? 0 : 2;
  const std::uint64_t pace = options.has_faults ? world_.pick(10) : 5;
  settings_.silence = milliseconds(pace == 0 ? 100 : (pace == 1 ? 3'000 : 500));
  // Who was dropped may have to wait for 32 times the silence.
  settings_.join_timeout = seconds(world_.chance(50) ? 35 : 70) * (pace == 1 ? 6 : 1);
  world_.set_give_up(std::max(milliseconds(2'000), membership::kAloneFactor * settings_.silence));
  settings_.last_call_timeout = milliseconds(world_.chance(50) ? 0 : world_.pick(2'000));
  total_steps_ = 15 + world_.pick(30);
  states_.push_back(0);
  for (int host = 0; host < hosts; ++host) {
    const bool is_late = options.has_faults && world_.chance(30);
    world_.at(world_.now() + (is_late ? world_.between(1'000, 9'000) : world_.between(0, 300)), [this, host] {
      if (agent_on(host) == nullptr) start_agent(host);
    });
  }
  if (options.has_faults) make_faults();
  watch_deciders();
}

SimulatedRun::~SimulatedRun() = default;

int SimulatedRun::num_hosts() const {
  return hosts_of(options_);
}

SimulatedRun::Agent* SimulatedRun::agent_of(const std::string& incarnation) const {
  const std::size_t number = std::stoul(incarnation);
  return number < agents_.size() ? agents_[number].get() : nullptr;
}
bool SimulatedRun::is_reachable(const std::shared_ptr<Agent>& agent) const {
  return agent->is_alive && agent->host != cut_host_;
}
SimulatedRun::Agent* SimulatedRun::agent_on(int host) {
  for (const auto& agent : agents_) {
    if (agent->is_alive && agent->host == host) return agent.get();
  }
  return nullptr;
}
std::size_t SimulatedRun::num_agents() const {
  return static_cast<std::size_t>(
      std::count_if(agents_.begin(), agents_.end(), [](const auto& agent) { return agent->is_alive; }));
}

void SimulatedRun::start_agent(int host) {
  if (is_over()) return;
  const auto agent = std::make_shared<Agent>();
  agent->host = host;
  agent->incarnation = std::to_string(num_incarnations_++);
  agent->address = address_of(host);
  agent->report.store = concat("store of ", agent->incarnation);
  agent->report.num_processes = 1 + static_cast<int>(world_.chance(25));
  agent->report.is_ready = !options_.has_faults || !world_.chance(25);
  agent->endpoint_heard = world_.now();
  const std::string endpoint = options_.is_embedded ? address_of(0) : "";
  agent->protocol.emplace(
      membership::ProtocolOptions{agent->incarnation, agent->address, settings_, endpoint}, world_.now());
  agents_.push_back(agent);
  for (int i = 0; i < agent->report.num_processes; ++i) {
    agent->processes.push_back(
        std::make_unique<Process>(*this, agent, static_cast<std::size_t>(i), 0, 0, ""));
  }
  if (!options_.is_embedded) {
    store_.add_listener(host,
                        [this, weak = std::weak_ptr<Agent>(agent)](const SimulatedStore::Answer& answer) {
                          const std::shared_ptr<Agent> here = weak.lock();
                          if (!here->is_alive) return;
                          MemberProtocol::Effects effects;
                          here->protocol->on_store(answer, world_.now(), effects);
                          apply(here, effects);
                        });
  }
  MemberProtocol::Effects effects;
  agent->protocol->set_report(agent->report, world_.now(), effects);
  agent->protocol->tick(world_.now(), effects);
  apply(agent, effects);
  if (agent->report.is_ready) return;
  world_.on_host(host, world_.now() + world_.between(0, 3'000), [this, agent] {
    agent->report.is_ready = true;
    report(agent);
  });
}

void SimulatedRun::arm(const std::shared_ptr<Agent>& agent) {
  const SimTime time = std::max(agent->protocol->next_time(), world_.now());
  if (time >= agent->armed) return;
  agent->armed = time;
  world_.on_host(agent->host, time, [this, agent, time] {
    if (!agent->is_alive || agent->armed != time) return;
    agent->armed = SimTime::max();
    MemberProtocol::Effects effects;
    agent->protocol->tick(world_.now(), effects);
    apply(agent, effects);
  });
}

void SimulatedRun::apply(const std::shared_ptr<Agent>& agent, MemberProtocol::Effects& effects) {
  for (const auto& [address, message] : effects.messages) send(agent, address, message);
  for (const MemberProtocol::Command& command : effects.commands) {
    const bool begins_next_run =
        command.is_swap && !agent->protocol->record() && store_.record() && store_.record()->has_ended();
    if (begins_next_run) {  // as it has never known this one
      ++counts.next_runs;
      return kill_agent(agent, false);
    }
    world_.trace([&] {
      return concat("agent ", agent->incarnation,
                    command.is_swap ? " swaps from revision " : " reads, not from ", command.expected);
    });
    store_.submit(agent->host, command, [this, agent](const SimulatedStore::Answer& answer) {
      if (!agent->is_alive) return;
      MemberProtocol::Effects next;
      agent->protocol->on_store(answer, world_.now(), next);
      apply(agent, next);
    });
  }
  if (effects.is_changed) on_record(agent);
  if (!agent->is_alive) return;
  if (!agent->protocol->failure().empty()) {
    check_failure(*agent);
    return kill_agent(agent, false);
  }
  arm(agent);
}

// An agent may give up where the agent that has the only record is dead, or was not heard for long, as its
// network was cut. With a store that all reach only one that is cut off from it for ever, and one that never
// knew a run that has succeeded.
void SimulatedRun::check_failure(const Agent& agent) {
  const std::string& why = agent.protocol->failure();
  const auto has = [&](const char* piece) { return why.find(piece) != std::string::npos; };
  const bool has_record = agent.protocol->record().has_value();
  bool may_fail = false;
  if (!options_.is_embedded) {
    may_fail = (store_.is_cut_off(agent.host) && has("the store of the record")) ||
               (!has_record && has("has succeeded already"));
  } else if (is_endpoint_lost_) {
    may_fail = has_record ? has("the rendezvous endpoint") : has("no agent of the run answered");
  } else {
    const SimTime::duration most = 20 * settings_.silence;
    const SimTime end_of_trouble =
        std::max({world_.end_of_trouble(0, agent.host), rejects_until_[0], rejects_until_[agent.host]});
    may_fail = has_record ? has("was silent for") && world_.now() - agent.endpoint_heard >= most &&
                                end_of_trouble > world_.now() - most
                          : agent.host == cut_host_;
    ++counts.unheard;
  }
  if (!may_fail) world_.fail("an agent gave up: " + why);
}

void SimulatedRun::send(const std::shared_ptr<Agent>& from, const std::string& address,
                        const AgentMessage& message) {
  const int host = host_of(address);
  AgentMessage sent = message;
  if (options_.seed % 64 == 0) {
    sent = membership::parse_agent_message(membership::to_text(message));
    if (!(sent == message)) world_.fail("a message is another one as a text");
  }
  const auto deliver = [this, from, host, sent = std::move(sent)] {
    Agent* const there = agent_on(host);
    if (there == nullptr || world_.now() < rejects_until_[host]) return tell_closed_port(from, host);
    if (options_.is_embedded && from->host == 0) there->endpoint_heard = world_.now();
    world_.trace([&] {
      return concat("agent ", there->incarnation, " hears ", membership::to_text(sent).substr(0, 400));
    });
    if (sent.type == AgentMessage::Type::kReport) informed_[sent.report.entered].insert(there->incarnation);
    MemberProtocol::Effects effects;
    there->protocol->on_message(sent, world_.now(), effects);
    for (const auto& agent : agents_) {
      if (agent.get() == there) return apply(agent, effects);
    }
  };
  ++num_agent_messages_;
  // A session that is made again may lose a message, or bring it twice.
  if (may_disturb() && world_.pick(100) < lost_percent_) return;
  const int count = may_disturb() && world_.chance(3) ? 2 : 1;
  for (int i = 0; i < count; ++i) {
    world_.carry(from->host, host, concat(from->incarnation, '>', address), deliver, nullptr);
  }
}

// A host whose agent is gone says so; one that is gone itself is silent.
void SimulatedRun::tell_closed_port(const std::shared_ptr<Agent>& from, int host) {
  const auto last =
      std::find_if(agents_.rbegin(), agents_.rend(), [&](const auto& agent) { return agent->host == host; });
  if (last == agents_.rend() || (*last)->is_host_lost || world_.is_cut(host, from->host)) return;
  world_.on_host(from->host, world_.now() + milliseconds(1), [this, from, host] {
    if (!from->is_alive) return;
    MemberProtocol::Effects effects;
    from->protocol->on_closed_port(address_of(host), world_.now(), effects);
    apply(from, effects);
  });
}

void SimulatedRun::on_record(const std::shared_ptr<Agent>& agent) {
  const RendezvousRecord& record = *agent->protocol->record();
  const Generation& generation = record.generation;
  const auto [known, is_new] = generations_.emplace(generation.number, generation);
  if (!is_new && !(known->second == generation))
    world_.fail(concat("generation ", generation.number, " has two contents"));
  if (record.has_ended()) {
    if (options_.planted == Planted::kUnheardEnd && agent->host == 1) return;
    agent->has_stopped = true;
    for (const auto& process : agent->processes) process->is_alive = false;
    return;
  }
  const MemberInfo* const member = record.find(agent->incarnation);
  if (record.state != RunState::kRunning && member != nullptr) {
    if (may_leave_forming_run(*agent)) kill_agent(agent, false);
    return;
  }
  const bool is_member = member != nullptr && generation.find(member->id) == member;
  if (!is_member && agent->report.ends_run && agent->report.entered != generation.number) {
    ++counts.gave_up;
    return kill_agent(agent, false);
  }
  if (!is_member && agent->report.entered + 1 == generation.number && !agent->report.is_leaving)
    ++counts.dropped_alive;
  if (is_member && member->num_processes != agent->report.num_processes)
    world_.fail("a member has other processes");
  for (std::size_t i = 0; i < agent->processes.size(); ++i) {
    Process& process = *agent->processes[i];
    if (generation.number <= process.not_before) continue;
    Generation told = generation.for_ranks(agent->known_steps);
    if (options_.planted == Planted::kLossUnnoticed) told.committed_steps = 0;
    tell_process(
        agent, i, told,
        is_member ? std::optional(generation.first_process(member->id) + static_cast<int>(i)) : std::nullopt);
  }
}

// As `cohort run` does: one that has the state stays for those that may come.
bool SimulatedRun::may_leave_forming_run(const Agent& agent) const {
  const std::optional<RendezvousRecord>& record = agent.protocol->record();
  if (!agent.report.is_leaving || !record || record->state != RunState::kForming) return false;
  const MemberInfo* const member = record->find(agent.incarnation);
  return member != nullptr && std::ranges::count(record->holders, member->id) == 0;
}

void SimulatedRun::report(const std::shared_ptr<Agent>& agent) {
  if (!agent->is_alive || !agent->protocol) return;
  membership::Report& report = agent->report;
  std::uint64_t entered = ~std::uint64_t{0}, recovered = entered;
  bool is_finished = true;
  for (const auto& process : agent->processes) {
    recovered = std::min(recovered, process->recovered);
    entered = std::min(entered, process->steps.generation());
    is_finished = is_finished && process->is_finished;
    report.committed_steps = std::max(report.committed_steps, process->steps.committed_steps());
  }
  agent->known_steps = std::max(agent->known_steps, report.committed_steps);
  report.is_finished = is_finished;
  report.recovered = recovered;
  if (entered > report.entered) {
    report.entered = entered;
    report.failure.clear();
    report.ends_run = report.is_state_lost = false;
  }
  report.lost_links.clear();
  for (const auto& process : agent->processes) {
    if (process->steps.generation() != report.entered) continue;
    report.lost_links.insert(report.lost_links.end(), process->lost_links.begin(), process->lost_links.end());
  }
  const auto is_out = [](const auto& process) { return process->steps.generation() == 0; };
  const bool has_left =
      report.is_leaving && std::all_of(agent->processes.begin(), agent->processes.end(), is_out);
  // On the agent's own time, as reports come from other threads and processes.
  world_.on_host(agent->host, world_.now() + milliseconds(1), [this, agent, has_left] {
    if (!agent->is_alive) return;
    if (has_left || may_leave_forming_run(*agent)) return kill_agent(agent, false);
    MemberProtocol::Effects effects;
    agent->protocol->set_report(agent->report, world_.now(), effects);
    apply(agent, effects);
  });
}

void SimulatedRun::link_lost(const std::string& incarnation, std::size_t process, MemberId other,
                             std::uint64_t generation) {
  for (const auto& agent : agents_) {
    if (agent->incarnation != incarnation || !agent->is_alive || agent->has_stopped) continue;
    if (process >= agent->processes.size()) return;
    Process& here = *agent->processes[process];
    if (!here.is_alive || here.steps.generation() != generation) return;
    if (here.stopped_until > world_.now()) {  // it finds out when it runs again
      return on_process(agent, here, here.stopped_until, [this, incarnation, process, other, generation] {
        link_lost(incarnation, process, other, generation);
      });
    }
    ++counts.lost_links;
    here.lost_links.push_back(other);
    here.steps.on_link_lost();
    report(agent);
  }
}

// The links of a dead agent, or of one of its processes, close: each process that is in a generation with it
// hears of it.
void SimulatedRun::tell_links(const std::shared_ptr<Agent>& dead, std::optional<std::size_t> index,
                              bool is_host_lost) {
  for (const auto& agent : agents_) {
    if (!agent->is_alive && agent != dead) continue;
    const bool is_quick = !is_host_lost && !world_.is_cut(dead->host, agent->host);
    const auto delay = is_quick ? world_.between(0, 5) : world_.give_up();
    for (std::size_t k = 0; k < agent->processes.size(); ++k) {
      if (agent == dead && (!index || *index == k)) continue;
      world_.on_host(agent->host, world_.now() + delay, [this, agent, k, incarnation = dead->incarnation] {
        const std::uint64_t number = agent->processes[k]->steps.generation();
        if (number == 0) return;
        for (const MemberInfo& member : generations_.at(number).members) {
          if (member.incarnation == incarnation) link_lost(agent->incarnation, k, member.id, number);
        }
      });
    }
  }
}

void SimulatedRun::kill_agent(const std::shared_ptr<Agent>& agent, bool is_host_lost) {
  if (!std::exchange(agent->is_alive, false)) return;
  world_.trace([&] {
    return concat("agent ", agent->incarnation, is_host_lost ? " is gone, with its host" : " is gone");
  });
  agent->is_host_lost = is_host_lost;
  if (options_.is_embedded && agent->host == 0) is_endpoint_lost_ = true;
  tell_links(agent, std::nullopt, is_host_lost);
  if (is_host_lost) return;
  for (const auto& other : agents_) {
    if (!other->is_alive || world_.is_cut(agent->host, other->host) || world_.chance(15)) continue;
    world_.on_host(other->host, world_.now() + world_.between(1, 8),
                   [this, other, incarnation = agent->incarnation] {
                     if (!other->is_alive) return;
                     MemberProtocol::Effects effects;
                     other->protocol->on_death(incarnation, world_.now(), effects);
                     apply(other, effects);
                   });
  }
}

// While neither the process nor its host is stopped. Not at all once it has ended.
void SimulatedRun::on_process(const std::shared_ptr<Agent>& agent, Process& process, SimTime time,
                              std::function<void()> run) {
  world_.on_host(agent->host, time, [this, agent, &process, run = std::move(run)] {
    if (!process.is_alive || !agent->is_alive) return;
    if (process.stopped_until > world_.now()) return on_process(agent, process, process.stopped_until, run);
    run();
  });
}

void SimulatedRun::tell_process(const std::shared_ptr<Agent>& agent, std::size_t index,
                                const Generation& told, std::optional<int> number) {
  Process& process = *agent->processes[index];
  const auto tell = [&process, told, number] { process.steps.announce(told, number); };
  if (options_.planted == Planted::kLateEntry) {
    on_process(agent, process, world_.now() + seconds(3), tell);
  } else if (process.stopped_until <= world_.now()) {
    tell();
  } else {
    on_process(agent, process, process.stopped_until, tell);
  }
  if (number) ask_process(agent, index, process, told.number, 0);
}

// An agent asks a process in each silence until it has entered the generation, and kills one that does not
// answer ten times, for 2 s at least.
void SimulatedRun::ask_process(const std::shared_ptr<Agent>& agent, std::size_t index, Process& process,
                               std::uint64_t generation, int unanswered) {
  world_.on_host(agent->host, world_.now() + std::max(settings_.silence, milliseconds(200)),
                 [this, agent, index, &process, generation, unanswered] {
                   const bool is_there = agent->is_alive && process.is_alive && !agent->has_stopped;
                   if (!is_there || process.steps.generation() >= generation) return;
                   const int count = world_.now() < process.stopped_until ? unanswered + 1 : 0;
                   if (count < 10) return ask_process(agent, index, process, generation, count);
                   ++counts.hung;
                   kill_process(agent, index, agent->protocol->record()->generation.number);
                 });
}

// As SIGSTOP does. After give_up() the others have lost it, and it has lost them.
void SimulatedRun::stop_process(const std::shared_ptr<Agent>& agent, std::size_t index, milliseconds time) {
  Process& process = *agent->processes[index];
  const std::uint64_t number = process.steps.generation();
  process.stopped_until = std::max(process.stopped_until, world_.now() + time);
  ++counts.stopped;
  if (number != 0) give_up_stopped(agent, index, number);
}

// Also once another process has entered the generation in which it is stopped.
void SimulatedRun::give_up_stopped(const std::shared_ptr<Agent>& agent, std::size_t index,
                                   std::uint64_t number) {
  Process& process = *agent->processes[index];
  world_.at(world_.now() + world_.give_up(), [this, agent, index, &process, number] {
    if (!process.is_alive || process.stopped_until <= world_.now() || process.steps.generation() != number)
      return;
    tell_links(agent, index, false);
    for (const MemberInfo& member : generations_.at(number).members) {
      if (generations_.at(number).num_processes() > 1)
        link_lost(agent->incarnation, index, member.id, number);
    }
  });
}

void SimulatedRun::give_up_stopped_of(const Generation& generation) {
  for (const auto& agent : agents_) {
    for (std::size_t i = 0; i < agent->processes.size(); ++i) {
      const Process& process = *agent->processes[i];
      const bool is_in_it = agent->is_alive && process.steps.generation() == generation.number;
      if (is_in_it && process.stopped_until > world_.now()) give_up_stopped(agent, i, generation.number);
    }
  }
}

// `told`: of which its place was told, whether it has entered it or not.
void SimulatedRun::kill_process(const std::shared_ptr<Agent>& agent, std::size_t index, std::uint64_t told,
                                bool is_hopeless) {
  Process& dead = *agent->processes[index];
  const std::uint64_t generation = std::max(dead.steps.generation(), told);
  if (agent->has_stopped || generation == 0) return;
  tell_links(agent, index, false);
  const bool is_dirty = dead.steps.is_applying() && options_.planted != Planted::kDirtyState;
  const bool has_region = !is_dirty && world_.chance(60);
  const std::uint64_t committed = has_region ? dead.steps.committed_steps() : 0;
  auto next = std::make_unique<Process>(*this, agent, index, committed, has_region ? dead.value() : 0,
                                        has_region ? dead.last_sums() : "");
  next->not_before = generation;
  dead.is_alive = false;
  // The dead one stays until events that were for it have passed.
  graveyard_.push_back(std::exchange(agent->processes[index], std::move(next)));
  agent->report.committed_steps = committed;
  for (const auto& process : agent->processes) {
    agent->report.committed_steps = std::max(agent->report.committed_steps, process->steps.committed_steps());
  }
  ++counts.restarts;
  world_.on_host(agent->host, world_.now() + milliseconds(2), [this, agent, generation, index, is_hopeless] {
    if (!agent->is_alive || agent->report.entered > generation) return;
    // What was said of an earlier generation is no news of this one.
    if (std::exchange(agent->report.entered, generation) < generation) agent->report.is_state_lost = false;
    agent->report.failure = concat("rank ", index, " was killed");
    agent->report.ends_run = agent->report.ends_run || is_hopeless;
    report(agent);
    if (agent->protocol->record()) on_record(agent);
  });
}

}  // namespace cohort::test
