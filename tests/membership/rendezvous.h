#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cohort/membership/internal/decide.h"

namespace cohort::test {

/// A record, and what the agent "a" has seen of the others.
struct Rendezvous {
  explicit Rendezvous(int min_nodes, int max_nodes) {
    settings.min_nodes = min_nodes;
    settings.max_nodes = max_nodes;
    settings.virtual_ranks = 8;
    record = membership::first_record(settings);
    seen.now = seen.since = seen.state_since = membership::Time() + std::chrono::hours(1);
    seen.decides_since = seen.now - std::chrono::minutes(1);
    seen.self = "a";
  }

  void hear(const std::string& incarnation,
            const std::function<void(membership::Report&)>& change = nullptr) {
    membership::AgentView& view = seen.agents[incarnation];
    if (view.address.empty()) view.first_heard = seen.now;
    view.address = "host-" + incarnation + ":1";
    view.last_heard = seen.now;
    view.report.store = "store-" + incarnation;
    view.report.known = record.generation.number;
    view.report.entered = view.report.recovered = record.generation.number;
    if (change) change(view.report);
  }
  bool step() {
    const std::optional<membership::RendezvousRecord> next = membership::decide(record, seen);
    if (!next) return false;
    if (next->state != record.state) seen.state_since = seen.now;
    if (next->generation.number != record.generation.number) {
      seen.generation_since = seen.now;
      seen.made_generation = true;
    }
    record = *next;
    return true;
  }
  // Another agent has decided until now.
  void begin_to_decide() {
    seen.decides_since = seen.generation_since = seen.state_since = seen.now;
    seen.made_generation = false;
  }
  void wait(std::chrono::milliseconds time) { seen.now += time; }
  std::vector<std::string> members() const {
    std::vector<std::string> list;
    for (const membership::MemberInfo& member : record.generation.members) list.push_back(member.incarnation);
    return list;
  }
  // The first generation, of these.
  void form(const std::vector<std::string>& agents) {
    for (const std::string& agent : agents) hear(agent);
    step();
    step();
    for (const std::string& agent : agents) hear(agent);
  }

  membership::RunSettings settings;
  membership::RendezvousRecord record;
  membership::Observations seen;
};

}  // namespace cohort::test
