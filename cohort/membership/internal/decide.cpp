// The rules, in the order in which they are asked:
//   agents that wait and are gone, or that leave, are removed; agents that ask to join get an id and wait;
//   while fewer than min_nodes agents are there: a first generation as soon as there are enough, an end after
//     join_timeout;
//   else an end where all members have finished, or ranks have failed too often;
//   else another generation where a member is gone or leaves, a rank has failed or a link is lost, or an
//     agent can enter.
//
// Note [Who is gone]: a member whose process has ended; or that was silent for `silence` as two agents see
// it, the one that decides and another member. Where no other member is heard there is no second observer to
// ask. The one that decides needs nobody after kAloneFactor times as long: such a member does not get records
// either, so the run would wait for it. The same holds for a member that is heard, and does not hear of
// generations. Fewer than half of the members give up the rest only after that longer time, so that the
// larger part of a network that is cut is the first to decide.
//
// Note [Fresh stores]: ranks of a program that is not elastic leave keys in the store of their generation,
// and start again in the next one. So that one gets another store. An agent offers a fresh one as soon as it
// hears that its last one is used. The next generation waits for such an offer if nobody else has one: for
// kAloneFactor times `silence` at most.
//
// Note [Who waits for a copy]: a generation that ends while a state is copied ends the copy, which begins
// anew. So an agent that could enter waits until all ranks of an elastic program have the state. Else nodes
// that come and go would keep a long copy from its end. Whatever else ends the generation lets them in at
// once.
//
// Note [Stuck ranks]: an agent says itself that one of its ranks does not enter a generation, after a time of
// its own, and which one. It is a member no longer, and waits until the rank gets on. A state that only its
// ranks have is lost: to give it they would have to enter together. An agent whose ranks fail again and again
// (Report::ends_run) is no member either, and leaves. The run ends where nobody is left that can continue it:
// only here is it seen that all members fail at the same time. So with a store that all reach others are
// waited for, which may be about to say the same: for kAloneFactor times `silence`.
#include "cohort/membership/internal/decide.h"

#include <algorithm>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/process.h"
#include "cohort/base/text/format_list.h"
#include "cohort/membership/internal/lost_links.h"
#include "cohort/membership/internal/lost_state.h"
#include "cohort/membership/internal/seen_members.h"

namespace cohort::membership {
namespace {

using base::concat;

std::string name_of(const MemberInfo& member) {
  return concat("agent ", member.id, " at ", member.address);
}

class Decider : private SeenMembers {
 public:
  Decider(const RendezvousRecord& record, const Observations& seen)
      : SeenMembers(record, seen), old_(record), next_(record), seen_(seen) {}

  std::optional<RendezvousRecord> run() {
    if (old_.has_ended()) return std::nullopt;
    remove_gone(next_.waiting);
    remove_gone(next_.spares);
    add_joins();
    const AgentView* const self = seen_.find(seen_.self);
    if (old_.settings.is_embedded && self != nullptr && self->report.is_leaving) {
      end(RunState::kFailed, concat("the agent at the rendezvous endpoint ", self->address,
                                    " leaves, and it has the run's only record"));
    } else if (old_.state == RunState::kForming) {
      form();
    } else if (!has_end()) {
      change();
    }
    if (next_ == old_) return std::nullopt;
    return std::move(next_);
  }

 private:
  // Agents that wait have no other observer: nobody else listens to them.
  void remove_gone(std::vector<MemberInfo>& members) const {
    std::erase_if(members, [&](const MemberInfo& member) {
      return is_dead(member) ||
             (!is_holder(member) && (is_leaving(member) || is_silent(member, kAloneFactor)));
    });
  }

