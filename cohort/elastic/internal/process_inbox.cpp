// Always: `received_` has letters of the generation that this process is in, and `early_` hellos of later
// ones. Nothing but a hello can come early, as all else answers this process's own hello. Letters of earlier
// generations are dropped when they come.
//
// A wait ends at once where it would be in vain. Within enter() each newer generation and each lost link is
// such news. Within a step it is news that nobody will finish the step (GenerationChange), or that a process
// is lost whose bytes have not come. What has come already is used first: a process that has the whole sum
// finishes its step, whoever is gone.
//
// A process that is stuck keeps its links. Whoever has waited for it for the session's whole timeout takes
// its link for lost, and waits for what the agents decide.
#include "cohort/elastic/internal/process_inbox.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "cohort/base/exception_text.h"
#include "cohort/base/log.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/threads/wait.h"
#include "cohort/base/timeline.h"
#include "cohort/elastic/session.h"

namespace cohort::elastic {
namespace {

using base::concat;
using base::Timeline;
using membership::MemberId;
using membership::MemberInfo;

// A wait that is told to the agent, which looks for processes that neither get on nor wait.
constexpr std::chrono::seconds kLongWait(1);

std::optional<MemberId> member_of_process(const membership::Generation& generation, int process) {
  for (const MemberInfo& member : generation.members) {
    if (process < member.num_processes) return member.id;
    process -= member.num_processes;
  }
  return std::nullopt;
}

}  // namespace

void ProcessInbox::on_order(membership::RankOrder order) {
  {
    const std::lock_guard lock(mutex_);
    if (order.revision < order_.revision) return;
    order_ = std::move(order);
    if (order_.generation.number > 0) change_.announce(order_.generation, order_.process);
  }
  notify_all();
}

void ProcessInbox::on_agent_end(std::string why) {
  post([&] { agent_end_ = std::move(why); });
}

void ProcessInbox::on_region(base::Fd file) {
  post([&] { region_ = std::move(file); });
}

base::Fd ProcessInbox::take_region() {
  const std::lock_guard lock(mutex_);
  return std::move(region_);
}

void ProcessInbox::on_connect(const std::shared_ptr<net::Peer>& peer) {
  post([&] {
    if (peer->is_down()) return;  // on_down() was, or comes
    const auto before = std::exchange(peers_[peer->incarnation()], peer);
    const auto process = process_of(peer->incarnation());
    if (before == nullptr || before == peer || !process) return;
    // It had given this process up, for instance while this one was stopped.
    if (keeps_links_) return lose(*process, "it has connected again");
    Received news;
    news.letter.wire.type = WireType::kNewLink;
    news.letter.wire.from = static_cast<std::uint32_t>(*process);
    news.incarnation = peer->incarnation();
    received_.push_back(std::move(news));
  });
}

void ProcessInbox::post(const std::function<void()>& change) {
  {
    const std::lock_guard lock(mutex_);
    change();
  }
  notify_all();
}

void ProcessInbox::notify_all() {
  changed_.notify_all();
  may_have_ended_.notify_all();
}

void ProcessInbox::close() {
  post([&] { is_closed_ = true; });
}

void ProcessInbox::on_message(const std::shared_ptr<net::Peer>& peer, net::Message message) {
  Received received;
  try {
    received.letter.wire = decode(message.header);
  } catch (const CommError& error) {
    base::warn_once("elastic.read", base::message_of(error));
    return;
  }
  const Wire& wire = received.letter.wire;
  const int from = static_cast<int>(wire.from);
  const bool is_news = wire.type == WireType::kHello || wire.type == WireType::kGoodbye;
  received.incarnation = peer->incarnation();
  {
    const std::lock_guard lock(mutex_);
    const std::uint64_t current = change_.generation().number;
    if (wire.generation > current) {
      if (wire.type != WireType::kHello) return;
      change_.on_hello(wire.generation, from, wire.number);
      early_.push_back(std::move(received));
    } else if (wire.generation < current || !change_.process()) {
      return;
    } else if (!incarnations_.empty() && process_of(received.incarnation) != from) {
      return;
    } else {
      heard_[from] = base::Deadline::Clock::now();
      if (wire.type == WireType::kGoodbye) {
        change_.on_goodbye(from, wire.number);
      } else {
        received.letter.message = std::move(message);
        received_.push_back(std::move(received));
      }
    }
  }
  changed_.notify_all();
  if (is_news) may_have_ended_.notify_all();
}

void ProcessInbox::on_down(const std::shared_ptr<net::Peer>& peer, net::Down down) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = peers_.find(peer->incarnation());
    if (found == peers_.end() || found->second != peer) return;  // it has connected again since
    peers_.erase(found);
    if (const auto process = process_of(peer->incarnation())) lose(*process, down.text);
  }
  notify_all();
}

void ProcessInbox::lose_process(std::uint64_t generation, int process, const std::string& why) {
  post([&] {
    if (generation == change_.generation().number) lose(process, why);
  });
}

