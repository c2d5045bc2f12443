// Fuzzes what agents read of each other and of their store. A first byte 'r': the rest is a record; any bytes
// give one that is written and read as the same, and that every agent can decide by, or a CommError. Else the
// rest is messages, a line each, to an agent that decides: a line gives a message or a CommError, and
// whatever it says, what the agent answers and writes can be read by others.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "cohort/base/error.h"
#include "cohort/membership/internal/member_protocol.h"

using namespace cohort::membership;

namespace {

void check(bool holds) {
  if (!holds) std::abort();
}

void check_ranks(const RendezvousRecord& record) {
  const Generation& generation = record.generation;
  const int size = generation.num_processes();
  int next = 0;
  for (const MemberInfo& member : generation.members) {
    check(generation.find(member.id) == &member && generation.first_process(member.id) == next);
    const VirtualBlock block = generation.block(next);
    check(0 <= block.first && block.first <= block.end && block.end <= generation.virtual_ranks);
    next += member.num_processes;
  }
  check(next == size);
}

// All are heard, and the first one decides; then nobody is, and much later.
void decide_by(const RendezvousRecord& record) {
  Observations seen;
  seen.now = Time() + std::chrono::hours(24);
  for (const auto* const list : {&record.generation.members, &record.waiting, &record.spares}) {
    for (const MemberInfo& agent : *list) {
      AgentView& view = seen.agents[agent.incarnation];
      view.address = agent.address;
      view.report.entered = view.report.known = record.generation.number;
      view.first_heard = view.last_heard = seen.now;
      if (seen.self.empty()) seen.self = agent.incarnation;
    }
  }
  seen.since = seen.state_since = seen.generation_since = seen.now;
  for (const std::chrono::hours later : {std::chrono::hours(0), std::chrono::hours(1'000'000)}) {
    seen.now += later;
    const std::optional<RendezvousRecord> next = decide(record, seen);
    if (next) check_ranks(parse_record(to_text(*next)));
  }
}

void read_record(std::string_view text) {
  RendezvousRecord record;
  try {
    record = parse_record(text);
  } catch (const cohort::CommError&) {
    return;
  }
  check(parse_record(to_text(record)) == record);
  check_ranks(record);
  decide_by(record);
}

// Drives an agent that has the record itself.
class Agent {
 public:
  Agent() : protocol_({"self", "h:1", settings(), "h:1"}, now_) {
    store_.watch([this](const StoreAnswer& answer) { answer_ = answer; });
    protocol_.set_report(Report(), now_, effects_);
    run();
  }

  void read(std::string_view line) {
    try {
      const AgentMessage message = parse_agent_message(line);
      check(parse_agent_message(to_text(message)) == message);
      protocol_.on_message(message, now_, effects_);
    } catch (const cohort::CommError&) {
    }
    run();
  }

 private:
  static RunSettings settings() {
    RunSettings settings;
    settings.max_nodes = 4;
    settings.virtual_ranks = 8;
    settings.max_restarts = 2;
    return settings;
  }

  void run() {
    for (int i = 0; i < 8; ++i) {
      now_ = std::max(now_, protocol_.next_time());
      protocol_.tick(now_, effects_);
      const MemberProtocol::Effects effects = std::exchange(effects_, {});
      for (const auto& [address, message] : effects.messages) parse_agent_message(to_text(message));
      for (const MemberProtocol::Command& command : effects.commands) {
        if (command.is_swap) check_ranks(parse_record(command.text));
        command.is_swap ? store_.compare_and_swap(command.expected, command.text) : store_.read();
        protocol_.on_store(answer_, now_, effects_);
      }
    }
  }

  Time now_ = Time() + std::chrono::hours(24);
  MemberProtocol protocol_;
  MemberProtocol::Effects effects_;
  MemoryStore store_;
  StoreAnswer answer_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::string_view text(reinterpret_cast<const char*>(data), size);
  if (text.empty()) return 0;
  const bool is_record = text.front() == 'r';
  text.remove_prefix(1);
  if (is_record) {
    read_record(text);
    return 0;
  }
  Agent agent;
  for (int lines = 0; lines < 16 && !text.empty(); ++lines) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    agent.read(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return 0;
}
