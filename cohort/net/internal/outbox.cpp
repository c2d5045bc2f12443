// Two rules make the order of frames. Of a channel one message is cut at a time, so a channel's messages
// begin and end in order. Short messages, of one frame, go before the next piece of a long one, but at most
// one piece's worth of them, so neither can starve the other.
//
// The window holds back messages that have not begun, never pieces of those that have: a message that has
// begun always ends. Where the next message in turn does not fit, no other begins in its place, or a large
// one would wait for ever. Answers do not count in the window. They have turns of their own, so no call that
// waits for the window holds them back.
//
// A payload goes by handle where both sides map its memory (handles.h): in its place among the bytes is the
// handle. In the window it counts as all others, so a receiver that holds much memory holds back its sender.
//
// A message may be replaced until it begins: no number, no byte and no count of the window is its own before.
// One that has begun is not, also where it goes again: the peer may have counted its bytes in the window, and
// has dropped them.
//
// A message is kept until it is acknowledged. After a new link each that was not goes again, from its first
// byte and under its number, and the other side drops what it had. Its bytes count once in the window.
#include "cohort/net/internal/outbox.h"

#include <algorithm>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/net/internal/bytes.h"

namespace cohort::net {
namespace {

iovec part_of(const void* data, std::size_t size) {
  return {const_cast<void*>(data), size};
}

void check_size(const Message& message) {
  if (message.payloads.size() > kMaxPayloads) {
    throw UsageError("net.send", base::concat("a message has ", message.payloads.size(),
                                              " payloads, expected at most ", kMaxPayloads));
  }
  if (message.header.size() > kMaxHeaderBytes) {
    throw UsageError("net.send",
                     base::concat("the header of a message has ", message.header.size(),
                                  " bytes, expected at most ", kMaxHeaderBytes),
                     "a payload");
  }
}

}  // namespace

std::uint64_t Outbox::push(Message message) {
  check_size(message);
  const std::uint32_t channel = message.channel;
  std::deque<Queued>& queue = queues_[channel];
  queue.push_back({++last_ticket_, std::move(message)});
  ++num_queued_;
  if (queue.size() == 1 && !num_uncut_.contains(channel)) put_in_turn(channel);
  return last_ticket_;
}

bool Outbox::replace(std::uint64_t ticket, Message& other) {
  check_size(other);
  const std::uint32_t channel = other.channel;
  const auto queue = queues_.find(channel);
  if (queue == queues_.end()) return false;
  const auto found = std::ranges::lower_bound(queue->second, ticket, {}, &Queued::ticket);
  if (found == queue->second.end() || found->ticket != ticket) return false;
  std::swap(found->message, other);
  const Turn before = turn_of(other);
  if (found != queue->second.begin() || num_uncut_.contains(channel) || turn_of(found->message) == before) {
    return true;
  }
  std::erase(turns_[before], channel);
  put_in_turn(channel);
  return true;
}

void Outbox::push_control(FrameKind kind) {
  controls_.push_back(kind);
}

Outbox::Turn Outbox::turn_of(const Message& message) {
  const bool is_short = message.num_bytes() <= kPieceBytes;
  if (message.channel < kAnswerChannels) return is_short ? kShortCall : kLongCall;
  return is_short ? kShortAnswer : kLongAnswer;
}

void Outbox::put_in_turn(std::uint32_t channel) {
  const auto queue = queues_.find(channel);
  if (queue == queues_.end()) return;
  turns_[turn_of(queue->second.front().message)].push_back(channel);
}

// Short messages first, unless they had a piece's worth and a long one waits.
Outbox::Turn Outbox::next_turn_of(Turn short_ones, Turn long_ones) const {
  const bool has_short = !turns_[short_ones].empty(), has_long = !turns_[long_ones].empty();
  if (has_short && (!has_long || short_bytes_ < kPieceBytes)) return short_ones;
  return has_long ? long_ones : kNone;
}

// Which kind of message begins next; none, where none may.
Outbox::Turn Outbox::next_turn() const {
  if (!resend_.empty()) return kNone;  // they go first
  Turn call = next_turn_of(kShortCall, kLongCall);
  if (call != kNone) {
    const std::uint32_t channel = turns_[call].front();
    const std::uint64_t cost = cost_of(channel, queues_.at(channel).front().message.num_bytes());
    if (bytes_on_the_way() != 0 && bytes_on_the_way() + cost > window_) call = kNone;
  }
  const Turn answer = next_turn_of(kShortAnswer, kLongAnswer);
  if (call == kNone || answer == kNone) return call == kNone ? answer : call;
  const bool is_call_short = call == kShortCall, is_answer_short = answer == kShortAnswer;
  if (is_call_short != is_answer_short) {
    return is_call_short == (short_bytes_ < kPieceBytes) ? call : answer;
  }
  return is_answers_turn_ ? answer : call;
}

bool Outbox::may_make_frame() const {
  return !controls_.empty() || !cutting_.empty() || !resend_.empty() || may_begin();
}

std::uint64_t Outbox::begin_next() {
  std::deque<std::uint32_t>& turns = turns_[next_turn()];
  const std::uint32_t channel = turns.front();
  turns.pop_front();
  is_answers_turn_ = channel < kAnswerChannels;
  const auto queue = queues_.find(channel);
  Begun begun;
  begun.message = std::move(queue->second.front().message);
  begun.size = begun.message.num_bytes();
  queue->second.pop_front();
  if (queue->second.empty()) queues_.erase(queue);
  --num_queued_;
  begun_cost_ += cost_of(channel, begun.size);
  const std::uint64_t number = next_number_++;
  begun_.emplace(number, std::move(begun));
  num_uncut_[channel] = 1;
  return number;
}

// Each time that the message begins: over another link payloads may go another way. A handle of an earlier
// link stays good, and is used again, so the peer takes a block once.
void Outbox::lend_payloads(Begun& begun) {
  const std::vector<Payload>& payloads = begun.message.payloads;
  begun.size = begun.message.num_bytes();
  begun.handles.clear();
  if (!handles_) return;
  const bool is_first = begun.lent.empty();
  for (std::size_t i = 0; i < payloads.size(); ++i) {
    if (!payloads[i].moves) continue;
    begun.lent.resize(payloads.size());
    if (!begun.lent[i]) begun.lent[i] = handles_->lend(payloads[i]);
    if (!begun.lent[i]) continue;
    begun.handles.resize(payloads.size());
    begun.handles[i] = encode(begun.lent[i]->handle);
    begun.size -= payloads[i].bytes.size() - kHandleBytes;
    if (is_first) bytes_by_handle_ += payloads[i].bytes.size();
  }
}

// The table in front of a message's first bytes.
std::string Outbox::table_of(const Begun& begun) {
  const Message& message = begun.message;
  std::string table;
  put(table, message.channel);
  put(table, static_cast<std::uint32_t>(1 + message.payloads.size()));
  put(table, static_cast<std::uint64_t>(message.header.size()));
  for (std::size_t i = 0; i < message.payloads.size(); ++i) {
    const bool is_lent = !begun.handles.empty() && !begun.handles[i].empty();
    const auto size = static_cast<std::uint64_t>(message.payloads[i].bytes.size());
    put(table, is_lent ? size | kByHandle : size);
  }
  return table;
}

// Appends the bytes [begin, end) of the message: header and payloads, or their handles, one after the other.
void Outbox::append_bytes(std::vector<iovec>& parts, const Begun& begun, std::size_t begin, std::size_t end) {
  const Message& message = begun.message;
  std::size_t start = 0;
  const auto append = [&](const void* data, std::size_t size) {
    const std::size_t from = std::max(begin, start), to = std::min(end, start + size);
    if (from < to) parts.push_back(part_of(static_cast<const std::byte*>(data) + (from - start), to - from));
    start += size;
  };
  append(message.header.data(), message.header.size());
  for (std::size_t i = 0; i < message.payloads.size() && start < end; ++i) {
    const bool is_lent = !begun.handles.empty() && !begun.handles[i].empty();
    if (is_lent) {
      append(begun.handles[i].data(), kHandleBytes);
    } else {
      append(message.payloads[i].bytes.data(), message.payloads[i].bytes.size());
    }
  }
}

void Outbox::cut(std::uint64_t number, std::uint64_t acknowledged, std::uint64_t released) {
  Begun& begun = begun_.at(number);
  const bool begins = begun.position == 0 && begun.frames == 0;
  if (begins && begun.message.on_begin) begun.message.on_begin(begun.message.header);
  if (begins) lend_payloads(begun);
  const std::size_t end = std::min(begun.size, begun.position + kPieceBytes);
  const std::string table = begins ? table_of(begun) : std::string();
  Frame frame;
  append_bytes(frame.parts, begun, begun.position, end);
  FrameHeader header;
  header.kind = begins ? FrameKind::kBegin : FrameKind::kData;
  header.length = static_cast<std::uint32_t>(table.size() + end - begun.position);
  header.message = number;
  header.acknowledged = acknowledged;
  header.released = released;
  frame.head = encode(header) + table;
  frame.size = kFrameHeaderBytes + header.length;
  frame.message = number;
  begun.position = end;
  ++begun.frames;
  frames_.push_back(std::move(frame));
}

void Outbox::make_frame(std::uint64_t acknowledged, std::uint64_t released) {
  if (!controls_.empty()) {
    FrameHeader header;
    header.kind = controls_.front();
    header.acknowledged = acknowledged;
    header.released = released;
    controls_.pop_front();
    frames_.push_back({encode(header), {}, kFrameHeaderBytes, 0});
    return;
  }
  const Turn turn = next_turn();
  const bool short_ones_wait = (turn == kShortCall || turn == kShortAnswer) && short_bytes_ < kPieceBytes;
  std::uint64_t number = 0;
  if (!cutting_.empty() && !short_ones_wait) {
    number = cutting_.front();
    cutting_.pop_front();
  } else if (!resend_.empty()) {  // one after the other: two may be of one channel
    number = resend_.front();
    resend_.pop_front();
  } else {
    number = begin_next();
  }
  cut(number, acknowledged, released);
  const Begun& begun = begun_.at(number);
  // A long one that goes by handle has had its turn too.
  if (begun.message.num_bytes() <= kPieceBytes) {
    short_bytes_ += begun.size + kKeepBytes;
  } else {
    short_bytes_ = 0;
  }
  if (begun.position < begun.size) {
    cutting_.push_back(number);
    return;
  }
  end_cutting(begun.message.channel);
}

// Of a message of the channel all is in frames, or none of it is needed any more.
void Outbox::end_cutting(std::uint32_t channel) {
  const auto uncut = num_uncut_.find(channel);
  if (--uncut->second > 0) return;
  num_uncut_.erase(uncut);
  put_in_turn(channel);
}

bool Outbox::gather(std::vector<iovec>& parts, std::uint64_t acknowledged, std::uint64_t released,
                    std::size_t most_bytes, std::size_t most_parts) {
  std::size_t bytes = 0, skipped = first_written_;
  bool is_new = false;
  for (std::size_t i = 0; bytes < most_bytes && parts.size() < most_parts; ++i) {
    if (i == frames_.size()) {
      if (!may_make_frame()) break;
      make_frame(acknowledged, released);
      is_new = true;
    }
    const auto append = [&](const iovec& part) {
      const std::size_t skip = std::min(skipped, part.iov_len);
      skipped -= skip;
      if (part.iov_len > skip)
        parts.push_back(part_of(static_cast<const std::byte*>(part.iov_base) + skip, part.iov_len - skip));
    };
    const Frame& frame = frames_[i];
    append(part_of(frame.head.data(), frame.head.size()));
    for (const iovec& part : frame.parts) append(part);
    bytes += frame.size;
  }
  return is_new;
}

void Outbox::written(std::size_t num_bytes) {
  first_written_ += num_bytes;
  while (!frames_.empty() && first_written_ >= frames_.front().size) {
    first_written_ -= frames_.front().size;
    if (frames_.front().message != 0) {
      Begun& begun = begun_.at(frames_.front().message);
      --begun.frames;
      begun.was_sent = begun.was_sent || begun.is_sent();
    }
    frames_.pop_front();
  }
}

std::size_t Outbox::num_unsent() const {
  const auto is_unsent = [](const auto& entry) { return !entry.second.is_sent(); };
  return num_queued_ + static_cast<std::size_t>(std::count_if(begun_.begin(), begun_.end(), is_unsent));
}

std::size_t Outbox::bytes_unsent() const {
  std::size_t sum = 0;
  for (const auto& [channel, queue] : queues_) {
    for (const Queued& queued : queue) sum += queued.message.num_bytes();
  }
  for (const auto& [number, begun] : begun_) sum += begun.size - begun.position;
  for (const Frame& frame : frames_) sum += frame.size;
  return sum - first_written_;
}

void Outbox::on_peer_state(std::uint64_t message, std::uint64_t released) {
  while (!begun_.empty() && begun_.begin()->first <= message) {
    const auto& [number, begun] = *begun_.begin();
    if (!begun.was_sent) {
      throw CommError("net.acknowledge",
                      base::concat("message ", number, " was acknowledged before all of it was sent"));
    }
    // It had come over an earlier link. What is in frames has to be written; else it is not sent again.
    if (!begun.is_sent()) {
      if (begun.position > 0 || begun.frames > 0) break;
      resend_.erase(std::find(resend_.begin(), resend_.end(), number));
      end_cutting(begun.message.channel);
    }
    begun_.erase(begun_.begin());
  }
  if (message >= next_number_ || released > begun_cost_) {
    throw CommError("net.acknowledge", base::concat("message ", message, " was acknowledged and ", released,
                                                    " bytes released, but ", next_number_ - 1,
                                                    " messages and ", begun_cost_, " bytes were sent"));
  }
  released_ = std::max(released_, released);
}

void Outbox::restart(std::uint64_t received_by_peer) {
  if (received_by_peer >= next_number_) {
    throw CommError("net.acknowledge",
                    base::concat("the peer has message ", received_by_peer, " of ", next_number_ - 1));
  }
  handles_.reset();
  frames_.clear();
  first_written_ = 0;
  controls_.clear();
  cutting_.clear();
  resend_.clear();
  begun_.erase(begun_.begin(), begun_.upper_bound(received_by_peer));
  num_uncut_.clear();
  for (auto& [number, begun] : begun_) {
    begun.position = 0;
    begun.frames = 0;
    resend_.push_back(number);
    ++num_uncut_[begun.message.channel];
  }
  for (auto& turns : turns_) turns.clear();
  for (const auto& [channel, queue] : queues_) {
    if (!num_uncut_.contains(channel)) put_in_turn(channel);
  }
}

std::vector<Message> Outbox::take_all() {
  std::vector<Message> messages;
  // A peer that has taken a lease has the whole message, and may write its memory by now.
  const auto was_taken = [](const auto& lent) { return lent && lent->lease && !lent->lease->withdraw(); };
  for (auto& [number, begun] : begun_) {
    if (std::any_of(begun.lent.begin(), begun.lent.end(), was_taken)) continue;
    messages.push_back(std::move(begun.message));
  }
  for (auto& [channel, queue] : queues_) {
    for (Queued& queued : queue) messages.push_back(std::move(queued.message));
  }
  *this = Outbox(window_);
  return messages;
}

}  // namespace cohort::net
