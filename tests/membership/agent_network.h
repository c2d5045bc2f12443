#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "cohort/membership/internal/member_protocol.h"

namespace cohort::test {

inline membership::RunSettings run_of(int min_nodes, int max_nodes) {
  membership::RunSettings settings;
  settings.min_nodes = min_nodes;
  settings.max_nodes = max_nodes;
  settings.virtual_ranks = 8;
  settings.join_timeout = std::chrono::seconds(20);
  return settings;
}

/// Agents of one network, without threads or sockets. Names that an address has beside its own are in
/// `aliases`.
class AgentNetwork {
 public:
  using milliseconds = std::chrono::milliseconds;

  struct Agent {
    Agent(const membership::ProtocolOptions& options, membership::Time now)
        : incarnation(options.incarnation), endpoint(options.endpoint), protocol(options, now) {}

    std::string incarnation, endpoint;
    membership::MemberProtocol protocol;
    membership::Report report;
    bool is_stopped = false;
    std::uint64_t num_messages = 0;  // that it has sent

    const std::string& failure() const { return protocol.failure(); }
    const membership::RendezvousRecord& record() const { return *protocol.record(); }
    bool is_member() const {
      return protocol.record() && record().state == membership::RunState::kRunning &&
             record().find(incarnation) != nullptr &&
             record().generation.find(record().find(incarnation)->id) != nullptr;
    }
  };

  Agent& add(const std::string& incarnation, const std::string& address,
             const membership::RunSettings& settings, const std::string& endpoint) {
    auto agent =
        std::make_unique<Agent>(membership::ProtocolOptions{incarnation, address, settings, endpoint}, now_);
    Agent& added = *agent;
    added.report.store = "store-" + incarnation;
    agents_[address] = std::move(agent);
    report(added);
    return added;
  }
  // Says what the agent's report is by now.
  void report(Agent& agent) {
    membership::MemberProtocol::Effects effects;
    agent.protocol.set_report(agent.report, now_, effects);
    apply(agent, effects);
  }
  void kill(const std::string& address) {
    const std::string incarnation = agents_.at(address)->incarnation;
    agents_.erase(address);
    for (const auto& [other, agent] : agents_) {
      membership::MemberProtocol::Effects effects;
      agent->protocol.on_death(incarnation, now_, effects);
      apply(*agent, effects);
    }
  }
  // Nobody hears of its death.
  void lose(const std::string& address) { agents_.erase(address); }
  void deliver(Agent& agent, const membership::AgentMessage& message) {
    membership::MemberProtocol::Effects effects;
    agent.protocol.on_message(message, now_, effects);
    apply(agent, effects);
  }
  void tell(Agent& agent, const membership::StoreAnswer& answer) {
    if (agent.is_stopped) return;
    membership::MemberProtocol::Effects effects;
    agent.protocol.on_store(answer, now_, effects);
    apply(agent, effects);
  }
  // All agents' ranks enter what there is to enter.
  void run(milliseconds time) {
    for (const membership::Time end = now_ + time; now_ < end;) {
      now_ += milliseconds(10);
      for (const auto& [address, agent] : agents_) {
        if (agent->is_stopped) continue;
        enter(*agent);
        if (now_ < agent->protocol.next_time()) continue;
        membership::MemberProtocol::Effects effects;
        agent->protocol.tick(now_, effects);
        apply(*agent, effects);
      }
    }
  }
  // Nobody runs meanwhile.
  void stop(milliseconds time) { now_ += time; }
  bool run_until(milliseconds time, const std::function<bool()>& condition) {
    for (const membership::Time end = now_ + time; now_ < end && !condition();) run(milliseconds(10));
    return condition();
  }

  std::map<std::string, std::string> aliases;
  bool is_store_away = false;
  bool tells_closed_ports = false;  // hosts whose agents are gone say so

 private:
  // A record: that of one agent, or of all.
  struct Store {
    std::uint64_t revision = 0;
    std::string text;
  };
  membership::StoreAnswer ask(const std::string& name, const membership::MemberProtocol::Command& command) {
    Store& store = stores_[name];
    if (!command.is_swap) return {membership::StoreAnswer::Type::kRecord, store.revision, store.text};
    if (command.expected != store.revision)
      return {membership::StoreAnswer::Type::kConflict, store.revision, store.text};
    store = {store.revision + 1, command.text};
    return {membership::StoreAnswer::Type::kSwapped, store.revision, store.text};
  }
  void enter(Agent& agent) {
    const bool has_entered = !agent.is_member() || agent.record().generation.number == agent.report.entered ||
                             agent.report.is_finished;
    if (has_entered) return;
    agent.report.entered = agent.report.recovered = agent.record().generation.number;
    agent.report.failure.clear();
    report(agent);
  }
  void apply(Agent& agent, const membership::MemberProtocol::Effects& effects) {
    agent.num_messages += effects.messages.size();
    for (const auto& [address, message] : effects.messages) {
      const auto alias = aliases.find(address);
      const auto to = agents_.find(alias == aliases.end() ? address : alias->second);
      if (to != agents_.end() && !to->second->is_stopped) deliver(*to->second, message);
      if (to != agents_.end() || !tells_closed_ports) continue;
      membership::MemberProtocol::Effects next;
      agent.protocol.on_closed_port(address, now_, next);
      apply(agent, next);
    }
    for (const membership::MemberProtocol::Command& command : effects.commands) {
      const bool is_common = agent.endpoint.empty();
      if (is_common && is_store_away) continue;
      const membership::StoreAnswer answer = ask(is_common ? "" : agent.incarnation, command);
      tell(agent, answer);
      if (!is_common || answer.type != membership::StoreAnswer::Type::kSwapped) continue;
      for (const auto& [address, other] : agents_)
        tell(*other, {membership::StoreAnswer::Type::kRecord, answer.revision, answer.text});
    }
  }

  membership::Time now_ = membership::Time() + std::chrono::hours(1);
  std::map<std::string, std::unique_ptr<Agent>> agents_;
  std::map<std::string, Store> stores_;
};

}  // namespace cohort::test
