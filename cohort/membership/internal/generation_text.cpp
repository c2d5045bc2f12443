#include "cohort/membership/internal/generation_text.h"

#include <cstdint>
#include <limits>
#include <utility>

#include "cohort/membership/internal/fields.h"

namespace cohort::membership {

using nlohmann::json;

json json_of(const std::vector<MemberInfo>& members) {
  json list = json::array();
  for (const MemberInfo& member : members) {
    list.push_back({{"id", member.id},
                    {"incarnation", member.incarnation},
                    {"address", member.address},
                    {"processes", member.num_processes}});
  }
  return list;
}

std::vector<MemberInfo> members_of(const json& list) {
  std::vector<MemberInfo> members;
  std::int64_t num_processes = 0;
  for (const json& entry : list) {
    Fields fields(entry, "an agent of the record");
    MemberInfo member;
    member.id = fields.count("id");
    member.incarnation = fields.text("incarnation");
    member.address = fields.text("address");
    member.num_processes = fields.integer("processes", 1, kMaxProcesses);
    fields.check_all_read();
    if (member.id == 0 || (!members.empty() && member.id <= members.back().id)) {
      fields.reject_field("id", "above that of the agent before it");
    }
    num_processes += member.num_processes;
    if (num_processes > std::numeric_limits<int>::max())
      fields.reject_field("processes", "a number in its range");
    members.push_back(std::move(member));
  }
  return members;
}

json json_of(const Generation& generation) {
  return {{"number", generation.number},
          {"planned", generation.is_planned},
          {"members", json_of(generation.members)},
          {"virtual_ranks", generation.virtual_ranks},
          {"committed_steps", generation.committed_steps},
          {"store", generation.store},
          {"cause", generation.cause},
          {"detect_ms", generation.detect_ms}};
}

Generation generation_of(const json& object) {
  Fields fields(object, "a generation");
  Generation generation;
  generation.number = fields.count("number");
  generation.is_planned = fields.flag("planned");
  generation.members = members_of(fields.array("members"));
  generation.virtual_ranks = fields.integer("virtual_ranks", 0);
  generation.committed_steps = fields.count("committed_steps");
  generation.store = fields.text("store");
  generation.cause = fields.text("cause");
  generation.detect_ms = fields.count("detect_ms");
  fields.check_all_read();
  return generation;
}

}  // namespace cohort::membership
