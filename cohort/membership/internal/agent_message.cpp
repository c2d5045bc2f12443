// Messages are JSON objects. They are few and small, so a text that people can read costs nothing that
// counts. The reader is strict: a missing field, an unknown one, or a value out of its range is a CommError
// that names the field. So agents of two versions do not misunderstand each other.
#include "cohort/membership/internal/agent_message.h"

#include <algorithm>
#include <array>

#include "cohort/membership/internal/fields.h"
#include "cohort/membership/internal/settings_text.h"

namespace cohort::membership {
namespace {

using nlohmann::json;

constexpr std::array<const char*, 6> kTypes = {"report", "heard", "record", "reject", "ping", "pong"};

json json_of_report(const Report& report) {
  return {{"store", report.store},
          {"processes", report.num_processes},
          {"ready", report.is_ready},
          {"known", report.known},
          {"entered", report.entered},
          {"recovered", report.recovered},
          {"committed_steps", report.committed_steps},
          {"leaving", report.is_leaving},
          {"finished", report.is_finished},
          {"stop_signal", report.stop_signal},
          {"state_lost", report.is_state_lost},
          {"failure", report.failure},
          {"exit_status", report.exit_status},
          {"ends_run", report.ends_run},
          {"stuck", report.stuck},
          {"lost_links", report.lost_links},
          {"unheard", report.unheard}};
}

std::vector<MemberId> ids_of(Fields& fields, const char* key) {
  std::vector<MemberId> ids;
  for (const json& id : fields.array(key)) {
    if (!id.is_number_unsigned()) fields.reject_field(key, "a list of ids");
    ids.push_back(id.get<MemberId>());
  }
  return ids;
}

Report report_of(const json& object) {
  Fields fields(object, "an agent's report");
  Report report;
  report.store = fields.text("store");
  report.num_processes = fields.integer("processes", 1, kMaxProcesses);
  report.is_ready = fields.flag("ready");
  report.known = fields.count("known");
  report.entered = fields.count("entered");
  report.recovered = fields.count("recovered");
  report.committed_steps = fields.count("committed_steps");
  report.is_leaving = fields.flag("leaving");
  report.is_finished = fields.flag("finished");
  report.stop_signal = fields.integer("stop_signal", 0, kMaxSignal);
  report.is_state_lost = fields.flag("state_lost");
  report.failure = fields.text("failure");
  report.exit_status = fields.integer("exit_status", 0);
  report.ends_run = fields.flag("ends_run");
  report.stuck = fields.text("stuck");
  report.lost_links = ids_of(fields, "lost_links");
  report.unheard = ids_of(fields, "unheard");
  fields.check_all_read();
  return report;
}

}  // namespace

std::string to_text(const AgentMessage& message) {
  json object = {{"type", kTypes.at(static_cast<std::size_t>(message.type))},
                 {"incarnation", message.incarnation},
                 {"address", message.address},
                 {"origin", message.origin},
                 {"revision", message.revision},
                 {"text", message.text}};
  if (message.type == AgentMessage::Type::kReport) {
    object["report"] = json_of_report(message.report);
    if (message.settings) object["settings"] = json_of(*message.settings);
  }
  return object.dump(-1, ' ', false, json::error_handler_t::replace);
}

AgentMessage parse_agent_message(std::string_view text) {
  const json object = parse_json(text);
  Fields fields(object, "a message of an agent");
  AgentMessage message;
  const std::string type = fields.text("type");
  const auto found = std::find(kTypes.begin(), kTypes.end(), type);
  if (found == kTypes.end()) fields.reject_field("type", "a type that this version knows");
  message.type = static_cast<AgentMessage::Type>(found - kTypes.begin());
  message.incarnation = fields.text("incarnation");
  message.address = fields.text("address");
  message.origin = fields.text("origin");
  message.revision = fields.count("revision");
  message.text = fields.text("text");
  if (message.type == AgentMessage::Type::kReport) {
    message.report = report_of(fields.field("report"));
    if (object.contains("settings")) message.settings = settings_of(fields.field("settings"));
  }
  fields.check_all_read();
  return message;
}

}  // namespace cohort::membership
