// The text is JSON, so that a person can read what is in etcd. The parser is strict: an agent of another
// version must not read half of a record and decide by it. A new field is a new version. Keys are in the
// order of the alphabet, and the version is to be the first.
#include "cohort/membership/record.h"

#include <algorithm>
#include <array>
#include <set>

#include "cohort/membership/internal/fields.h"
#include "cohort/membership/internal/generation_text.h"
#include "cohort/membership/internal/settings_text.h"

namespace cohort::membership {
namespace {

using nlohmann::json;

constexpr int kRecordVersion = 4;
constexpr std::array<const char*, 5> kStates = {"forming", "running", "succeeded", "failed", "stopped"};

// No agent is twice where it can be once, and each id has been given.
void check_agents(const RendezvousRecord& record) {
  std::set<MemberId> ids;
  std::set<std::string> incarnations;
  const auto add = [&](const MemberInfo& agent) {
    if (!ids.insert(agent.id).second || !incarnations.insert(agent.incarnation).second) {
      reject_text(base::concat("agent ", agent.id, " is in the record of the rendezvous twice"));
    }
  };
  for (const auto* const list : {&record.generation.members, &record.waiting, &record.spares}) {
    const bool is_over = list == &record.generation.members && record.state != RunState::kRunning;
    for (const MemberInfo& agent : *list) {
      if (!is_over) add(agent);
      if (agent.id >= record.next_id) {
        reject_text(base::concat("agent ", agent.id, " of the record has an id that nobody was given"));
      }
    }
  }
  const std::size_t size = record.generation.members.size();
  // One more where a node that leaves gives its state to those that take all places.
  if (size > static_cast<std::size_t>(record.settings.max_nodes) + 1) {
    reject_text(base::concat("a generation has ", size, " members, of at most ", record.settings.max_nodes,
                             " and one that leaves"));
  }
}

json json_of(const std::vector<AwaitedAgent>& agents) {
  json list = json::array();
  for (const AwaitedAgent& agent : agents) {
    list.push_back({{"incarnation", agent.incarnation}, {"committed_steps", agent.committed_steps}});
  }
  return list;
}
std::vector<AwaitedAgent> awaited_of(const json& list) {
  std::vector<AwaitedAgent> agents;
  for (const json& entry : list) {
    Fields fields(entry, "an agent that the record waits for");
    agents.push_back({fields.text("incarnation"), fields.count("committed_steps")});
    fields.check_all_read();
  }
  return agents;
}

RunState state_of(Fields& fields) {
  const std::string text = fields.text("state");
  const auto found = std::find(kStates.begin(), kStates.end(), text);
  if (found == kStates.end()) fields.reject_field("state", "a state that this version knows");
  return static_cast<RunState>(found - kStates.begin());
}

}  // namespace

const MemberInfo* RendezvousRecord::find(std::string_view incarnation) const {
  for (const auto* const list : {&generation.members, &waiting, &spares}) {
    // Members that survive while the run is forming wait; what they were members of is over.
    if (list == &generation.members && state == RunState::kForming) continue;
    for (const MemberInfo& member : *list) {
      if (member.incarnation == incarnation) return &member;
    }
  }
  return nullptr;
}

std::string to_text(const RendezvousRecord& record) {
  const json object = {{"cohort_membership", kRecordVersion},
                       {"settings", json_of(record.settings)},
                       {"origin", record.origin},
                       {"state", kStates.at(static_cast<std::size_t>(record.state))},
                       {"generation", json_of(record.generation)},
                       {"waiting", json_of(record.waiting)},
                       {"spares", json_of(record.spares)},
                       {"holders", record.holders},
                       {"waits_for", json_of(record.awaited)},
                       {"next_id", record.next_id},
                       {"restarts_used", record.restarts_used},
                       {"link_lost", record.was_link_lost},
                       {"end_cause", record.end_cause},
                       {"exit_status", record.exit_status}};
  return object.dump(-1, ' ', false, json::error_handler_t::replace);
}

RendezvousRecord parse_record(std::string_view text) {
  const json object = parse_json(text);
  Fields fields(object, "the record of the rendezvous");
  if (const int version = fields.integer("cohort_membership", 0); version != kRecordVersion) {
    reject_text(
        base::concat("the record of the rendezvous has version ", version, ", expected ", kRecordVersion));
  }
  RendezvousRecord record;
  record.settings = settings_of(fields.field("settings"));
  record.origin = fields.text("origin");
  record.state = state_of(fields);
  record.generation = generation_of(fields.field("generation"));
  record.waiting = members_of(fields.array("waiting"));
  record.spares = members_of(fields.array("spares"));
  for (const json& id : fields.array("holders")) {
    if (!id.is_number_unsigned()) fields.reject_field("holders", "a list of ids");
    record.holders.push_back(id.get<MemberId>());
  }
  record.awaited = awaited_of(fields.array("waits_for"));
  record.next_id = fields.count("next_id");
  record.restarts_used = fields.integer("restarts_used", 0);
  record.was_link_lost = fields.flag("link_lost");
  record.end_cause = fields.text("end_cause");
  record.exit_status = fields.integer("exit_status", 0);
  fields.check_all_read();
  check_agents(record);
  return record;
}

}  // namespace cohort::membership
