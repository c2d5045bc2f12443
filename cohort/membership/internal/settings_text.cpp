#include "cohort/membership/internal/settings_text.h"

#include "cohort/membership/internal/fields.h"

namespace cohort::membership {
namespace {

using std::chrono::milliseconds;

milliseconds time_of(Fields& fields, const char* key) {
  constexpr std::uint64_t kYear = 365ULL * 24 * 3600 * 1000;
  const std::uint64_t count = fields.count(key);
  if (count > kYear) fields.reject_field(key, "a time of less than a year");
  return milliseconds(count);
}

}  // namespace

nlohmann::json json_of(const RunSettings& settings) {
  return {{"run_id", settings.run_id},
          {"min_nodes", settings.min_nodes},
          {"max_nodes", settings.max_nodes},
          {"spares", settings.num_spares},
          {"max_restarts", settings.max_restarts},
          {"virtual_ranks", settings.virtual_ranks},
          {"join_timeout_ms", settings.join_timeout.count()},
          {"last_call_timeout_ms", settings.last_call_timeout.count()},
          {"silence_ms", settings.silence.count()},
          {"embedded", settings.is_embedded}};
}

RunSettings settings_of(const nlohmann::json& object) {
  Fields fields(object, "the run's settings");
  RunSettings settings;
  settings.run_id = fields.text("run_id");
  settings.min_nodes = fields.integer("min_nodes", 1, kMaxNodes);
  settings.max_nodes = fields.integer("max_nodes", settings.min_nodes, kMaxNodes);
  settings.num_spares = fields.integer("spares", 0);
  settings.max_restarts = fields.integer("max_restarts", 0);
  settings.virtual_ranks = fields.integer("virtual_ranks", 0);
  settings.join_timeout = time_of(fields, "join_timeout_ms");
  settings.last_call_timeout = time_of(fields, "last_call_timeout_ms");
  settings.silence = time_of(fields, "silence_ms");
  settings.is_embedded = fields.flag("embedded");
  fields.check_all_read();
  if (settings.silence < milliseconds(1)) fields.reject_field("silence_ms", "at least 1");
  return settings;
}

std::string difference(const RunSettings& given, const RunSettings& of_run) {
  const nlohmann::json here = json_of(given), there = json_of(of_run);
  for (const auto& [key, value] : here.items()) {
    if (value != there.at(key)) {
      return base::concat(key, " is ", value.dump(), " here, and ", there.at(key).dump(), " in the run");
    }
  }
  return "";
}

}  // namespace cohort::membership
