// One thread handles what comes, in the order in which it came: messages and ends of peers (from the node's
// thread), answers of the store, the launcher's status. So the protocol needs no lock. To connect may take a
// while, so threads of a pool do it; what is to be sent to the address meanwhile is kept, at most the last
// few messages: signs of life come again.
//
// The node has heartbeats too. They are slower than the protocol's, and decide nothing: they end sessions
// with hosts that are gone for good. A death that the node sees is told to the protocol.
#include "cohort/membership/internal/member_loop.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/internal/fault_points.h"
#include "cohort/base/log.h"
#include "cohort/membership/internal/fields.h"

namespace cohort::membership::member_detail {
namespace {

using base::concat;
using std::chrono::milliseconds;

constexpr std::uint32_t kChannel = 1;
constexpr std::size_t kMaxKept = 8;  // messages to an address that is being connected to
constexpr int kMaxConnectors = 8;
constexpr milliseconds kStopTime(2'000), kSilentPause(50);
constexpr milliseconds kLongest = std::chrono::hours(365 * 24);
constexpr int kMaxCount = 2'000'000'000;  // as the record is read

Time now_of_clock() {
  return Time::clock::now();
}

[[noreturn]] void reject(const std::string& what, const std::string& hint) {
  throw UsageError("membership.member", what, hint);
}

// What others would not read must not be sent.
void check_status(const MemberStatus& status) {
  if (status.num_processes < 1 || status.num_processes > kMaxProcesses) {
    reject(concat("got ", status.num_processes, " processes of an agent"), "1 to 16384");
  }
}

void check_settings(const MemberOptions& options) {
  const RunSettings& settings = options.settings;
  if (settings.min_nodes < 1 || settings.max_nodes < settings.min_nodes || settings.max_nodes > kMaxNodes) {
    reject(concat("got ", settings.min_nodes, " to ", settings.max_nodes, " nodes"),
           concat("MIN:MAX with 1 <= MIN <= MAX <= ", kMaxNodes));
  }
  if (settings.silence < milliseconds(20)) {
    reject(concat("got a silence of ", settings.silence.count(), " ms"),
           "at least 20 ms: a busy host may be late");
  }
  for (const int count : {settings.num_spares, settings.max_restarts, settings.virtual_ranks}) {
    if (count < 0 || count > kMaxCount) {
      reject(concat("got ", settings.num_spares, " spares, ", settings.max_restarts, " restarts and ",
                    settings.virtual_ranks, " virtual ranks"),
             "0 to 2000000000 of each");
    }
  }
  for (const milliseconds time : {settings.silence, settings.join_timeout, settings.last_call_timeout}) {
    if (time < milliseconds(0) || time > kLongest) {
      reject(concat("got a silence of ", settings.silence.count(), " ms, a join timeout of ",
                    settings.join_timeout.count(), " ms and a last call of ",
                    settings.last_call_timeout.count(), " ms"),
             "0 to 365 days each");
    }
  }
  if (options.endpoint.empty() != (options.store != nullptr)) {
    reject("there must be an endpoint, or a store that all agents reach", "--rdzv-endpoint");
  }
}

net::Message net_message_of(std::string text) {
  net::Message message;
  message.channel = kChannel;
  message.header = std::move(text);
  return message;
}

RunSettings settings_of(const MemberOptions& options) {
  RunSettings settings = options.settings;
  settings.is_embedded = !options.store;
  return settings;
}

net::NodeOptions node_options_of(const MemberOptions& options) {
  net::NodeOptions node;
  node.name = "agent";
  node.secret = options.secret;
  node.tls = options.tls;
  node.silence = std::max(milliseconds(2'000), 2 * kAloneFactor * options.settings.silence);
  node.shared_memory = false;  // its messages are few and short
  return node;
}

}  // namespace

MemberLoop::MemberLoop(MemberOptions options)
    : options_(std::move(options)),
      store_(options_.store),
      events_(std::make_shared<EventQueue>()),
      connectors_({.name = "membership", .max_threads = kMaxConnectors}),
      thread_({.name = "membership", .in_timeline = false}) {
  check_settings(options_);
  node_ = std::make_shared<net::Node>(node_options_of(options_), events_);
  const bool is_embedded = !options_.endpoint.empty();
  if (!options_.is_endpoint) {
    address_ = node_->listen(options_.listen, options_.host);
  } else if (options_.endpoint_listen.empty()) {
    address_ = node_->listen(options_.endpoint);
  } else {
    node_->listen(options_.endpoint_listen);
    address_ = options_.endpoint;  // by which all others know it
  }
  if (!options_.is_endpoint && address_ == options_.endpoint) {
    reject(concat("this agent listens at the endpoint ", address_, ", and is not told that it is there"),
           "is_endpoint, or another address to listen at");
  }
  const std::string endpoint = options_.is_endpoint ? address_ : options_.endpoint;
  if (options_.is_endpoint) {
    store_ = std::make_shared<MemoryStore>();
    if (options_.settings.max_nodes > 1) {
      base::log_info(concat("the agent at ", address_, " has the only record of run ",
                            options_.settings.run_id, ": the run ends if this host dies"));
    }
  }
  protocol_.emplace(
      ProtocolOptions{incarnation(), address_, settings_of(options_), is_embedded ? endpoint : ""},
      now_of_clock());
  if (store_) {
    store_->watch([events = events_](const StoreAnswer& answer) {
      events->push({.type = Event::Type::kStore, .answer = answer});
    });
  }
  set_status(options_.status);
}

void MemberLoop::start() {
  thread_.submit("membership", [self = shared_from_this()] { self->run(); });
}

void MemberLoop::set_status(MemberStatus status) {
  check_status(status);
  events_->push({.type = Event::Type::kStatus, .status = std::move(status)});
}

MemberView MemberLoop::view() const {
  const std::lock_guard lock(mutex_);
  return view_;
}

bool MemberLoop::wait_for_change(std::uint64_t seen, base::Deadline deadline) const {
  std::unique_lock lock(mutex_);
  return base::wait(changed_, lock, [&] { return view_.revision != seen; }, deadline);
}

void MemberLoop::run() {
  for (bool is_last = false; !is_last;) {
    is_last = events_->is_stopping();  // what was queued before the end is handled
    // One that is silent looks now and then whether the program runs again.
    const Time::duration pause = was_hanging_ ? kSilentPause : protocol_->next_time() - now_of_clock();
    std::deque<Event> events = events_->take(base::Deadline(pause));
    const Time now = now_of_clock();
    MemberProtocol::Effects effects;
    if (does_program_hang(now) && !is_last) {
      // As if this process were stopped: the protocol gives all others their time again, once it hears of the
      // time.
      std::erase_if(events, [](const Event& event) { return event.type == Event::Type::kMessage; });
      for (Event& event : events) held_.push_back(std::move(event));
      continue;
    }
    events.insert(events.begin(), std::make_move_iterator(held_.begin()),
                  std::make_move_iterator(held_.end()));
    held_.clear();
    try {
      for (const Event& event : events) handle(event, now, effects);
      if (now >= protocol_->next_time()) protocol_->tick(now, effects);
      apply(effects);
    } catch (const std::exception& error) {  // a record that it cannot read, or there is no memory
      protocol_->fail(base::message_of(error));
    }
    publish(effects);
  }
}

bool MemberLoop::does_program_hang(Time now) {
  const bool hangs =
      options_.program_timeout.count() > 0 && now - alive_at_.load() > options_.program_timeout;
  if (hangs && !was_hanging_) {
    base::log_error(concat("this agent has hung for ", options_.program_timeout.count(),
                           " ms, and is silent until it runs again: other nodes are to continue without it"));
  }
  was_hanging_ = hangs;
  return hangs;
}

void MemberLoop::handle(const Event& event, Time now, MemberProtocol::Effects& effects) {
  switch (event.type) {
    case Event::Type::kMessage: {
      AgentMessage message;
      try {
        message = parse_agent_message(event.text);
      } catch (const CommError& error) {
        base::warn_once("membership.read",
                        concat("an agent's message was dropped: ", base::message_of(error)));
        return;
      }
      if (message.incarnation != event.peer->incarnation()) {
        base::warn_once("membership.sender",
                        concat("a message of agent ", message.incarnation, " came from another one, ",
                               event.peer->incarnation(), ", and was dropped"));
        return;
      }
      // Answers go back over the connection that a message came by.
      if (!event.peer->is_down()) peers_[message.address] = event.peer;
      protocol_->on_message(message, now, effects);
      break;
    }
    case Event::Type::kDown: {
      std::erase_if(peers_, [&](const auto& entry) { return entry.second == event.peer; });
      if (event.is_dead) protocol_->on_death(event.peer->incarnation(), now, effects);
      break;
    }
    case Event::Type::kConnected: {
      const std::vector<std::string> texts = std::move(to_be_sent_.extract(event.text).mapped());
      if (event.peer->is_down()) break;  // its end was handled before
      peers_[event.text] = event.peer;
      base::reach_fault_point("connected");
      for (const std::string& text : texts) event.peer->send(net_message_of(text));
      break;
    }
    case Event::Type::kNotConnected:
      to_be_sent_.erase(event.text);
      if (event.is_dead) protocol_->on_closed_port(event.text, now, effects);
      if (std::exchange(last_failure_, event.why) != event.why && !protocol_->record()) {
        base::log_info(concat("no answer from ", event.text, " yet: ", event.why));
      }
      break;
    case Event::Type::kStore:
      protocol_->on_store(event.answer, now, effects);
      break;
    case Event::Type::kStatus: {
      Report report;
      static_cast<MemberStatus&>(report) = event.status;
      protocol_->set_report(report, now, effects);
      break;
    }
  }
}

void MemberLoop::apply(const MemberProtocol::Effects& effects) {
  if (effects.is_changed) base::reach_fault_point("adopted");
  for (const auto& [address, message] : effects.messages) send(address, message);
  if (effects.is_changed) base::reach_fault_point("record sent");
  for (const MemberProtocol::Command& command : effects.commands) {
    if (command.is_swap) {
      base::reach_fault_point("before swap");
      store_->compare_and_swap(command.expected, command.text);
      base::reach_fault_point("swap asked");
    } else {
      store_->read();
    }
  }
}

void MemberLoop::send(const std::string& address, const AgentMessage& message) {
  std::string text;
  if (message.type != AgentMessage::Type::kRecord) {
    text = to_text(message);
  } else {
    // A record goes to all agents, and its text is long.
    if (std::exchange(sent_revision_, message.revision) != message.revision) sent_text_ = to_text(message);
    text = sent_text_;
  }
  const auto peer = peers_.find(address);
  if (peer != peers_.end() && !peer->second->is_down()) {
    peer->second->send(net_message_of(std::move(text)));
    return;
  }
  const bool is_connecting = to_be_sent_.count(address) > 0;
  std::vector<std::string>& texts = to_be_sent_[address];
  texts.push_back(std::move(text));
  if (texts.size() > kMaxKept) texts.erase(texts.begin());
  if (!is_connecting) connect(address);
}

void MemberLoop::connect(const std::string& address) {
  const base::Deadline deadline(std::max(milliseconds(500), 2 * options_.settings.silence));
  const bool has_common_store =
      options_.endpoint.empty();  // of which no agent is an endpoint that is about to listen
  const auto run = [node = node_, events = events_, address, deadline, has_common_store] {
    try {
      const auto when_rejected = has_common_store ? net::WhenRejected::kGiveUp : net::WhenRejected::kRetry;
      std::shared_ptr<net::Peer> peer = node->connect(address, deadline, when_rejected);
      if (peer == nullptr) {
        events->push({.type = Event::Type::kNotConnected,
                      .text = address,
                      .why = "nobody listens there",
                      .is_dead = true});
      } else {
        events->push({.type = Event::Type::kConnected, .peer = std::move(peer), .text = address});
      }
    } catch (const std::exception& error) {
      events->push({.type = Event::Type::kNotConnected, .text = address, .why = base::message_of(error)});
    }
  };
  try {
    connectors_.submit("connect", run);
  } catch (const Error& error) {  // there is no thread
    events_->push({.type = Event::Type::kNotConnected, .text = address, .why = base::message_of(error)});
  }
}

void MemberLoop::publish(const MemberProtocol::Effects& effects) {
  const std::string& failure = protocol_->failure();
  const bool do_all_know = protocol_->do_all_know(now_of_clock());
  bool is_changed = false;
  {
    const std::lock_guard lock(mutex_);
    const bool is_new_failure = failure != published_failure_;
    is_changed = effects.is_changed || is_new_failure || protocol_->is_deciding() != view_.is_deciding;
    if (is_changed) {
      ++view_.revision;
      view_.record = protocol_->record();
      const MemberInfo* const self = view_.record ? view_.record->find(incarnation()) : nullptr;
      view_.id = self == nullptr ? 0 : self->id;
      if (is_new_failure) {
        published_failure_ = failure;
        const bool never_came = !view_.record && !last_failure_.empty();
        view_.failure = never_came ? concat(failure, ": ", last_failure_) : failure;
      }
      view_.is_deciding = protocol_->is_deciding();
    }
    is_changed = is_changed || do_all_know != do_all_know_;
    do_all_know_ = do_all_know;
  }
  if (!is_changed) return;
  changed_.notify_all();
  if (effects.is_changed) log_record(*protocol_->record());
  if (options_.on_change && !events_->is_stopping()) options_.on_change();
}

void MemberLoop::log_record(const RendezvousRecord& record) {
  const Generation& generation = record.generation;
  if (!protocol_->is_deciding() || generation.number == logged_generation_) return;
  logged_generation_ = generation.number;
  base::log_info(concat("generation ", generation.number, ": ", generation.members.size(), " agents, ",
                        generation.num_processes(), " processes; ", generation.cause));
}

void MemberLoop::end_thread() {
  events_->stop();
  thread_.stop(kStopTime);
}

void MemberLoop::stop() {
  if (is_stopped_.exchange(true)) return;
  end_thread();
  node_->stop();
  connectors_.stop(milliseconds(0));  // they own what they use, and end with their deadline
}

void MemberLoop::close(base::Deadline deadline) {
  {
    std::unique_lock lock(mutex_);
    const bool has_ended = view_.record && view_.record->has_ended() && view_.is_deciding;
    if (has_ended) base::wait(changed_, lock, [&] { return do_all_know_; }, deadline);
  }
  if (is_stopped_.exchange(true)) return;
  end_thread();  // first, as it has what is to be said
  node_->close(deadline);
  connectors_.stop(milliseconds(0));
}

}  // namespace cohort::membership::member_detail
