#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cohort/membership/record.h"
#include "cohort/membership/status.h"

/// What agents say to each other.
namespace cohort::membership {

/// What an agent says: its request to join, its sign of life, and what it has seen.
struct Report : MemberStatus {
  std::uint64_t known = 0;        ///< number of the newest generation that it has heard of
  std::vector<MemberId> unheard;  ///< agents that it listens to, and does not hear

  bool operator==(const Report&) const = default;
};

struct AgentMessage {
  enum class Type : std::uint8_t {
    kReport,  ///< to the agent that decides
    kHeard,   ///< its answer
    kRecord,  ///< its answer where the other agent lacks the newest record; and to all, when the record changes
    kReject,  ///< its answer to an agent that may not join
    kPing,    ///< to an agent that the sender watches
    kPong,    ///< its answer
  };
  Type type = Type::kHeard;
  std::string incarnation, address;     ///< of the sender
  std::string origin;                   ///< of the record that the sender has; empty: it has none
  std::uint64_t revision = 0;           ///< of the record that the sender has; 0: none
  Report report;                        ///< of kReport
  std::optional<RunSettings> settings;  ///< of kReport, of an agent that knows no record
  std::string text;                     ///< the record of kRecord; of kReject: why

  bool operator==(const AgentMessage&) const = default;
};

std::string to_text(const AgentMessage& message);
/// Throws: CommError.
AgentMessage parse_agent_message(std::string_view text);

}  // namespace cohort::membership
