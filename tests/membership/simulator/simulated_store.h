#pragma once

#include <algorithm>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "cohort/membership/internal/member_protocol.h"
#include "simulated_world.h"

namespace cohort::test {

/// Faults of the code under test, which the simulator must find.
enum class Planted {
  kNothing,
  kBlindSwap,        ///< the store does not compare before it swaps
  kMixedSteps,       ///< what processes send each other does not say of which generation it is
  kNoStateCopy,      ///< a process that lacks the state says that it has copied it
  kNoEarlyMessages,  ///< what comes before a process has entered a generation is dropped
  kLateLedger,     ///< the first process writes a step to the ledger after it has committed it, and only then
  kDirtyState,     ///< the state of a process that died while it changed the state is used
  kLossUnnoticed,  ///< processes do not know how many steps were committed
  kNoHolders,      ///< whoever is in the record counts as one that has the state
  kTwoContents,    ///< one host reads another text than the others
  kUnheardEnd,     ///< the agent on one host does not take the end of the run for one
  kLateEntry,      ///< a process hears of a generation when it has made two more steps of the one before
};

/// A linearizable store of a record, as etcd is one: may be slow or away, as all agents or one host see it.
/// Checks each record that is written after the one before it.
class SimulatedStore {
 public:
  using Answer = membership::StoreAnswer;
  using Listener = std::function<void(const Answer&)>;

  /// `is_local`: within the agent that uses it, so it answers at once.
  SimulatedStore(SimulatedWorld& world, bool is_local, Planted planted)
      : world_(world), is_local_(is_local), planted_(planted) {}

  void set_away(SimTime until) { away_until_ = std::max(away_until_, until); }
  void set_away(int host, SimTime until) { host_away_until_[host] = std::max(host_away_until_[host], until); }
  /// For ever: what a host sends does not come either.
  void cut_off(int host) { cut_hosts_.insert(host); }
  bool is_cut_off(int host) const { return cut_hosts_.contains(host); }
  /// It takes no record, and can be read.
  void set_full(SimTime until) { full_until_ = std::max(full_until_, until); }
  void set_delay(int most_ms) { most_delay_ms_ = most_ms; }
  std::uint64_t num_swaps() const { return revision_; }
  /// How often the run has formed again as no member had the state any more.
  std::uint64_t num_lost_states() const { return num_lost_states_; }
  const std::optional<membership::RendezvousRecord>& record() const { return record_; }
  /// The listener of an agent must not be called after the agent's end: it looks itself.
  void add_listener(int host, Listener listener) { listeners_.emplace_back(host, std::move(listener)); }

