#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cohort/membership/internal/agent_views.h"
#include "cohort/membership/internal/decide.h"
#include "cohort/membership/internal/heard_agents.h"
#include "cohort/membership/record_store.h"

namespace cohort::membership {

/// Who an agent is, and where the record is.
struct ProtocolOptions {
  std::string incarnation, address;
  RunSettings settings;
  /// Address of the agent that has the record; this agent's own where it is the one. Empty: a store has the
  /// record that all agents reach by themselves.
  std::string endpoint;
};

/// An agent's side of membership: reports to the agent that decides, or is that one. Reads no clock and does
/// no input or output: messages, answers of the store and the time go in, messages, commands for the store
/// and the next time come out. Threads: one at a time.
class MemberProtocol {
 public:
  struct Command {
    bool is_swap = false;        ///< else a read
    std::uint64_t expected = 0;  ///< revision
    std::string text;
  };
  struct Effects {
    std::vector<std::pair<std::string, AgentMessage>> messages;  ///< with the addresses that they go to
    std::vector<Command> commands;
    bool is_changed = false;  ///< record() is another one
  };

  MemberProtocol(ProtocolOptions options, Time now);

  /// Throws: CommError for a record of another version.
  void on_message(const AgentMessage& message, Time now, Effects& effects);
  /// The process of this incarnation has ended.
  void on_death(const std::string& incarnation, Time now, Effects& effects);
  /// Nobody listens at an address.
  void on_closed_port(const std::string& address, Time now, Effects& effects);
  /// Throws: CommError for a record of another version.
  void on_store(const StoreAnswer& answer, Time now, Effects& effects);
  /// What this agent says of itself. `known` and `unheard` are filled in.
  void set_report(const Report& report, Time now, Effects& effects);
  /// To be called at next_time().
  void tick(Time now, Effects& effects);
  Time next_time() const;

  /// The newest that this agent knows.
  const std::optional<RendezvousRecord>& record() const { return record_; }
  std::uint64_t revision() const { return revision_; }
  bool is_deciding() const { return is_deciding_; }
  /// Why this agent can have no part in the run any more; empty while it can.
  const std::string& failure() const { return failure_; }
  /// This agent can have no part any more, since it cannot continue itself. Does nothing where it had failed
  /// before.
  void fail(std::string why);
  /// Whether the run has ended, and each agent that was heard lately has heard of it.
  bool do_all_know(Time now) const;

 private:
  bool has_store() const { return options_.endpoint.empty() || options_.endpoint == options_.address; }
  bool is_embedded() const { return !options_.endpoint.empty(); }
  bool has_only_record() const { return is_embedded() && has_store(); }
  bool is_endpoint(const std::string& incarnation) const { return record_ && record_->origin == incarnation; }
  const MemberInfo* self() const { return record_ ? record_->find(options_.incarnation) : nullptr; }
  AgentMessage message_of(AgentMessage::Type type) const;
  AgentMessage record_message() const;
  std::vector<const MemberInfo*> candidates() const;
  void choose_targets(Time now);
  void beat(Time now, Effects& effects);
  void send_report(Time now, Effects& effects);
  void on_report(const AgentMessage& message, Time now, Effects& effects);
  void note_drops(const RendezvousRecord& next, Time now);
  std::optional<RendezvousRecord> next_record(Time now);
  bool is_needed(const std::optional<RendezvousRecord>& next) const;
  void adopt(std::uint64_t revision, const std::string& text, Time now, Effects& effects);
  void begin_after(const RendezvousRecord& ended, std::uint64_t revision);
  void make_decision(Time now, Effects& effects);
  void check_reach(Time now);
  void note_time(Time now);

  const ProtocolOptions options_;
  const std::chrono::milliseconds silence_, beat_;
  Time start_;
  Report report_;
  std::optional<RendezvousRecord> record_;
  std::string text_;              // of the record
  std::set<std::string> agents_;  // incarnations that the record has
  std::uint64_t revision_ = 0;
  std::uint64_t news_revision_ = 0;  // of the newest generation or state of the run
  bool has_read_ = false;            // the store has said whether there is a record
  bool is_deciding_ = false, is_swapping_ = false;
  std::string swapped_text_;      // what this agent has wanted to write last
  bool made_generation_ = false;  // Observations::made_generation
  Time asked_store_, since_, decides_since_, state_since_, generation_since_, endpoint_heard_;
  std::optional<Time> blocked_since_;  // a generation that the run needs is not written, as the store is away
  Time last_time_, next_beat_, decide_at_ = Time::max();
  AgentViews views_;  // by incarnation, of those that have reported or died
  HeardAgents heard_;
  std::vector<std::string> report_targets_, ping_targets_;  // addresses
  std::string failure_;
};

}  // namespace cohort::membership