  bool is_holder(const MemberInfo& member) const { return is_in(old_.holders, member.id); }
  bool end_without_state(const std::string& cause) {
    return end(RunState::kFailed,
               concat(cause, "; no agent is left that had the state of generation ", old_.generation.number,
                      ", so the run can be resumed from its last checkpoint"));
  }
  // lost_state.cpp, Note [Lost states]
  bool form_without_state(const std::string& cause) {
    if (!may_state_come_back(old_, seen_)) return false;
    next_.holders.clear();
    next_.awaited = awaited_agents(old_, seen_);
    std::vector<MemberInfo> members = old_.generation.members;
    std::erase_if(members, [&](const MemberInfo& member) { return is_out(member); });
    begin_to_form(members, cause);
    return true;
  }
  void begin_to_form(const std::vector<MemberInfo>& members, const std::string& cause) {
    next_.waiting.insert(next_.waiting.end(), members.begin(), members.end());
    next_.waiting.insert(next_.waiting.end(), next_.spares.begin(), next_.spares.end());
    next_.spares.clear();
    std::ranges::sort(next_.waiting, {}, &MemberInfo::id);
    next_.state = RunState::kForming;
    next_.end_cause = cause;
    next_.exit_status = failure_status_;
  }
  void add_joins() {
    const MemberInfo* const self = old_.find(seen_.self);
    std::set<std::string_view> known;
    for (const auto* const list : {&old_.generation.members, &old_.waiting, &old_.spares}) {
      if (list == &old_.generation.members && old_.state == RunState::kForming) continue;
      for (const MemberInfo& member : *list) known.insert(member.incarnation);
    }
    std::vector<std::pair<Time, std::string>> joins;
    for (const auto& [incarnation, agent] : seen_.agents) {
      const bool is_silent =
          incarnation != seen_.self && seen_.now - agent.last_heard > old_.settings.silence;
      const bool hears = self == nullptr || !is_in(agent.report.unheard, self->id);
      const bool has_reported = !agent.address.empty();
      if (!has_reported || agent.is_dead || agent.report.is_leaving || is_silent || !hears) continue;
      if (agent.report.is_finished && !is_elastic()) continue;
      if (seen_.now < agent.may_join || known.contains(incarnation)) continue;
      joins.emplace_back(agent.first_heard, incarnation);
    }
    std::sort(joins.begin(), joins.end());
    for (const auto& [time, incarnation] : joins) {
      const AgentView& agent = seen_.agents.at(incarnation);
      next_.waiting.push_back({next_.next_id++, incarnation, agent.address, agent.report.num_processes});
    }
  }

  void form() {
    // Those that were spares are as good as any now.
    next_.waiting.insert(next_.waiting.end(), next_.spares.begin(), next_.spares.end());
    next_.spares.clear();
    std::ranges::sort(next_.waiting, {}, &MemberInfo::id);
    const RunSettings& settings = old_.settings;
    const auto least = static_cast<std::size_t>(settings.min_nodes);
    note_holders(old_, seen_, next_);
    note_returned_holders(old_, seen_, next_);
    keep_holders(next_.holders, next_.waiting);
    let_leavers_go(old_, seen_, next_);
    std::vector<MemberInfo> available;
    std::vector<Time> arrivals;
    const auto is_available = [&](const MemberInfo& member) {
      const AgentView* const agent = view(member);
      return !is_silent(member, 1) && (agent == nullptr || agent->report.is_ready);
    };
    for (const MemberInfo& member : next_.waiting) {
      if (!is_available(member)) continue;
      const AgentView* const agent = view(member);
      available.push_back(member);
      arrivals.push_back(agent == nullptr ? seen_.since : agent->first_heard);
    }
    bool has_state = may_make_steps(old_, seen_, next_.holders, available);
    std::vector<MemberId> claimants;
    if (!has_state && next_.holders.empty()) {
      if (!may_state_come_back(old_, seen_)) {
        end_without_state(old_.end_cause);
        return;
      }
      next_.awaited = awaited_agents(old_, seen_);
      claimants = may_have_state(old_, seen_, available);
      has_state = !claimants.empty();
    }
    if (arrivals.size() < least || !has_state) {
      if (seen_.now - seen_.state_since <= settings.join_timeout) return;
      end(RunState::kFailed,
          concat("only ", arrivals.size(), " of at least ", least, " agents were there for ",
                 settings.join_timeout.count(), " ms", has_state ? "" : ", and none that had the state",
                 old_.end_cause.empty() ? "" : "; ", old_.end_cause));
      return;
    }
    std::sort(arrivals.begin(), arrivals.end());
    const bool is_full = arrivals.size() >= static_cast<std::size_t>(settings.max_nodes);
    if (!is_full && seen_.now < arrivals[least - 1] + settings.last_call_timeout) return;
    std::vector<MemberInfo> members;
    next_.holders.insert(next_.holders.end(), claimants.begin(), claimants.end());
    // Those that have the state first, as there may be more agents than places.
    take_places(members, next_.waiting, [&](const MemberInfo& member) {
      return is_in(next_.holders, member.id) && is_available(member);
    });
    take_places(members, next_.waiting, is_available);
    make_generation(std::move(members), false,
                    old_.generation.number == 0 ? "the run begins" : "enough agents are there again");
  }

