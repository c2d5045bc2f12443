// Each agent reports to the one that decides, five times in the time after which it would count as silent,
// and is answered. With a store that all reach, the one that decides is the first agent of the record, by id,
// that is heard; an agent that hears none before itself decides. So two may decide for a while, and the
// compare-and-swap of one of them fails.
//
// A member also pings its successor in the ring of members, and those after it until it hears one: it is the
// second observer of them. All listen to the one that decides. Whom an agent does not hear stands in its
// report.
//
// A record goes to all agents when a generation or the state of the run changes; else to whoever lacks such a
// change. So a generation takes a record to each agent and a report of each: O(n). Agents that join are
// collected for a fifth of a beat, as each change of the record costs time that grows with it.
#include "cohort/membership/internal/member_protocol.h"

#include <algorithm>
#include <iterator>
#include <string_view>
#include <utility>

#include "cohort/base/error.h"

namespace cohort::membership {
namespace {

using std::chrono::milliseconds;

// Without a sign of the endpoint for so many silences the run is over for an agent.
constexpr int kEndpointFactor = 20;

bool is_urgent(const Report& before, const Report& now) {
  return before.is_leaving != now.is_leaving || before.failure != now.failure ||
         before.is_state_lost != now.is_state_lost || before.lost_links != now.lost_links ||
         before.unheard != now.unheard || before.is_ready != now.is_ready || before.store != now.store ||
         before.stuck != now.stuck || before.ends_run != now.ends_run;
}

}  // namespace

MemberProtocol::MemberProtocol(ProtocolOptions options, Time now)
    : options_(std::move(options)),
      silence_(options_.settings.silence),
      beat_(std::max(milliseconds(1), silence_ / 5)),
      start_(now),
      asked_store_(now - std::chrono::hours(1)),
      endpoint_heard_(now),
      last_time_(now),
      next_beat_(now),
      heard_(silence_) {}

// A process that was stopped itself does not count that time as the silence of others, who get all of
// `silence` again. What takes many silences ends that much later: begun anew, it would not end on a host that
// is late now and then.
void MemberProtocol::note_time(Time now) {
  const Time::duration gap = now - std::exchange(last_time_, now);
  if (gap <= 3 * beat_) return;
  since_ = now;
  generation_since_ = std::max(generation_since_, now);
  heard_.on_gap(now);
  for (Time* const time : {&start_, &decides_since_, &state_since_, &endpoint_heard_}) *time += gap;
  if (blocked_since_) *blocked_since_ += gap;
  for (auto& [incarnation, agent] : views_) agent.last_heard += gap;
}

void MemberProtocol::fail(std::string why) {
  if (failure_.empty()) failure_ = std::move(why);
}

AgentMessage MemberProtocol::message_of(AgentMessage::Type type) const {
  AgentMessage message;
  message.type = type;
  message.incarnation = options_.incarnation;
  message.address = options_.address;
  message.revision = revision_;
  if (record_) message.origin = record_->origin;
  return message;
}

AgentMessage MemberProtocol::record_message() const {
  AgentMessage message = message_of(AgentMessage::Type::kRecord);
  message.text = text_;
  return message;
}

// Who may decide, the first first. Empty with an endpoint that is not in the record, as one whose ranks have
// ended.
std::vector<const MemberInfo*> MemberProtocol::candidates() const {
  std::vector<const MemberInfo*> agents;
  if (!record_) return agents;
  for (const auto* const list : {&record_->generation.members, &record_->waiting, &record_->spares}) {
    if (list == &record_->generation.members && record_->state == RunState::kForming) continue;
    const std::size_t begin = agents.size();
    for (const MemberInfo& agent : *list) {
      if (!is_embedded() || is_endpoint(agent.incarnation)) agents.push_back(&agent);
    }
    std::sort(agents.begin() + static_cast<std::ptrdiff_t>(begin), agents.end(),
              [](const MemberInfo* a, const MemberInfo* b) { return a->id < b->id; });
  }
  return agents;
}

// To whom this agent reports, whom it pings, and whether it decides.
void MemberProtocol::choose_targets(Time now) {
  std::set<std::string> targets;
  const auto listen_to = [&](const MemberInfo& agent) {
    targets.insert(agent.incarnation);
    heard_.listen_to(agent.incarnation, now);
  };
  const auto is_unheard = [&](const MemberInfo& agent) { return heard_.is_unheard(agent.incarnation, now); };
  report_targets_.clear();
  ping_targets_.clear();
  // A store that does not answer now and then changes nothing: else this agent would begin to decide anew
  // each time.
  const bool has_record = is_embedded() ? has_store() : has_read_ || record_.has_value();
  bool decides = has_record && failure_.empty();
  if (!has_record && is_embedded()) report_targets_.push_back(options_.endpoint);
  for (const MemberInfo* const agent : candidates()) {
    if (agent->incarnation == options_.incarnation) break;
    listen_to(*agent);
    if (!is_embedded()) report_targets_.push_back(agent->address);
    if (is_unheard(*agent)) continue;
    decides = false;
    break;
  }
  report_.unheard.clear();
  const MemberInfo* const member = self();
  if (member != nullptr && record_->state == RunState::kRunning) {
    const std::vector<MemberInfo>& members = record_->generation.members;
    const auto at = std::find(members.begin(), members.end(), *member);
    const auto position = static_cast<std::size_t>(at - members.begin());
    for (std::size_t i = 1; at != members.end() && i < members.size(); ++i) {
      const MemberInfo& next = members[(position + i) % members.size()];
      listen_to(next);
      ping_targets_.push_back(next.address);
      if (!is_unheard(next)) break;
    }
    for (const MemberInfo& agent : members) {
      if (targets.count(agent.incarnation) > 0 && is_unheard(agent)) report_.unheard.push_back(agent.id);
    }
  } else {
    for (const MemberInfo* const agent : candidates()) {
      if (targets.count(agent->incarnation) > 0 && is_unheard(*agent)) report_.unheard.push_back(agent->id);
    }
  }
  heard_.listen_only_to(targets);
  if (decides && !is_deciding_) {
    since_ = decides_since_ = now;
    generation_since_ = std::max(generation_since_, now);
    decide_at_ = now;
  }
  is_deciding_ = decides;
}

void MemberProtocol::send_report(Time now, Effects& effects) {
  if (!failure_.empty()) return;
  // One that decides reports to those before it too: they may be heard again.
  if (is_deciding_) decide_at_ = now;
  AgentMessage message = message_of(AgentMessage::Type::kReport);
  message.report = report_;
  message.report.known = record_ ? record_->generation.number : 0;
  if (!record_) message.settings = options_.settings;
  for (const std::string& address : report_targets_) effects.messages.emplace_back(address, message);
}

void MemberProtocol::beat(Time now, Effects& effects) {
  choose_targets(now);
  send_report(now, effects);
  for (const std::string& address : ping_targets_) {
    effects.messages.emplace_back(address, message_of(AgentMessage::Type::kPing));
  }
  // An answer of the store that does not come: it is asked what there is.
  const bool is_late = now - asked_store_ > kAloneFactor * silence_;
  if (has_store() && is_late && (!has_read_ || is_swapping_)) {
    is_swapping_ = false;
    asked_store_ = now;
    effects.commands.emplace_back();
  }
  std::erase_if(views_, [&](const auto& entry) {
    return record_ && !agents_.contains(entry.first) && entry.second.is_past(now, options_.settings);
  });
  heard_.forget(now,
                [&](const std::string& incarnation) { return !record_ || agents_.contains(incarnation); });
  check_reach(now);
  next_beat_ = now + beat_;
}

void MemberProtocol::check_reach(Time now) {
  if (!failure_.empty()) return;
  const auto& timeout = options_.settings.join_timeout;
  if (blocked_since_ && now - *blocked_since_ > timeout && !is_needed(next_record(now)))
    blocked_since_.reset();
  if (blocked_since_ && now - *blocked_since_ > timeout) {
    failure_ = base::concat("the store of the record has taken no other generation for ", timeout.count(),
                            " ms, and members of this one are gone");
  } else if (is_deciding_) {
    return;
  } else if (!record_ && now - start_ > timeout) {
    failure_ = base::concat(is_embedded() ? "no agent of the run answered within "
                                          : "the store of the record did not answer within ",
                            timeout.count(), " ms");
  } else if (is_embedded() && record_ && !record_->has_ended() &&
             now - endpoint_heard_ > kEndpointFactor * silence_) {
    failure_ = base::concat("the agent at the rendezvous endpoint ", options_.endpoint, " was silent for ",
                            (kEndpointFactor * silence_).count(), " ms, and it has the run's only record");
  }
}

void MemberProtocol::tick(Time now, Effects& effects) {
  note_time(now);
  if (!failure_.empty()) {  // others do without this agent
    next_beat_ = now + beat_;
    decide_at_ = Time::max();
    is_deciding_ = false;
    return;
  }
  if (now >= next_beat_) beat(now, effects);
  if (now >= decide_at_) {
    decide_at_ = Time::max();
    make_decision(now, effects);
  }
}

Time MemberProtocol::next_time() const {
  return std::min(next_beat_, decide_at_);
}

void MemberProtocol::make_decision(Time now, Effects& effects) {
  if (!is_deciding_) return;
  decide_at_ = now + beat_;
  if (is_swapping_ || (record_ && record_->has_ended())) return;
  const std::optional<RendezvousRecord> next = next_record(now);
  if (!is_needed(next)) {
    blocked_since_.reset();
  } else if (!blocked_since_) {
    blocked_since_ = now;  // also where the store has not answered since
  }
  if (!has_read_) {
    if (now - asked_store_ <= kAloneFactor * silence_) return;
    asked_store_ = now;
    effects.commands.emplace_back();
    return;
  }
  if (!next) return;
  is_swapping_ = true;
  asked_store_ = now;
  effects.commands.push_back({true, revision_, to_text(*next)});
}

std::optional<RendezvousRecord> MemberProtocol::next_record(Time now) {
  AgentView& own = views_[options_.incarnation];
  if (own.address.empty()) own.first_heard = start_;
  own.address = options_.address;
  own.note(report_, now);
  own.report.known = record_ ? record_->generation.number : 0;
  own.last_heard = now;
  const Observations seen{now,
                          options_.incarnation,
                          views_,
                          since_,
                          std::max(decides_since_, state_since_),
                          generation_since_,
                          decides_since_};
  RendezvousRecord record = record_ ? *record_ : first_record(options_.settings);
  if (!record_) record.origin = options_.incarnation;
  return decide(record, seen);
}

// Whether the run cannot continue without this record. If it cannot be written for long this agent fails:
// else its ranks would wait for members that are gone.
bool MemberProtocol::is_needed(const std::optional<RendezvousRecord>& next) const {
  if (!next || !record_ || record_->state != RunState::kRunning) return false;
  const bool is_other = next->generation.number != record_->generation.number;
  return is_other ? !next->generation.is_planned : next->state != RunState::kRunning;
}

void MemberProtocol::on_message(const AgentMessage& message, Time now, Effects& effects) {
  note_time(now);
  if (!failure_.empty()) return;
  using Type = AgentMessage::Type;
  heard_.on_message(message.incarnation, now);
  if (!record_ || is_endpoint(message.incarnation)) endpoint_heard_ = now;
  switch (message.type) {
    case Type::kReport:
      on_report(message, now, effects);
      break;
    case Type::kRecord:
      if (!has_only_record()) adopt(message.revision, message.text, now, effects);
      break;
    case Type::kPing:
      effects.messages.emplace_back(message.address, message_of(Type::kPong));
      break;
    case Type::kReject:
      // Of a store that all reach, an agent that rejects this one may be the one that is wrong.
      if (!record_ || is_embedded()) fail(message.text);
      break;
    case Type::kHeard:
    case Type::kPong:
      break;
  }
}

void MemberProtocol::on_report(const AgentMessage& message, Time now, Effects& effects) {
  AgentMessage answer = message_of(AgentMessage::Type::kHeard);
  const auto reject = [&](const std::string& why) {
    answer.type = AgentMessage::Type::kReject;
    answer.text = why;
    effects.messages.emplace_back(message.address, answer);
  };
  if (message.settings && (record_ || has_only_record())) {
    const std::string text = difference(*message.settings, record_ ? record_->settings : options_.settings);
    if (!text.empty()) return reject("the run has other settings: " + text);
  }
  if (!message.origin.empty() && message.origin != message_of(AgentMessage::Type::kHeard).origin) {
    // One that has no record yet cannot tell.
    record_ ? reject(base::concat("the agent at ", options_.address, " is of another run by now"))
            : static_cast<void>(effects.messages.emplace_back(message.address, answer));
    return;
  }
  AgentView& view = views_[message.incarnation];
  if (view.address.empty() || view.is_dead) view.first_heard = now;
  const bool is_new = record_ && !agents_.contains(message.incarnation);
  if (is_urgent(view.report, message.report) && !is_new) decide_at_ = now;
  const bool is_progress = view.report.recovered != message.report.recovered || message.report.is_finished;
  view.address = message.address;
  view.note(message.report, now);
  view.last_heard = now;
  view.is_dead = false;
  view.revision = message.revision;
  if (is_new || is_progress) decide_at_ = std::min(decide_at_, now + beat_ / 5);
  const bool lacks_news =
      message.revision < std::max({std::uint64_t{1}, news_revision_, view.place_revision});
  if (record_ && lacks_news) answer = record_message();
  effects.messages.emplace_back(message.address, answer);
}

void MemberProtocol::on_death(const std::string& incarnation, Time now, Effects& effects) {
  note_time(now);
  heard_.on_death(incarnation);
  const auto view = views_.find(incarnation);
  if (view != views_.end()) view->second.is_dead = true;
  if (is_embedded() && is_endpoint(incarnation) && !record_->has_ended()) {
    fail(base::concat("the agent at the rendezvous endpoint ", options_.endpoint,
                      " died, and it had the run's only record"));
  }
  if (!record_ || record_->find(incarnation) == nullptr) return;
  choose_targets(now);
  send_report(now, effects);
  decide_at_ = now;
}

// An agent that ends closes its port. After so long it is no host that is only just beginning to listen, or
// answers so for another reason.
void MemberProtocol::on_closed_port(const std::string& address, Time now, Effects& effects) {
  note_time(now);
  if (is_embedded() || !record_ || record_->has_ended()) return;
  for (const auto* const list : {&record_->generation.members, &record_->waiting, &record_->spares}) {
    for (const MemberInfo& agent : *list) {
      if (agent.address != address || heard_.is_dead(agent.incarnation)) continue;
      const Time since = heard_.on_closed_port(agent.incarnation, now);
      if (now - since <= kEndpointFactor * silence_) continue;
      views_[agent.incarnation].address = address;
      return on_death(agent.incarnation, now, effects);
    }
  }
}

void MemberProtocol::set_report(const Report& report, Time now, Effects& effects) {
  note_time(now);
  const std::vector<MemberId> unheard = report_.unheard;
  const Report before = std::exchange(report_, report);
  report_.unheard = unheard;
  // A rank that died may have no state any more, and its steps were committed all the same.
  report_.committed_steps = std::max(report_.committed_steps, before.committed_steps);
  const bool is_news = is_urgent(before, report_) || before.entered != report_.entered ||
                       before.recovered != report_.recovered || before.is_finished != report_.is_finished;
  if (is_news) send_report(now, effects);
}

void MemberProtocol::on_store(const StoreAnswer& answer, Time now, Effects& effects) {
  note_time(now);
  using Type = StoreAnswer::Type;
  if (answer.type == Type::kSwapped) {
    is_swapping_ = false;
    adopt(answer.revision, answer.text, now, effects);
    return;
  }
  if (answer.type == Type::kConflict) is_swapping_ = false;
  if (answer.type == Type::kUnknown) {
    // What is now in the store decides what is done next.
    is_swapping_ = false;
    has_read_ = false;
    asked_store_ = now;
    return;
  }
  const bool is_first = !std::exchange(has_read_, true);
  adopt(answer.revision, answer.text, now, effects);
  choose_targets(now);
  // Two agents that decide differently must not keep the store busy.
  if (is_deciding_ && !is_first) decide_at_ = now + beat_;
}

// Who is dropped waits: one that hears half of what it is told would come and be dropped again and again.
// Each step needs all members. So a member that had the state has, at its drop, the newest step or the one
// before.
void MemberProtocol::note_drops(const RendezvousRecord& next, Time now) {
  if (!record_ || record_->state != RunState::kRunning) return;
  std::uint64_t steps = std::max(next.generation.committed_steps, report_.committed_steps);
  for (const auto& [incarnation, agent] : views_) steps = std::max(steps, agent.most_steps);
  for (const MemberInfo& member : record_->generation.members) {
    if (next.find(member.incarnation) != nullptr) continue;
    const bool had_state = std::ranges::count(record_->holders, member.id) > 0;
    AgentView& view = views_[member.incarnation];
    view.is_dead = view.is_dead || heard_.is_dead(member.incarnation);
    view.note_drop(now, kAloneFactor * silence_, had_state ? steps : 0);
  }
}

// Who begins to wait, or to be a spare, or ends it, is to know. Others hear of their place with a generation.
void MemberProtocol::note_places(const RendezvousRecord& next, std::uint64_t revision) {
  if (!is_deciding_) return;
  const auto places_of = [](const RendezvousRecord& record) {
    std::set<std::pair<std::string_view, bool>> places;  // and whether it is a spare
    for (const MemberInfo& agent : record.waiting) places.emplace(agent.incarnation, false);
    for (const MemberInfo& agent : record.spares) places.emplace(agent.incarnation, true);
    return places;
  };
  const RendezvousRecord none;
  const auto before = places_of(record_ ? *record_ : none), after = places_of(next);
  std::vector<std::pair<std::string_view, bool>> changed;
  std::ranges::set_symmetric_difference(before, after, std::back_inserter(changed));
  for (const auto& place : changed) {
    const auto view = views_.find(std::string(place.first));
    if (view != views_.end()) view->second.place_revision = revision;
  }
}

void MemberProtocol::adopt(std::uint64_t revision, const std::string& text, Time now, Effects& effects) {
  if (revision <= revision_ || !failure_.empty()) return;
  RendezvousRecord next = parse_record(text);
  if (!record_ && !is_embedded() && next.has_ended()) {
    begin_after(next, revision);
    choose_targets(now);
    return;
  }
  if (record_ && next.origin != record_->origin) return fail("the record is of another run by now");
  if (!record_) {
    const std::string other = difference(options_.settings, next.settings);
    if (!other.empty()) return fail("the run has other settings: " + other);
  }
  note_drops(next, now);
  note_places(next, revision);
  blocked_since_.reset();
  const bool is_generation = !record_ || record_->generation.number != next.generation.number;
  const bool is_state = !record_ || record_->state != next.state;
  if (is_generation) generation_since_ = now;
  if (is_state) state_since_ = now;
  if (is_generation || is_state) news_revision_ = revision;
  if (is_deciding_ && (is_generation || is_state)) {
    // Also to those that are dropped.
    std::set<std::string> addresses;
    const auto add = [&](const RendezvousRecord& record) {
      for (const auto* const list : {&record.generation.members, &record.waiting, &record.spares}) {
        for (const MemberInfo& agent : *list) addresses.insert(agent.address);
      }
    };
    add(next);
    if (record_) add(*record_);
    addresses.erase(options_.address);
    AgentMessage message = message_of(AgentMessage::Type::kRecord);
    message.revision = revision;
    message.text = text;
    for (const std::string& address : addresses) effects.messages.emplace_back(address, message);
  }
  record_ = std::move(next);
  agents_.clear();
  for (const auto* const list : {&record_->generation.members, &record_->waiting, &record_->spares}) {
    if (list == &record_->generation.members && record_->state == RunState::kForming) continue;
    for (const MemberInfo& agent : *list) agents_.insert(agent.incarnation);
  }
  text_ = text;
  revision_ = revision;
  has_read_ = true;
  effects.is_changed = true;
  choose_targets(now);
  if (is_deciding_) decide_at_ = now + beat_ / 5;
}

// The record of a run that has ended stays in the store for a while. An agent that has never known that run
// has no part in it: its first swap is against that record. After a run that has succeeded there is nothing
// to do, and to do it again must be meant.
void MemberProtocol::begin_after(const RendezvousRecord& ended, std::uint64_t revision) {
  if (ended.state == RunState::kSucceeded) {
    return fail(base::concat("run ", ended.settings.run_id,
                             " has succeeded already, and its record stays for a minute"));
  }
  revision_ = revision;
  has_read_ = true;
}

bool MemberProtocol::do_all_know(Time now) const {
  if (!record_ || !record_->has_ended()) return false;
  return std::all_of(views_.begin(), views_.end(), [&](const auto& entry) {
    const auto& [incarnation, view] = entry;
    if (incarnation == options_.incarnation || view.is_dead ||
        now - view.last_heard > kAloneFactor * silence_)
      return true;
    return view.revision >= news_revision_;
  });
}

}  // namespace cohort::membership
