// Figures of an agent as lines for people. Names of many workers are cut, since 64 workers would fill the
// log.
#include "cohort/rpc/agent_types.h"

#include <array>
#include <cstdio>
#include <initializer_list>
#include <map>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"

namespace cohort::rpc {
namespace {

// "12.3 kB": the first unit is that of `value`, and each further one is a thousand times the one before.
std::string scaled_text(double value, std::initializer_list<const char*> units) {
  const char* const* unit = units.begin();
  while (value >= 1000 && unit + 1 != units.end()) {
    value /= 1000;
    ++unit;
  }
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.1f %s", value, *unit);
  return text.data();
}
std::string text_of_bytes(std::uint64_t bytes) {
  return scaled_text(static_cast<double>(bytes), {"B", "kB", "MB", "GB", "TB"});
}
std::string text_of_time(std::chrono::nanoseconds time) {
  return scaled_text(static_cast<double>(time.count()), {"ns", "us", "ms", "s"});
}

constexpr std::size_t kNamesOfATransport = 8;  // in a line of the log

}  // namespace

std::string describe_transports(const std::vector<WorkerTraffic>& traffic) {
  std::map<std::string, std::vector<std::string>> names;
  for (const WorkerTraffic& each : traffic) names[each.transport].push_back(each.worker);
  base::TextList parts;
  for (auto& [transport, workers] : names) {
    const std::size_t count = workers.size();
    if (count > kNamesOfATransport) {
      workers.resize(kNamesOfATransport);
      workers.emplace_back("...");
    }
    parts.add(count, parts.empty() ? (count == 1 ? " worker" : " workers") : "", " over ", transport, " (",
              base::join(workers), ")");
  }
  return parts.text();
}

std::string to_string(const AgentMetrics& metrics) {
  base::TextList lines("\n");
  lines.add("calls made: ", metrics.calls_made, ", ", scaled_text(metrics.calls_made_per_second, {""}),
            "a second, ", metrics.calls_pending, " pending");
  lines.add("calls handled: ", metrics.calls_handled, ", ",
            scaled_text(metrics.calls_handled_per_second, {""}), "a second, ", metrics.calls_unanswered,
            " unanswered, ", metrics.handlers_queued, " queued, ", metrics.handlers_on_threads,
            " on threads");
  for (const WorkerTraffic& traffic : metrics.traffic) {
    lines.add(traffic.worker, " over ", traffic.transport, ": sent ", text_of_bytes(traffic.bytes_sent),
              ", received ", text_of_bytes(traffic.bytes_received), ", on the way ",
              text_of_bytes(traffic.bytes_on_the_way), ", queued ", text_of_bytes(traffic.bytes_queued),
              " in ", traffic.messages_queued, " messages, by handle ",
              text_of_bytes(traffic.bytes_by_handle));
  }
  lines.add("shared memory: ", text_of_bytes(metrics.shared_bytes_in_use), " in use, ",
            text_of_bytes(metrics.shared_bytes_cached), " cached");
  for (const FunctionMetrics& function : metrics.functions) {
    lines.add(function.name, ": ", function.num_calls, " calls, ", function.num_errors, " errors, p50 ",
              text_of_time(function.p50), ", p99 ", text_of_time(function.p99), ", max ",
              text_of_time(function.max));
  }
  lines.add(metrics.contexts, " contexts, ", metrics.backwards, " backwards, ", metrics.references,
            " references, ", metrics.objects.size(), " objects");
  for (const std::string& rref : metrics.rrefs) lines.add("reference to ", rref);
  for (const std::string& object : metrics.objects) lines.add(object);
  return lines.text();
}

}  // namespace cohort::rpc