  void submit(int host, const membership::MemberProtocol::Command& command, const Listener& listener) {
    if (is_local_)
      return world_.at(world_.now(), [this, host, command, listener] { tell(host, run(command), listener); });
    if (is_cut_off(host)) return tell_nothing(host, listener, false);
    world_.at(world_.now() + delay(), [this, host, command, listener] {
      const bool is_rejected = command.is_swap && world_.now() < full_until_;
      if (!is_away(host) && !is_rejected) return tell(host, run(command), listener);
      // The request came, and its answer did not; or it did not come, or it comes when nobody waits for it
      // any more.
      if (is_rejected) {
      } else if (world_.chance(50)) {
        run(command);
      } else if (world_.chance(40)) {
        world_.at(world_.now() + world_.between(500, 4'000), [this, command] { run(command); });
      }
      tell_nothing(host, listener, is_rejected || world_.chance(50));
    });
  }

 private:
  milliseconds delay() { return world_.between(1, most_delay_ms_); }
  bool is_away(int host) { return world_.now() < std::max(away_until_, host_away_until_[host]); }

  // `reads`: the record is told as soon as the store answers again.
  void tell_nothing(int host, const Listener& listener, bool reads) {
    world_.on_host(host, world_.now() + milliseconds(1'000), [this, host, listener, reads] {
      listener({Answer::Type::kUnknown, 0, ""});
      if (reads) notify(host, listener);
    });
  }

  void tell(int host, const Answer& answer, const Listener& listener) {
    world_.on_host(host, world_.now() + (is_local_ ? milliseconds(0) : delay()),
                   [this, host, listener, answer] { listener(as_read(host, answer)); });
  }

  Answer as_read(int host, Answer answer) const {
    if (planted_ != Planted::kTwoContents || host != 1 || answer.text.empty()) return answer;
    membership::RendezvousRecord other = membership::parse_record(answer.text);
    other.generation.cause += ", as host 1 reads it";
    answer.text = membership::to_text(other);
    return answer;
  }

  Answer run(const membership::MemberProtocol::Command& command) {
    if (!command.is_swap) return {Answer::Type::kRecord, revision_, text_};
    if (planted_ != Planted::kBlindSwap && command.expected != revision_)
      return {Answer::Type::kConflict, revision_, text_};
    membership::RendezvousRecord next = membership::parse_record(command.text);
    if (planted_ == Planted::kNoHolders) hold_all(next);
    check(next);
    text_ = planted_ == Planted::kNoHolders ? membership::to_text(next) : command.text;
    world_.trace([&] { return "record " + std::to_string(revision_ + 1) + ": " + text_; });
    record_ = std::move(next);
    ++revision_;
    if (!is_local_) {
      for (const auto& [host, listener] : listeners_) notify(host, listener);
    }
    return {Answer::Type::kSwapped, revision_, text_};
  }

  static void hold_all(membership::RendezvousRecord& record) {
    record.holders.clear();
    for (const auto* const list : {&record.generation.members, &record.waiting, &record.spares}) {
      for (const membership::MemberInfo& agent : *list) record.holders.push_back(agent.id);
    }
    std::ranges::sort(record.holders);
    const auto repeated = std::ranges::unique(record.holders);
    record.holders.erase(repeated.begin(), repeated.end());
  }

  // Watches give the newest, at some time.
  void notify(int host, const Listener& listener) {
    if (is_cut_off(host)) return;
    const SimTime open = std::max({world_.now(), away_until_, host_away_until_[host]});
    world_.on_host(host, open + delay(), [this, host, listener = listener] {
      listener(as_read(host, {Answer::Type::kRecord, revision_, text_}));
    });
  }

  void check(const membership::RendezvousRecord& next) {
    const auto note = [&](const membership::MemberInfo& agent) {
      const auto [entry, is_new] = incarnations_.emplace(agent.id, agent.incarnation);
      if (!is_new && entry->second != agent.incarnation) world_.fail("an id is given to two agents");
      if (agent.id >= next.next_id) world_.fail("an id is above those that were given");
    };
    std::set<std::string> seen;
    for (const auto* const list : {&next.generation.members, &next.waiting, &next.spares}) {
      const bool is_over = list == &next.generation.members && next.state != membership::RunState::kRunning;
      for (const membership::MemberInfo& agent : *list) {
        note(agent);
        if (!is_over && !seen.insert(agent.incarnation).second)
          world_.fail("an agent is in the record twice");
      }
    }
    const auto size = static_cast<int>(next.generation.members.size());
    if (next.state == membership::RunState::kRunning && size > next.settings.max_nodes + 1) {
      world_.fail("a generation has more members than there may be");
    }
    if (!record_) return;
    const membership::RendezvousRecord& old = *record_;
    if (old.has_ended()) world_.fail("a record was written after the run's end");
    if (next.next_id < old.next_id) world_.fail("ids are given again");
    if (next.origin != old.origin) world_.fail("a run has become another one");
    const bool begins_to_form = next.state == membership::RunState::kForming && next.state != old.state;
    if (begins_to_form && next.holders.empty()) ++num_lost_states_;
    const std::uint64_t number = next.generation.number, before = old.generation.number;
    if (number != before && number != before + 1)
      world_.fail("the number of a generation is not the next one");
    if (number == before && !(next.generation == old.generation)) {
      world_.fail("one number of a generation has two contents");
    }
    if (next.generation.committed_steps < old.generation.committed_steps)
      world_.fail("committed steps are fewer");
    if (number == before) return;
    for (const membership::MemberInfo& member : next.generation.members) {
      const membership::MemberInfo* const before_it = old.find(member.incarnation);
      if (before_it != nullptr && before_it->id != member.id) world_.fail("a survivor has another id");
    }
  }

  SimulatedWorld& world_;
  const bool is_local_;
  const Planted planted_;
  int most_delay_ms_ = 4;
  SimTime away_until_, full_until_;
  std::map<int, SimTime> host_away_until_;
  std::set<int> cut_hosts_;
  std::uint64_t revision_ = 0, num_lost_states_ = 0;
  std::string text_;
  std::optional<membership::RendezvousRecord> record_;
  std::map<membership::MemberId, std::string> incarnations_;
  std::vector<std::pair<int, Listener>> listeners_;
};

}  // namespace cohort::test
