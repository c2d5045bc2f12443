// Fuzzes what reads bytes from the network: a listener that a stranger talks to, a session after its
// handshake, and a caller whose other side does not know the secret. Any bytes give messages within the
// window, or a CommError; nobody is trusted without the secret.
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/net/internal/handles.h"
#include "cohort/net/internal/handshake.h"
#include "cohort/net/internal/session.h"

using namespace cohort::net;

namespace {

constexpr std::size_t kWindow = 1 << 20;

void check(bool holds) {
  if (!holds) std::abort();
}

std::shared_ptr<std::byte> allocate(std::size_t num_bytes) {
  if (num_bytes > 4 * kWindow) throw std::bad_alloc();
  return allocate_aligned(num_bytes);
}

// Of both sides: a block of this one's is with the other side, and slot 1 of the other's has a block that is
// on its way here.
struct Heaps {
  Heaps() {
    const auto block = own->allocate(kLeastBytesByHandle), there = theirs->allocate(kLeastBytesByHandle);
    lease = own->lend({block.get(), kLeastBytesByHandle}, peer);
    std::vector<std::shared_ptr<void>> before{theirs->lend({there.get(), 1}, peer)};
    coming = theirs->lend({there.get(), kLeastBytesByHandle}, peer);
    check(lease && coming);
    handles =
        std::make_shared<Handles>(own, MappedHeap::map(cohort::base::Fd(::dup(theirs->descriptor()))), peer);
  }
  const std::shared_ptr<Holder> peer = std::make_shared<Holder>(::getpid(), "");
  const std::shared_ptr<SharedHeap> own = std::make_shared<SharedHeap>(kWindow, kWindow),
                                    theirs = std::make_shared<SharedHeap>(kWindow, kWindow);
  std::shared_ptr<SharedHeap::Lease> lease, coming;
  std::shared_ptr<const Handles> handles;
};

void read_session(std::span<const std::byte> bytes, bool has_handles) {
  const std::optional<Heaps> heaps = has_handles ? std::optional<Heaps>(std::in_place) : std::nullopt;
  const std::shared_ptr<const Handles> handles = heaps ? heaps->handles : nullptr;
  const Time now = Time() + std::chrono::hours(1);
  SessionOptions options;
  options.window = kWindow;
  Session session(Role::kListener, options, allocate, nullptr, now);
  for (int i = 0; i < 3; ++i) {
    Message message;
    message.header = "ours";
    session.send(std::move(message));
  }
  session.link_up(0, now, handles);
  std::vector<iovec> parts;
  session.gather(parts);
  std::size_t size = 0;
  for (const iovec& part : parts) size += part.iov_len;
  session.written(size, now);

  std::vector<Message> messages;
  while (!bytes.empty() && !session.ended()) {
    // The first byte of each piece says how long it is, and whether it is read in place.
    const auto first = std::to_integer<std::size_t>(bytes[0]);
    bytes = bytes.subspan(1);
    const std::size_t length = std::min(bytes.size(), first * first / 8 + 1);
    const std::span<std::byte> target = session.target();
    if (first % 2 == 0 && !target.empty()) {
      const std::size_t in_place = std::min(length, target.size());
      std::memcpy(target.data(), bytes.data(), in_place);
      session.filled(in_place, now, messages);
      bytes = bytes.subspan(in_place);
    } else {
      session.consume(bytes.first(length), now, messages);
      bytes = bytes.subspan(length);
    }
    std::size_t held = 0;
    for (const Message& message : messages) {
      held += message.num_bytes();
      for (const Payload& payload : message.payloads) {
        if (payload.moves)
          check(has_handles && payload.bytes.front() == payload.bytes.back());  // it can be read
      }
    }
    check(messages.size() <= 1 || held <= kWindow);
    if (first % 7 == 0) messages.clear();
    if (first % 11 == 0 && !session.ended()) {
      session.link_down(now);
      session.link_up(0, now, first % 2 == 0 ? handles : nullptr);
    }
  }
}

void talk_to(Handshake& handshake, std::string_view bytes, bool knows_secret) {
  while (!bytes.empty() && !handshake.is_done()) {
    const std::size_t length = std::min<std::size_t>(bytes.size(), 1 + static_cast<unsigned char>(bytes[0]));
    handshake.feed(bytes.substr(0, length));
    bytes.remove_prefix(length);
    if (handshake.is_time_for_hello()) handshake.set_hello(Hello());
    handshake.take_output();
    check(knows_secret || !handshake.is_trusted());
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  static const cohort::base::Secret secret = cohort::base::Secret::make();
  try {
    switch (data[0] % 5) {
      case 0:
      case 4:
        read_session(std::as_bytes(std::span(bytes)), data[0] % 5 == 4);
        break;
      case 1: {
        Handshake listener(Role::kListener, std::nullopt, std::string(32, 'a'));
        talk_to(listener, bytes, true);
        break;
      }
      case 2: {
        Handshake listener(Role::kListener, secret, std::string(32, 'a'));
        talk_to(listener, bytes, false);
        break;
      }
      case 3: {
        Handshake caller(Role::kCaller, secret, std::string(32, 'a'));
        talk_to(caller, bytes, false);
        break;
      }
    }
  } catch (const cohort::CommError&) {
  }
  return 0;
}
