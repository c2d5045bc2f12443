// A machine of four states: a frame's header, the size of its table, the table, the bytes. The first three
// are collected in a small buffer. Bytes of a message go straight to where they belong.
//
// Every length is checked against what the peer may still send before memory is taken for it. A message that
// came before is known by its number, and its bytes are dropped. A message that had come in part when the
// link broke comes again from its first byte, and its bytes count once.
#include "cohort/net/internal/inbox.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/net/internal/bytes.h"
#include "cohort/net/internal/outbox.h"

namespace cohort::net {
namespace {

constexpr std::size_t kTableSizeBytes = 8;
constexpr std::size_t kWorthReadingInPlace = 16 * 1024;

[[noreturn]] void reject(const std::string& what) {
  throw CommError("net.receive", what);
}

}  // namespace

std::shared_ptr<std::byte> allocate_aligned(std::size_t num_bytes) {
  constexpr std::size_t kAlignment = 64;
  // aligned_alloc() wants a multiple of the alignment, and the sum may wrap around.
  const std::size_t rounded =
      (std::max<std::size_t>(num_bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  void* const memory = rounded < num_bytes ? nullptr : std::aligned_alloc(kAlignment, rounded);
  if (memory == nullptr) throw std::bad_alloc();
  return {static_cast<std::byte*>(memory), [](std::byte* bytes) { std::free(bytes); }};
}

Inbox::Inbox(std::size_t window, Allocate allocate, std::shared_ptr<Released> released)
    : window_(window), allocate_(std::move(allocate)), released_(std::move(released)) {}

void Inbox::consume(std::span<const std::byte> bytes,
                    const std::function<void(const FrameHeader&)>& on_header,
                    std::vector<Message>& messages) {
  while (!bytes.empty()) {
    if (state_ == State::kBody) {
      std::size_t taken = std::min(bytes.size(), frame_left_);
      if (current_ != nullptr) {
        const std::span<std::byte> to = place();
        taken = std::min(taken, to.size());
        std::memcpy(to.data(), bytes.data(), taken);
        advance(taken);
      }
      frame_left_ -= taken;
      bytes = bytes.subspan(taken);
      if (frame_left_ == 0) end_frame(messages);
      continue;
    }
    const std::size_t taken = std::min(bytes.size(), wanted_ - collected_.size());
    collected_.append(reinterpret_cast<const char*>(bytes.data()), taken);
    bytes = bytes.subspan(taken);
    if (collected_.size() < wanted_) return;
    switch (state_) {
      case State::kHeader:
        header_ = decode_frame_header(std::span<const std::byte, kFrameHeaderBytes>(
            reinterpret_cast<const std::byte*>(collected_.data()), kFrameHeaderBytes));
        on_header(header_);
        begin_frame(header_);
        break;
      case State::kTableSize: {
        ByteReader reader(collected_);
        reader.number<std::uint32_t>();
        const auto count = reader.number<std::uint32_t>();
        if (count < 1 || count > 1 + kMaxPayloads) reject(base::concat("a message of ", count, " parts"));
        // What was collected stays: begin_message() reads channel and count again.
        wanted_ += 8 * static_cast<std::size_t>(count);
        if (wanted_ > header_.length) reject("the table of a message is longer than its frame");
        state_ = State::kTable;
        break;
      }
      case State::kTable:
        begin_message();
        break;
      case State::kBody:
        break;
    }
    if (state_ == State::kBody && frame_left_ == 0) end_frame(messages);
  }
}

void Inbox::begin_frame(const FrameHeader& header) {
  collected_.clear();
  frame_left_ = header.length;
  current_ = nullptr;
  switch (header.kind) {
    case FrameKind::kBegin:
      if (header.length < kTableSizeBytes) reject("a frame that begins a message has no table");
      state_ = State::kTableSize;
      wanted_ = kTableSizeBytes;
      return;
    case FrameKind::kData:
      if (!has(header.message)) {
        const auto found = partials_.find(header.message);
        if (found == partials_.end())
          reject(base::concat("bytes of message ", header.message, ", which has not begun"));
        current_ = &found->second;
        if (frame_left_ > current_->left) reject("a message is longer than its table says");
      }
      break;
    case FrameKind::kAck:
    case FrameKind::kGoodbye:
    case FrameKind::kMapped:
      break;
  }
  state_ = State::kBody;
}

void Inbox::begin_message() {
  const std::uint64_t number = header_.message;
  frame_left_ = header_.length - collected_.size();
  state_ = State::kBody;
  if (number == 0) reject("a message has no number");
  if (has(number)) return;  // its bytes are dropped
  // A message gets its number when it begins, so the peer leaves none out.
  if (number > last_begun_ + 1) {
    reject(base::concat("message ", number, " begins after message ", last_begun_));
  }
  if (partials_.contains(number)) reject(base::concat("message ", number, " begins twice"));
  ByteReader reader(collected_);
  Partial partial;
  partial.message.channel = reader.number<std::uint32_t>();
  std::vector<std::size_t> sizes(reader.number<std::uint32_t>());
  std::size_t size = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const auto word = reader.number<std::uint64_t>();
    sizes[i] = word & ~kByHandle;
    if (sizes[i] > (std::size_t{1} << 46) - size) reject("a message is longer than 64 TiB");
    size += sizes[i];
    partial.left += sizes[i];
    if (word == sizes[i]) continue;
    if (i == 0) reject("the header of a message comes by handle");
    if (!handles_) reject("a handle comes over a link that has none");
    partial.lent.push_back({i - 1, sizes[i], {}});
    partial.left -= sizes[i];
    partial.left += kHandleBytes;
  }
  if (sizes[0] > kMaxHeaderBytes) reject(base::concat("the header of a message has ", sizes[0], " bytes"));
  if (frame_left_ > partial.left) reject("a message is longer than its table says");
  // A message that comes again over a new link has been counted: restart() keeps `counted_`.
  if (!counted_.contains(number)) {
    const std::uint64_t in_use = begun_cost_ - released_->bytes.load(std::memory_order_acquire);
    const std::size_t cost = cost_of(partial.message.channel, size);
    if (cost != 0 && in_use != 0 && in_use + cost > window_) {
      reject(base::concat("message ", number, " of ", size, " bytes comes while ", in_use,
                          " bytes are not used yet, but ", window_, " may be"));
    }
    counted_[number] = cost;
    begun_cost_ += cost;
  }
  last_begun_ = std::max(last_begun_, number);
  try {
    partial.message.header.resize(sizes[0]);
    auto lent = partial.lent.begin();
    for (std::size_t i = 1; i < sizes.size(); ++i) {
      if (lent != partial.lent.end() && lent->payload == i - 1) {
        partial.parts.emplace_back(reinterpret_cast<std::byte*>(lent->bytes.data()), kHandleBytes);
        partial.message.payloads.emplace_back();
        ++lent;
        continue;
      }
      std::shared_ptr<std::byte> memory = allocate_(sizes[i]);
      partial.parts.emplace_back(memory.get(), sizes[i]);
      partial.message.payloads.push_back({memory, {memory.get(), sizes[i]}});
    }
  } catch (const std::bad_alloc&) {
    reject(base::concat("there is no memory for a message of ", size, " bytes"));
  }
  current_ = &partials_.emplace(number, std::move(partial)).first->second;
  // The header's bytes may lie in the string itself, which has moved.
  current_->parts.emplace(current_->parts.begin(),
                          reinterpret_cast<std::byte*>(current_->message.header.data()), sizes[0]);
}

std::span<std::byte> Inbox::place() {
  Partial& partial = *current_;
  // An empty payload is a part too, and no byte goes there.
  while (partial.position == partial.parts[partial.part].second) {
    ++partial.part;
    partial.position = 0;
  }
  const auto& [data, size] = partial.parts[partial.part];
  return {data + partial.position, size - partial.position};
}

void Inbox::advance(std::size_t num_bytes) {
  current_->position += num_bytes;
  current_->left -= num_bytes;
}

std::span<std::byte> Inbox::target() {
  if (state_ != State::kBody || current_ == nullptr || frame_left_ == 0) return {};
  const std::span<std::byte> to = place();
  const std::size_t size = std::min(to.size(), frame_left_);
  return size < kWorthReadingInPlace ? std::span<std::byte>() : to.first(size);
}

void Inbox::filled(std::size_t num_bytes, std::vector<Message>& messages) {
  advance(num_bytes);
  frame_left_ -= num_bytes;
  if (frame_left_ == 0) end_frame(messages);
}

void Inbox::end_frame(std::vector<Message>& messages) {
  const bool is_whole = current_ != nullptr && current_->left == 0;
  current_ = nullptr;
  state_ = State::kHeader;
  collected_.clear();
  wanted_ = kFrameHeaderBytes;
  if (is_whole) deliver(header_.message, messages);
}

void Inbox::deliver(std::uint64_t number, std::vector<Message>& messages) {
  const auto found = partials_.find(number);
  Message message = std::move(found->second.message);
  // Not before the message is whole, and once: what came in part comes again, with the same handles.
  for (const Partial::Lent& lent : found->second.lent) {
    message.payloads[lent.payload] =
        handles_->redeem(decode_handle({lent.bytes.data(), lent.bytes.size()}), lent.size);
  }
  partials_.erase(found);
  const std::size_t cost = counted_.at(number);
  counted_.erase(number);
  // The credit is a deleter without an object: it runs once the last copy of the credit is gone, on any
  // thread.
  message.credit = std::shared_ptr<void>(released_.get(), [released = released_, cost](void*) {
    const std::uint64_t bytes = released->bytes.fetch_add(cost, std::memory_order_acq_rel) + cost;
    if (bytes - released->told.load(std::memory_order_relaxed) >= Released::kWakeBytes && released->wake)
      released->wake();
  });
  messages.push_back(std::move(message));
  // Messages of different channels become whole out of order; the peer is told of those without a gap.
  whole_.insert(number);
  while (!whole_.empty() && *whole_.begin() == acknowledged_ + 1) {
    ++acknowledged_;
    whole_.erase(whole_.begin());
  }
}

void Inbox::restart(std::shared_ptr<const Handles> handles) {
  handles_ = std::move(handles);
  partials_.clear();
  current_ = nullptr;
  state_ = State::kHeader;
  collected_.clear();
  wanted_ = kFrameHeaderBytes;
  frame_left_ = 0;
}

}  // namespace cohort::net