void ProcessInbox::lose(int process, const std::string& why) {
  if (!change_.process() || !lost_.emplace(process, why).second) return;
  change_.on_link_lost(process);
  notify_all();
  if (change_.has_left(process)) return;
  // It may have died at any time since. One row has one span of a generation at a time.
  const auto heard = heard_.find(process);
  if (lost_.size() == 1 && heard != heard_.end() && Timeline::enabled()) {
    Timeline::complete("detect", heard->second, {.track = Timeline::track("elastic losses")});
  }
  if (const auto member = member_of_process(change_.generation(), process)) on_lost_link_(*member);
}

std::optional<int> ProcessInbox::process_of(const std::string& incarnation) const {
  const auto found = std::ranges::find(incarnations_, incarnation);
  if (found == incarnations_.end()) return std::nullopt;
  return static_cast<int>(found - incarnations_.begin());
}

// Its node leaves the run, and nobody waits for this process any more.
bool ProcessInbox::has_left_with_node() const {
  return order_.is_leaving && !order_.process && !change_.process() && !change_.has_next();
}

void ProcessInbox::throw_if_over() const {
  if (order_.has_ended) throw RunEnded(order_.has_succeeded, order_.end_cause, order_.stop_signal);
  if (has_left_with_node()) throw RunEnded(true, "the node of this process has left it");
  if (agent_end_.empty()) return;
  throw CommError("elastic.session", concat("the agent of this process is gone: ", agent_end_),
                  "the log of cohort run on this host");
}

// Its thread waits in one place at a time, so the second call of `tell` follows the first.
bool ProcessInbox::wait_long(std::unique_lock<std::mutex>& lock, const std::function<bool()>& condition,
                             base::Deadline deadline) {
  const base::Deadline short_wait(kLongWait);
  if (base::wait(changed_, lock, condition, deadline.sooner(short_wait))) return true;
  tell_long_wait(true);
  const std::unique_ptr<void, std::function<void(void*)>> guard(this, [&](void*) { tell_long_wait(false); });
  return base::wait(changed_, lock, condition, deadline);
}

void ProcessInbox::wait_for_next() {
  std::unique_lock lock(mutex_);
  // A process that is in no generation waits as long as the run lasts. The agent's end ends it.
  wait_long(
      lock,
      [&] {
        return change_.has_next() || region_.is_open() || order_.has_ended || has_left_with_node() ||
               !agent_end_.empty();
      },
      base::Deadline::never());
  throw_if_over();
}

bool ProcessInbox::wait_for_end() {
  std::unique_lock lock(mutex_);
  // Until the others have made their last steps: they may be long.
  wait_long(
      lock,
      [&] { return change_.has_next() || order_.has_ended || has_left_with_node() || !agent_end_.empty(); },
      base::Deadline::never());
  if ((order_.has_ended && order_.has_succeeded) || has_left_with_node()) return true;
  throw_if_over();
  return false;
}

bool ProcessInbox::must_enter() const {
  const std::lock_guard lock(mutex_);
  return change_.has_next() || !lost_.empty() || order_.has_ended || !agent_end_.empty() ||
         !change_.process();
}

bool ProcessInbox::must_leave() const {
  const std::lock_guard lock(mutex_);
  return change_.drops_step(committed_) || !lost_.empty() || order_.has_ended || !agent_end_.empty() ||
         !change_.process();
}

bool ProcessInbox::has_next() const {
  const std::lock_guard lock(mutex_);
  return change_.has_next();
}

void ProcessInbox::enter(const std::function<void(const membership::Generation&)>& on_entered) {
  const std::lock_guard lock(mutex_);
  change_.enter();
  on_entered(change_.generation());
  incarnations_.clear();
  lost_.clear();
  heard_.clear();
  keeps_links_ = false;
  received_.clear();
  const std::uint64_t current = change_.generation().number;
  for (Received& received : std::exchange(early_, {})) {
    const std::uint64_t generation = received.letter.wire.generation;
    if (generation == current && change_.process()) received_.push_back(std::move(received));
    if (generation > current) early_.push_back(std::move(received));
  }
  may_have_ended_.notify_all();
}

membership::Generation ProcessInbox::generation() const {
  const std::lock_guard lock(mutex_);
  return change_.generation();
}

std::string ProcessInbox::origin() const {
  const std::lock_guard lock(mutex_);
  return order_.origin;
}

std::optional<int> ProcessInbox::process() const {
  const std::lock_guard lock(mutex_);
  return change_.process();
}

bool ProcessInbox::has_process_next() const {
  const std::lock_guard lock(mutex_);
  return change_.has_process_next();
}

std::uint64_t ProcessInbox::newest() const {
  const std::lock_guard lock(mutex_);
  return change_.newest();
}

void ProcessInbox::keep_links() {
  const std::lock_guard lock(mutex_);
  keeps_links_ = true;
  const auto news = std::ranges::find(received_, WireType::kNewLink,
                                      [](const Received& received) { return received.letter.wire.type; });
  if (news != received_.end()) lose(static_cast<int>(news->letter.wire.from), "it has connected again");
}

