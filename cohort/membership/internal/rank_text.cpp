// The texts of RankOrder and RankStatus: JSON, so that a person can read what strace shows. The parser is
// strict: an agent and a rank of two versions must not half understand each other.
#include <nlohmann/json.hpp>

#include "cohort/membership/internal/fields.h"
#include "cohort/membership/internal/generation_text.h"
#include "cohort/membership/rank_link.h"

namespace cohort::membership {
namespace {

using nlohmann::json;

constexpr int kRankVersion = 4;

std::string dump(const json& object) {
  return object.dump(-1, ' ', false, json::error_handler_t::replace);
}

void check_version(Fields& fields, const char* key) {
  const int version = fields.integer(key, 0);
  if (version == kRankVersion) return;
  reject_text(base::concat(key, " has version ", version, ", expected ", kRankVersion));
}

}  // namespace

std::string to_text(const RankOrder& order) {
  return dump({{"cohort_rank_order", kRankVersion},
               {"number", order.number},
               {"revision", order.revision},
               {"origin", order.origin},
               {"generation", json_of(order.generation)},
               {"process", order.process ? json(*order.process) : json()},
               {"leaving", order.is_leaving},
               {"ended", order.has_ended},
               {"end_cause", order.end_cause},
               {"succeeded", order.has_succeeded},
               {"stop_signal", order.stop_signal}});
}

RankOrder parse_rank_order(std::string_view text) {
  const json object = parse_json(text);
  Fields fields(object, "an agent's order");
  check_version(fields, "cohort_rank_order");
  RankOrder order;
  order.number = fields.count("number");
  order.revision = fields.count("revision");
  order.origin = fields.text("origin");
  order.generation = generation_of(fields.field("generation"));
  if (const json& process = fields.field("process"); !process.is_null()) {
    if (!process.is_number_unsigned() ||
        process.get<std::uint64_t>() >= static_cast<std::uint64_t>(order.generation.num_processes())) {
      fields.reject_field("process", "the number of a process of the generation");
    }
    order.process = process.get<int>();
  }
  order.is_leaving = fields.flag("leaving");
  order.has_ended = fields.flag("ended");
  order.end_cause = fields.text("end_cause");
  order.has_succeeded = fields.flag("succeeded");
  order.stop_signal = fields.integer("stop_signal", 0, kMaxSignal);
  fields.check_all_read();
  return order;
}

std::string to_text(const RankStatus& status) {
  return dump({{"cohort_rank_status", kRankVersion},
               {"ready", status.is_ready},
               {"timeout_ms", status.timeout_ms},
               {"heard", status.heard},
               {"entered", status.entered},
               {"recovered", status.recovered},
               {"left", status.left},
               {"stepped", status.stepped},
               {"committed_steps", status.committed_steps},
               {"state_bytes", status.state_bytes},
               {"lost_links", status.lost_links},
               {"state_lost", status.is_state_lost},
               {"finished", status.is_finished},
               {"stop_signal", status.stop_signal},
               {"waiting", status.is_waiting}});
}

RankStatus parse_rank_status(std::string_view text) {
  const json object = parse_json(text);
  Fields fields(object, "a rank's status");
  check_version(fields, "cohort_rank_status");
  RankStatus status;
  status.is_ready = fields.flag("ready");
  status.timeout_ms = fields.count("timeout_ms");
  status.heard = fields.count("heard");
  status.entered = fields.count("entered");
  status.recovered = fields.count("recovered");
  status.left = fields.count("left");
  status.stepped = fields.count("stepped");
  status.committed_steps = fields.count("committed_steps");
  status.state_bytes = fields.count("state_bytes");
  for (const json& id : fields.array("lost_links")) {
    if (!id.is_number_unsigned()) fields.reject_field("lost_links", "a list of ids");
    status.lost_links.push_back(id.get<MemberId>());
  }
  status.is_state_lost = fields.flag("state_lost");
  status.is_finished = fields.flag("finished");
  status.stop_signal = fields.integer("stop_signal", 0, kMaxSignal);
  status.is_waiting = fields.flag("waiting");
  fields.check_all_read();
  return status;
}

}  // namespace cohort::membership
