// A message that carries references waits until their owners know of them, and is sent by the thread that
// learns so. Calls that have an order are sent in it, so a call with references holds up those after it.
// Module net keeps the order of the messages of its own channel. There a long call may wait for room until
// its caller has given it up. Then a message without the arguments takes its place: Note [Calls given up
// while they wait].
#include "cohort/rpc/internal/agent/message_sender.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/rpc/internal/agent/agent_messages.h"
#include "cohort/rpc/internal/caller_state.h"
#include "cohort/rpc/internal/wire.h"

namespace cohort::rpc {
namespace {

// Short messages share a channel, so they stay in order and go before long ones; a long one has a channel of
// its own.
constexpr std::uint32_t kShortChannel = 0;
constexpr std::size_t kShortBytes = 64 * 1024;
constexpr std::size_t kWorthReplacing = 4096;  // bytes; a shorter call goes as it is, though it was given up
// So many follow, one for each long message in turn, and then as many for calls that have an order.
constexpr std::uint32_t kLongChannels = 1'000'000;

// Names that meet in one channel are in order too.
std::uint32_t net_channel_of(const std::string& channel) {
  return 1 + kLongChannels + static_cast<std::uint32_t>(std::hash<std::string>()(channel) % kLongChannels);
}

template <typename T>
void write_number(char* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

// A message may wait for long until it goes. In front of the last `num_bytes` of its header are its tables.
void fill_in_time_left(net::Message& message, std::size_t num_bytes) {
  std::int64_t end = 0;
  const std::size_t offset = message.header.size() - num_bytes + kTimeLeftOffset;
  std::memcpy(&end, message.header.data() + offset, sizeof end);
  if (end == kForever) return;
  message.on_begin = [offset, end](std::span<char> header) {
    const auto now = base::Deadline::Clock::now().time_since_epoch();
    write_number(header.data() + offset,
                 std::max<std::int64_t>(0, end - std::chrono::nanoseconds(now).count()));
  };
}

// Note [Calls given up while they wait]
// The arguments of a call that nobody waits for are not sent. But the other worker keeps count of calls: of
// this worker's, of the channel's and of the context's. And it is to drop the references that came with the
// call. So the call comes all the same, without arguments and without time. Its handler does not begin
// (CallServer::skip()).
Encoded without_arguments(const Encoded& call, std::uint64_t sequence) {
  Reader in(call);
  in.number<std::uint8_t>();   // kind
  in.number<std::uint64_t>();  // id
  in.number<std::int64_t>();   // time left
  in.number<std::uint64_t>();  // sequence
  in.text();                   // function
  decode<std::optional<std::string>>(in);
  decode<std::optional<RecordedPlace>>(in);
  decode<CallerState>(in);
  Encoded head;
  head.bytes = call.bytes.substr(0, call.bytes.size() - in.num_bytes_left());
  write_number(head.bytes.data() + kTimeLeftOffset, std::int64_t{0});
  write_number(head.bytes.data() + kSequenceOffset, sequence);
  return head;
}

void keep_queued(CallTables& tables, std::uint64_t call, QueuedCall queued) {
  {
    const std::lock_guard lock(tables.mutex);
    if (tables.pending.on_queued(call, queued)) return;
  }
  queued.give_up();  // its caller has done so meanwhile
}

// Why module net would reject the message, and what to do; none where it takes it.
std::optional<std::pair<std::string, const char*>> find_excess(const net::Message& message,
                                                               std::size_t num_references) {
  if (message.payloads.size() > net::kMaxPayloads) {
    return std::pair(base::concat(message.payloads.size(), " tensors, expected at most ", net::kMaxPayloads,
                                  " (a sparse one counts twice)"),
                     "torch::stack or torch::cat, or several calls");
  }
  const std::size_t num_bytes = message.header.size() + most_bytes_of_references(num_references);
  if (num_bytes <= net::kMaxHeaderBytes) return std::nullopt;
  return std::pair(
      base::concat(num_bytes, " bytes beside its tensors, expected at most ", net::kMaxHeaderBytes),
      "a tensor in place of a vector or a string, or several calls");
}

}  // namespace

void MessageSender::send_or_fail(const std::string& worker, Encoded message, const Channel& channel,
                                 const OnError& on_error) {
  try {
    send(worker, std::move(message), channel);
  } catch (...) {  // a tensor that cannot travel, an object that is gone
    on_error(std::current_exception());
  }
}

void MessageSender::send_when_resolved(const std::string& worker, Encoded message, OnError on_error,
                                       std::function<bool()> is_wanted, const Channel& channel) {
  if (message.references.empty() && !channel) {  // most messages
    return send_or_fail(worker, std::move(message), channel, on_error);
  }
  const auto send_it = [self = core_.share(this), worker, channel,
                        on_error = std::move(on_error)](Encoded resolved) {
    self->send_or_fail(worker, std::move(resolved), channel, on_error);
  };
  const References::List references = message.references;
  // Called once, so the message's tensors can move.
  const auto kept = std::make_shared<Encoded>(std::move(message));
  const auto send_if_wanted = [send_it, kept, is_wanted = std::move(is_wanted)] {
    if (!is_wanted || is_wanted()) send_it(std::move(*kept));
  };
  if (!channel) return core_.references->when_resolved(references, send_if_wanted);
  channels_->lock({worker, *channel}, [self = core_.share(this), references,
                                       send_if_wanted](const std::shared_ptr<KeyedAsyncMutex::Lock>& lock) {
    self->core_.references->when_resolved(references, [send_if_wanted, lock] {
      send_if_wanted();
      lock->unlock();
    });
  });
}

void MessageSender::send(const std::string& worker, Encoded encoded, const Channel& channel) {
  std::shared_ptr<net::Peer> peer;
  std::int32_t id = 0;
  {
    const std::lock_guard lock(core_.tables.mutex);
    const KnownWorker* const known = core_.tables.workers.find_if_known(worker);
    if (known == nullptr) return;
    peer = known->peer;
    id = known->info.id;
  }
  Reader reader(encoded);
  const auto kind = static_cast<MessageKind>(reader.number<std::uint8_t>());
  const auto call = reader.number<std::uint64_t>();
  // In a call of itself both sides have values of their own, as anywhere else.
  net::Message message = to_message(kShortChannel, encoded, peer == nullptr ? Memory::kOwn : Memory::kShared);
  // Before forks are made: nobody would receive those of a message that is not sent.
  if (const auto excess = find_excess(message, encoded.references.size())) {
    throw UsageError("rpc.send",
                     base::concat(is_answer(kind) ? "the answer to call " : "call ", shown_number(call),
                                  is_answer(kind) ? " of " : " to ", worker, " has ", excess->first),
                     excess->second);
  }
  const std::vector<WireReference> references = core_.references->send(encoded.references, id);
  add_references(message, references);
  if (channel) {
    message.channel = net_channel_of(*channel);
  } else if (message.num_bytes() > kShortBytes) {
    message.channel = static_cast<std::uint32_t>(1 + call % kLongChannels);
  }
  if (is_answer(kind)) message.channel += net::kAnswerChannels;
  if (kind == MessageKind::kCall || kind == MessageKind::kMake) {
    fill_in_time_left(message, encoded.bytes.size());
  }
  std::uint64_t sequence = 0;
  if (kind == MessageKind::kCall) {
    char* const fields = message.header.data() + message.header.size() - encoded.bytes.size();
    const std::lock_guard lock(core_.tables.mutex);
    sequence = core_.tables.pending.on_sent(call, worker);
    write_number(fields + kSequenceOffset, sequence);
    if (core_.tables.pending.find(call) == nullptr) {  // it was given up just now
      write_number(fields + kTimeLeftOffset, std::int64_t{0});
      message.on_begin = nullptr;
    }
  }
  if (peer == nullptr) {
    if (worker != core_.self.name) return;
    if (message.on_begin) message.on_begin(message.header);
    return deliver_(std::move(message));
  }
  const std::uint32_t net_channel = message.channel;
  const bool is_worth_replacing = kind == MessageKind::kCall && message.num_bytes() >= kWorthReplacing;
  const std::uint64_t number = peer->send(std::move(message));
  if (!is_worth_replacing || number == 0) return;
  QueuedCall queued{peer, number, to_message(net_channel, without_arguments(encoded, sequence))};
  add_references(queued.without_arguments, references);
  keep_queued(core_.tables, call, std::move(queued));
}

void MessageSender::send_effects(Contexts::Effects effects) {
  core_.free_later(std::move(effects.left));
  for (const auto& [to, message] : effects.messages) {
    Writer out = begin_message(MessageKind::kContext);
    write_context_message(out, message);
    send(core_.worker(to).name, out.take());
  }
}

}  // namespace cohort::rpc