void ProcessInbox::set_processes(std::vector<std::string> incarnations) {
  const std::lock_guard lock(mutex_);
  incarnations_ = std::move(incarnations);
  // A process that died after its hello may have had the number before.
  std::erase_if(received_, [&](const Received& received) {
    return process_of(received.incarnation) != static_cast<int>(received.letter.wire.from);
  });
}

std::shared_ptr<net::Peer> ProcessInbox::find_peer(const std::string& incarnation) const {
  const std::lock_guard lock(mutex_);
  return find_peer_locked(incarnation);
}

std::shared_ptr<net::Peer> ProcessInbox::find_peer_locked(const std::string& incarnation) const {
  const auto found = peers_.find(incarnation);
  return found == peers_.end() ? nullptr : found->second;
}

std::shared_ptr<net::Peer> ProcessInbox::peer_of(int process) const {
  const std::lock_guard lock(mutex_);
  if (static_cast<std::size_t>(process) >= incarnations_.size()) return nullptr;
  return find_peer_locked(incarnations_[static_cast<std::size_t>(process)]);
}

void ProcessInbox::set_committed(std::uint64_t steps) {
  const std::lock_guard lock(mutex_);
  committed_ = steps;
  may_have_ended_.notify_all();
}

void ProcessInbox::throw_ended(std::uint64_t generation, const std::string& why) {
  throw GenerationEnded("elastic.session", concat("generation ", generation, " has ended: ", why),
                        "Session::enter()");
}

void ProcessInbox::throw_if_ended(const WaitEnd& end) const {
  if (is_closed_) throw_ended(end.generation, "the session of this process is destroyed");
  if (end.generation != change_.generation().number) throw_ended(end.generation, "this process has left it");
  throw_if_over();
  if (change_.has_next() && (!end.is_in_step || change_.drops_step(committed_))) {
    throw_ended(end.generation,
                concat("generation ", change_.newest(), " follows: ", order_.generation.cause));
  }
  for (const auto& [process, why] : lost_) {
    const bool is_needed = !end.is_in_step || std::ranges::find(end.needed, process) != end.needed.end();
    if (is_needed) throw_ended(end.generation, concat("process ", process, " is lost: ", why));
  }
}

// A process that has left as planned, and has ended since, may have done its part of what others still do.
std::exception_ptr ProcessInbox::find_end(std::uint64_t generation, bool is_in_step) const {
  WaitEnd end{
      .generation = generation, .is_in_step = is_in_step, .needed = {}, .deadline = base::Deadline::never()};
  for (const auto& [process, why] : lost_) {
    if (!change_.has_left(process)) end.needed.push_back(process);
  }
  try {
    throw_if_ended(end);
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

std::exception_ptr ProcessInbox::end_of(std::uint64_t generation) const {
  const std::lock_guard lock(mutex_);
  return find_end(generation, true);
}

std::exception_ptr ProcessInbox::wait_for_end_of(std::uint64_t generation, base::Deadline deadline,
                                                 bool is_lost) {
  std::unique_lock lock(mutex_);
  std::exception_ptr error;
  const auto has_ended = [&] { return (error = find_end(generation, !is_lost)) != nullptr; };
  base::wait(may_have_ended_, lock, has_ended, deadline);
  return error;
}

void ProcessInbox::wait(const std::function<bool()>& condition, const WaitEnd& end) {
  std::unique_lock lock(mutex_);
  bool is_there = false;
  const auto is_over = [&] {
    is_there = condition();
    if (!is_there) throw_if_ended(end);
    return is_there;
  };
  if (!wait_long(lock, is_over, end.deadline)) throw_late(end);
}

void ProcessInbox::give_up(const WaitEnd& end) {
  const std::lock_guard lock(mutex_);
  throw_if_ended(end);
  throw_late(end);
}

void ProcessInbox::throw_late(const WaitEnd& end) {
  const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(end.deadline.elapsed()).count();
  const std::string what = concat("waited ", waited, " ms for ", end.what);
  if (end.needed.empty()) throw TimeoutError("elastic.session", what, "the log of the agents");
  for (const int process : end.needed) lose(process, what);
  base::log_warning(concat(what, ": asks for another generation"));
  throw_ended(end.generation, what);
}

std::vector<Letter> ProcessInbox::extract(const std::set<WireType>& types) {
  std::vector<Letter> letters;
  for (Received& received : received_) {
    if (types.contains(received.letter.wire.type)) letters.push_back(std::move(received.letter));
  }
  std::erase_if(received_,
                [&](const Received& received) { return types.contains(received.letter.wire.type); });
  return letters;
}

std::vector<Letter> ProcessInbox::take(const std::set<WireType>& types, const WaitEnd& end) {
  std::vector<Letter> letters;
  wait(
      [&] {
        if (end.generation == change_.generation().number) letters = extract(types);
        return !letters.empty();
      },
      end);
  return letters;
}

std::vector<Letter> ProcessInbox::take_now(const std::set<WireType>& types) {
  const std::lock_guard lock(mutex_);
  return extract(types);
}

}  // namespace cohort::elastic