  bool has_end() {
    const std::vector<MemberInfo>& members = old_.generation.members;
    if (std::all_of(members.begin(), members.end(),
                    [&](const MemberInfo& member) { return is_finished(member); })) {
      return end_finished();
    }
    for (const MemberInfo& member : members) {
      const Report* const report = report_of_generation(member);
      if (report == nullptr) continue;
      if (report->is_state_lost) {
        const std::string lost =
            concat("no process has the state of step ", old_.generation.committed_steps, " any more");
        return form_without_state(lost) ||
               end(RunState::kFailed, lost + "; the run can be resumed from its last checkpoint");
      }
      if (is_hopeless(member)) {
        failure_status_ = report->exit_status;
        if (old_.settings.is_embedded && is_self(member)) return end_with(*report, hopeless_text(member));
      } else if (!report->failure.empty() && failure_.empty()) {
        failure_ = concat(name_of(member), ": ", report->failure);
        failure_status_ = report->exit_status;
        if (old_.restarts_used >= old_.settings.max_restarts) {
          return end_with(*report, concat(failure_, " (", old_.restarts_used, " restarts used of ",
                                          old_.settings.max_restarts, ")"));
        }
        next_.restarts_used = old_.restarts_used + 1;
      }
    }
    return false;
  }
  bool end_finished() {
    int signal = 0;
    for (const MemberInfo& member : old_.generation.members) {
      const AgentView* const agent = view(member);
      if (agent != nullptr) signal = std::max(signal, agent->report.stop_signal);
    }
    if (signal == 0) return end(RunState::kSucceeded, "all ranks have ended");
    next_.exit_status = 128 + signal;
    return end(RunState::kStopped, concat(base::describe_signal(signal), " has stopped the run"));
  }
  std::string hopeless_text(const MemberInfo& member) const {
    return concat(name_of(member), ": ", hopeless_report(member)->failure,
                  " (failed again and again, and no step was made between)");
  }
  bool end_with(const Report& report, std::string cause) {
    next_.restarts_used = old_.restarts_used;
    next_.exit_status = report.exit_status;
    return end(RunState::kFailed, std::move(cause));
  }

