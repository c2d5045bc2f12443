// A worker that joins asks all with lower ids, and is ready once they have accepted it. They list it then. Of
// two that join under one name the lower id has it: the other one asks that one too, and is rejected before
// it is ready.
//
// Some may hear a worker that others have given up, or that this one cannot reach: it is there. A worker that
// has accepted this one says whom it hears, so it is decided once all have been asked who is gone.
//
// A worker that leaves tells the others. Each then makes no further call to it, and answers with the number
// of calls that it has made. So the worker that leaves knows which calls are still to come. It asks again, as
// a call that was counted may turn out not to be sent.
#include "cohort/rpc/internal/agent/member_protocol.h"

#include <algorithm>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/rpc/function.h"

namespace cohort::rpc {
namespace {

using MemberType = MemberMessageType;

MemberMessage message_of_type(MemberType type) {
  MemberMessage message;
  message.type = type;
  return message;
}

}  // namespace

void MemberProtocol::begin(KnownWorker self, std::string ticket) {
  self_ = self.info.id;
  ticket_ = std::move(ticket);
  shutdown_.add_worker(self_);
  workers_.begin_dynamic(std::move(self));
}

MemberProtocol::Messages MemberProtocol::claim_id() {
  Messages answers;
  is_claimed_ = true;
  for (const auto& [peer, message] : std::exchange(early_, {})) on_join(peer, message, answers);
  return answers;
}

MemberProtocol::Messages MemberProtocol::ask(const KnownWorker& worker, const std::string& ticket) {
  answers_.erase(worker.peer.get());
  asked_[worker.peer.get()] = worker;
  shutdown_.add_worker(worker.info.id);
  MemberMessage question = message_of_type(MemberType::kJoin);
  question.id = self_;
  question.ticket = ticket;
  question.functions = workers_.worker_of(self_).signatures;
  return {{worker.peer, std::move(question)}};
}

const MemberMessage* MemberProtocol::answer_of(const Peer& peer) const {
  const auto found = answers_.find(peer.get());
  return found == answers_.end() ? nullptr : &found->second;
}

std::optional<std::int32_t> MemberProtocol::take_heard() {
  const auto found = std::find_if(skipped_.begin(), skipped_.end(),
                                  [this](std::int32_t id) { return told_live_.count(id) > 0; });
  if (found == skipped_.end()) return std::nullopt;
  return skipped_.extract(found).value();
}

std::optional<std::int32_t> MemberProtocol::find_unreached() const {
  for (const auto& [id, runs] : unreached_) {
    if (runs || told_live_.count(id) > 0) return id;
  }
  return std::nullopt;
}

void MemberProtocol::add_gone(std::int32_t id, const std::string& name, const std::string& why) {
  workers_.add_gone(id, name, why);
  shutdown_.add_worker(id);
}

MemberProtocol::Messages MemberProtocol::become_ready() {
  is_ready_ = true;  // who joins from now on is told so as it is accepted
  workers_.set_ready(self_);
  asked_.clear();
  answers_.clear();
  return to_all(MemberType::kReady);
}

MemberProtocol::Messages MemberProtocol::begin_leaving() {
  is_leaving_ = true;
  seen_.clear();
  return to_all(MemberType::kLeaving);
}

MemberProtocol::Messages MemberProtocol::stay() {
  is_leaving_ = false;
  return to_all(MemberType::kStaying);
}

bool MemberProtocol::may_leave() const {
  const std::vector<const KnownWorker*> live = workers_.live_others();
  return std::all_of(live.begin(), live.end(), [this](const KnownWorker* worker) {
    const auto seen = seen_.find(worker->info.id);
    const auto place = static_cast<std::size_t>(worker->info.id);
    return seen != seen_.end() && seen->second == shutdown_.counts().received[place];
  });
}

std::vector<std::string> MemberProtocol::describe_missing() const {
  std::vector<std::string> missing;
  for (const KnownWorker* const worker : workers_.live_others()) {
    const auto seen = seen_.find(worker->info.id);
    const auto place = static_cast<std::size_t>(worker->info.id);
    if (seen == seen_.end()) {
      missing.push_back(worker->info.name + ", which has not heard that this worker leaves");
    } else if (seen->second != shutdown_.counts().received[place]) {
      missing.push_back("a call of " + worker->info.name + " that has not come");
    }
  }
  return missing;
}

MemberProtocol::Messages MemberProtocol::on_message(const Peer& peer, MemberMessage message) {
  Messages answers;
  if (message.type == MemberType::kJoin) {
    if (!is_claimed_) {
      early_.emplace_back(peer, std::move(message));
    } else {
      on_join(peer, message, answers);
    }
    return answers;
  }
  if (message.type == MemberType::kAccepted || message.type == MemberType::kRejected) {
    on_answer(peer, std::move(message));
    return answers;
  }
  const KnownWorker* const worker = workers_.find_by_peer(peer);
  if (worker == nullptr) return answers;
  const std::int32_t id = worker->info.id;
  MemberMessage seen = message_of_type(MemberType::kLeavingSeen);
  switch (message.type) {
    case MemberType::kReady:
      workers_.set_ready(id);
      answers.emplace_back(peer, message_of_type(MemberType::kKnown));
      return answers;
    case MemberType::kKnown:
      known_by_.insert(peer.get());
      return answers;
    case MemberType::kLeaving:
      workers_.set_leaving(id, true);
      seen.num_calls = shutdown_.counts().sent[static_cast<std::size_t>(id)];
      answers.emplace_back(peer, std::move(seen));
      return answers;
    case MemberType::kStaying:
      workers_.set_leaving(id, false);
      return answers;
    case MemberType::kLeavingSeen:
      seen_[id] = message.num_calls;
      return answers;
    default:
      throw CommError("rpc.receive", "a message about joins is of an unknown kind",
                      "the same program on all workers");
  }
}

void MemberProtocol::on_join(const Peer& peer, const MemberMessage& message, Messages& answers) {
  MemberMessage answer = message_of_type(MemberType::kRejected);
  if (message.ticket == ticket_ && message.id > self_ && !workers_.is_known(message.id)) {
    if (const auto holder = workers_.holder_of(peer->name(), message.id)) {
      answer.id = *holder;
      answer.why = base::concat("'", peer->name(), "' is the name of worker ", *holder);
    } else {
      KnownWorker worker;
      worker.info = {peer->name(), message.id};
      worker.incarnation = peer->incarnation();
      worker.signatures = message.functions;
      worker.peer = peer;
      worker.is_ready = false;
      for (const KnownWorker* const live : workers_.live_others()) answer.live.push_back(live->info.id);
      workers_.add(std::move(worker));
      shutdown_.add_worker(message.id);
      answer.type = MemberType::kAccepted;
      answer.gone = workers_.gone_ids();
      answer.is_ready = is_ready_;
    }
  }
  const bool is_accepted = answer.type == MemberType::kAccepted;
  answers.emplace_back(peer, std::move(answer));
  if (is_accepted && is_leaving_) answers.emplace_back(peer, message_of_type(MemberType::kLeaving));
}

void MemberProtocol::on_answer(const Peer& peer, MemberMessage message) {
  const auto asked = asked_.find(peer.get());
  if (asked == asked_.end() || answers_.count(peer.get()) > 0) return;
  if (message.type == MemberType::kAccepted) {
    asked->second.is_ready = message.is_ready;
    workers_.add(asked->second);
    told_gone_.insert(message.gone.begin(), message.gone.end());
    told_live_.insert(message.live.begin(), message.live.end());
  }
  answers_.emplace(peer.get(), std::move(message));
}

MemberProtocol::Messages MemberProtocol::to_all(MemberType type) const {
  Messages messages;
  for (const KnownWorker* const worker : workers_.live_others()) {
    messages.emplace_back(worker->peer, message_of_type(type));
  }
  return messages;
}

}  // namespace cohort::rpc