  void change() {
    note_holders(old_, seen_, next_);
    const std::vector<MemberInfo>& members = old_.generation.members;
    std::vector<MemberInfo> survivors, givers;
    base::TextList causes("; ");
    if (!failure_.empty()) causes.add(failure_);
    bool is_planned = failure_.empty();
    std::size_t num_finished = 0;
    std::vector<std::string> hopeless;
    bool may_others_follow = true;
    const std::set<MemberId> gone = gone_members();
    const std::optional<LostLink> lost = find_lost_link(old_, seen_, gone, newest_steps(old_, seen_));
    MemberId dropped = 0;
    if (lost) {
      is_planned = false;
      causes.add("ranks of ", name_of(*lost->first), " lost their link",
                 lost->is_within() ? "" : concat(" to ", name_of(*lost->second)));
      if (lost->is_repeated && !lost->is_within()) dropped = member_to_drop(old_, seen_, *lost);
    }
    for (const MemberInfo& member : members) {
      if (is_finished(member) && !is_elastic()) {
        ++num_finished;  // its ranks are gone, so it enters no other generation, and its agent may go too
        if (report_of_generation(member) == nullptr) causes.add(name_of(member), " had finished before");
      } else if (gone.count(member.id) > 0) {
        is_planned = false;
        causes.add(name_of(member), is_dead(member) ? " died" : " is silent");
        // Whoever decided before has heard a member that died now.
        const Time heard = is_dead(member)
                               ? std::max(view(member)->last_heard, seen_.since - old_.settings.silence)
                               : last_heard(member);
        const Time::duration unheard = seen_.now - heard;
        detect_ms_ = std::max(detect_ms_, std::chrono::ceil<std::chrono::milliseconds>(unheard).count());
      } else if (!stuck_rank(member).empty()) {
        is_planned = false;
        causes.add(name_of(member), " is given up: ", stuck_rank(member));
      } else if (is_hopeless(member)) {
        hopeless.push_back(hopeless_text(member));
        const Time::duration since = seen_.now - view(member)->hopeless_at;
        may_others_follow = may_others_follow && since <= kAloneFactor * old_.settings.silence;
      } else if (member.id == dropped) {
        causes.add(name_of(member), " is dropped");
      } else if (is_leaving(member)) {
        causes.add(name_of(member), " leaves");
        if (may_give_state(member)) givers.push_back(member);
      } else {
        survivors.push_back(member);
      }
    }
    if (!hopeless.empty()) {
      // With an embedded record the agent that has it ends the run where its own ranks fail so, sooner or
      // later.
      const bool may_wait = !old_.settings.is_embedded && may_others_follow && failure_.empty();
      const bool is_alone =
          survivors.size() + hopeless.size() == members.size();  // nothing else has happened
      if (may_wait && is_alone && !survivors.empty()) return keep_spares();
      is_planned = false;
      for (const std::string& text : hopeless) causes.add(text);
    }
    const std::size_t num_survivors = survivors.size();
    const bool is_ending = std::any_of(members.begin(), members.end(),
                                       [&](const MemberInfo& member) { return is_finished(member); });
    // Note [Who waits for a copy]
    if (!is_ending && (!causes.empty() || has_recovered(survivors))) add_entrants(survivors, causes);
    if (causes.empty()) return keep_spares();
    const std::string& cause = causes.text();
    // Beside one that leaves with the state a survivor must have it by now.
    const bool has_state = givers.empty() ? may_make_steps(old_, seen_, next_.holders, survivors)
                                          : std::ranges::any_of(survivors, [&](const MemberInfo& member) {
                                              return has_state_now(old_, seen_, next_.holders, member);
                                            });
    if (!has_state) {
      // Those that are members get the state in this generation, if it continues.
      const bool is_copied = is_planned && num_survivors > 0;
      if (survivors.empty() || givers.empty() || is_copied) return wait_for_state(cause);
      add_givers(survivors, givers);
    }
    next_.was_link_lost = lost.has_value() && dropped == 0;
    if (survivors.empty() && num_finished > 0) {
      end(RunState::kFailed, concat(cause, ", after other agents had finished"));
      return;
    }
    // Where all have made the last step nobody is missing: no step is made any more.
    const bool has_all_steps =
        is_elastic() && !survivors.empty() &&
        std::ranges::all_of(survivors, [&](const MemberInfo& member) { return is_finished(member); });
    const bool is_enough =
        survivors.size() + num_finished >= static_cast<std::size_t>(old_.settings.min_nodes);
    if (!is_enough && !has_all_steps) {
      // Nobody may take the place of a member that gives up. One that is silent may come back.
      std::size_t num_others = next_.waiting.size() + next_.spares.size() + survivors.size() - num_survivors;
      for (const MemberInfo& member : members) num_others += is_out(member) ? 0U : 1U;
      const auto given_up =
          std::ranges::find_if(members, [&](const MemberInfo& member) { return is_hopeless(member); });
      if (given_up != members.end() && num_others < static_cast<std::size_t>(old_.settings.min_nodes)) {
        end_with(*hopeless_report(*given_up), hopeless_text(*given_up));
        return;
      }
      begin_to_form(survivors, cause);
      return;
    }
    make_generation(std::move(survivors), is_planned && (num_survivors > 0 || !has_state), cause);
  }

  // A rank that has failed gets no successor where its node leaves.
  bool may_give_state(const MemberInfo& member) const {
    return is_elastic() && is_in(next_.holders, member.id) && view(member)->report.failure.empty();
  }
  // As many as there are places for, and one in any case.
  void add_givers(std::vector<MemberInfo>& members, const std::vector<MemberInfo>& givers) const {
    const auto num_places = static_cast<std::size_t>(old_.settings.max_nodes);
    for (const MemberInfo& giver : givers) {
      if (&giver == &givers.front() || members.size() < num_places) members.push_back(giver);
    }
  }

  // lost_state.cpp, Note [Who has the state]. What else has changed is decided later.
  void wait_for_state(const std::string& cause) {
    next_ = old_;
    const std::vector<MemberInfo>& members = old_.generation.members;
    const auto is_lost = [&](const MemberInfo& member) { return !is_holder(member) || !can_enter(member); };
    const auto may_another_enter = [&](const std::vector<MemberInfo>& agents) {
      return std::ranges::any_of(
          agents, [&](const MemberInfo& agent) { return can_enter(agent) && !is_leaving(agent); });
    };
    const bool do_all_die = std::ranges::all_of(members, [&](const auto& member) { return is_dead(member); });
    const bool do_all_leave =
        !do_all_die && std::ranges::all_of(members, [&](const auto& member) { return is_out(member); });
    if (do_all_leave && !may_another_enter(old_.waiting) && !may_another_enter(old_.spares)) {
      const bool is_any_hopeless =
          std::ranges::any_of(members, [&](const auto& member) { return is_hopeless(member); });
      next_.exit_status = failure_status_;
      end(RunState::kFailed, concat(is_any_hopeless ? "no member can continue" : "all members leave",
                                    ", so the run can be resumed from its last checkpoint: ", cause));
      return;
    }
    for (const MemberInfo& member : members) {
      if (is_lost(member)) continue;
      const AgentView* const agent = view(member);
      const Time heard =
          agent == nullptr ? seen_.decides_since : std::max(agent->last_heard, seen_.decides_since);
      // One that does not hear of the generation may be heard for ever.
      const bool is_deaf = agent != nullptr && agent->report.known < old_.generation.number;
      if (seen_.now - (is_deaf ? seen_.generation_since : heard) <= old_.settings.join_timeout) return;
    }
    if (std::ranges::all_of(members, is_lost) && form_without_state(cause)) return;
    next_.exit_status = failure_status_;
    end_without_state(cause);
  }

  bool has_recovered(const std::vector<MemberInfo>& members) const {
    return !is_elastic() || std::ranges::all_of(members, [&](const MemberInfo& member) {
      const Report* const report = report_of_generation(member);
      return report != nullptr && report->recovered == old_.generation.number;
    });
  }

  void add_entrants(std::vector<MemberInfo>& survivors, base::TextList& causes) {
    const std::size_t before = survivors.size();
    const auto last_call =
        before == 0 ? Time::duration::zero() : Time::duration(old_.settings.last_call_timeout);
    const auto is_ready = [&](const MemberInfo& member) {
      const AgentView* const agent = view(member);
      return agent != nullptr && agent->report.is_ready && !is_silent(member, 1) &&
             seen_.now >= agent->first_heard + last_call;
    };
    take_places(survivors, next_.spares, is_ready);
    take_places(survivors, next_.waiting, is_ready);
    for (std::size_t i = before; i < survivors.size(); ++i) causes.add(name_of(survivors[i]), " joins");
  }

  // Moves agents to `members` while there are places.
  template <typename Condition>
  void take_places(std::vector<MemberInfo>& members, std::vector<MemberInfo>& from,
                   const Condition& may_enter) const {
    std::erase_if(from, [&](const MemberInfo& member) {
      if (members.size() >= static_cast<std::size_t>(old_.settings.max_nodes) || !may_enter(member))
        return false;
      members.push_back(member);
      return true;
    });
  }

  // Who waits while all places are taken becomes a spare, as far as spares are wanted.
  void keep_spares() {
    const auto num_spares = static_cast<std::size_t>(old_.settings.num_spares);
    const auto num_places = static_cast<std::size_t>(old_.settings.max_nodes);
    if (next_.generation.members.size() < num_places) return;
    while (next_.spares.size() < num_spares && !next_.waiting.empty()) {
      next_.spares.push_back(next_.waiting.front());
      next_.waiting.erase(next_.waiting.begin());
    }
    std::ranges::sort(next_.spares, {}, &MemberInfo::id);
  }

  // Note [Fresh stores]
  bool is_used(const std::string& store) const {
    return !is_elastic() && !store.empty() && store == old_.generation.store;
  }
  std::string store_of(const std::vector<MemberInfo>& members) const {
    std::string chosen;
    for (const MemberInfo& member : members) {
      const AgentView* const agent = view(member);
      if (agent == nullptr || agent->report.store.empty()) continue;
      if (chosen.empty() || is_used(chosen)) chosen = agent->report.store;
    }
    return chosen;
  }

  void make_generation(std::vector<MemberInfo> members, bool is_planned, std::string cause) {
    std::ranges::sort(members, {}, &MemberInfo::id);
    Generation generation;
    generation.number = old_.generation.number + 1;
    generation.is_planned = is_planned;
    generation.virtual_ranks = old_.settings.virtual_ranks;
    generation.committed_steps = newest_steps(old_, seen_);
    generation.store = store_of(members);
    if (is_used(generation.store) &&
        seen_.now - seen_.generation_since <= kAloneFactor * old_.settings.silence) {
      next_ = old_;
      return;
    }
    if (generation.number == 1) {
      for (const MemberInfo& member : members) next_.holders.push_back(member.id);
    } else {
      keep_holders(next_.holders, members);
    }
    generation.members = std::move(members);
    generation.cause = std::move(cause);
    generation.detect_ms = static_cast<std::uint64_t>(std::max<std::int64_t>(0, detect_ms_));
    next_.generation = std::move(generation);
    next_.state = RunState::kRunning;
    next_.end_cause.clear();
    next_.exit_status = 0;
    keep_spares();
  }

  bool end(RunState state, std::string cause) {
    next_.state = state;
    next_.end_cause = std::move(cause);
    return true;
  }

  const RendezvousRecord& old_;
  RendezvousRecord next_;
  const Observations& seen_;
  std::string failure_;         // of ranks, which counts as a restart
  int failure_status_ = 0;      // of the last rank that has failed
  std::int64_t detect_ms_ = 0;  // Generation::detect_ms
};

}  // namespace

std::optional<RendezvousRecord> decide(const RendezvousRecord& record, const Observations& seen) {
  return Decider(record, seen).run();
}

RendezvousRecord first_record(const RunSettings& settings) {
  RendezvousRecord record;
  record.settings = settings;
  return record;
}

}  // namespace cohort::membership
