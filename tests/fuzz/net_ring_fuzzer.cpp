// Fuzzes what another process of this host may do to the memory that it shares with this one: counters, flags
// and bytes of both rings, also while this side reads them. Any of it gives messages within the window, or a
// CommError.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/net/internal/ring.h"
#include "cohort/net/internal/session.h"

using namespace cohort::net;

namespace {

constexpr std::size_t kWindow = 1 << 20, kSmallRing = 512;

void check(bool holds) {
  if (!holds) std::abort();
}

class Input {
 public:
  explicit Input(std::span<const std::byte> bytes) : bytes_(bytes) {}
  bool empty() const { return bytes_.empty(); }
  std::span<const std::byte> take(std::size_t size) {
    const std::span<const std::byte> taken = bytes_.first(std::min(size, bytes_.size()));
    bytes_ = bytes_.subspan(taken.size());
    return taken;
  }
  /// Bytes that are missing count as 0.
  std::uint64_t number(std::size_t size) {
    std::uint64_t value = 0;
    const std::span<const std::byte> taken = take(size);
    if (!taken.empty()) std::memcpy(&value, taken.data(), taken.size());
    return value;
  }

 private:
  std::span<const std::byte> bytes_;
};

struct Ring {
  RingState state;
  std::array<std::byte, kSmallRing> bytes{};
};

// This side of a link, which does what Loop::read_ring() and write_ring() do, and the other one, which does
// what it likes.
class Link {
 public:
  explicit Link(bool changes_bytes)
      : changes_bytes_(changes_bytes),
        session_(
            Role::kListener, options(), [this](std::size_t size) { return allocate(size); }, nullptr, now_) {
    for (int i = 0; i < 3; ++i) {
      Message message;
      message.header.assign(kSmallRing, 'm');
      session_.send(std::move(message));
    }
    session_.link_up(0, now_);
  }

  bool is_over() const { return session_.ended().has_value(); }
  RingState& state_read() { return in_.state; }
  RingState& state_written() { return out_.state; }

  void read() {
    for (int i = 0; i < 8 && !is_over(); ++i) {
      const std::span<const std::byte> bytes = reader_.peek();
      if (bytes.empty()) break;
      check(bytes.data() >= in_.bytes.data() && bytes.size() <= kSmallRing);
      check(bytes.data() + bytes.size() <= in_.bytes.data() + kSmallRing);
      session_.consume(bytes, now_, messages_);
      reader_.consume(bytes.size());
      reader_.take_wakeup();
    }
    std::size_t held = 0, calls = 0;
    for (const Message& message : messages_) {
      if (message.channel >= kAnswerChannels) continue;
      held += message.num_bytes();
      ++calls;
    }
    check(calls <= 1 || held <= kWindow);
  }
  void write() {
    std::vector<iovec> parts;
    while (session_.wants_to_write()) {
      parts.clear();
      session_.gather(parts);
      if (parts.empty()) break;
      const std::size_t size = writer_.write(parts);
      check(size <= kSmallRing);
      if (size > 0) session_.written(size, now_);
      if (size == 0 && writer_.wait_for_room()) break;
    }
    writer_.take_wakeup();
  }
  void sleep() {
    if (reader_.sleep()) check(!reader_.has_bytes());
    reader_.wake();
  }
  void pass_time(std::uint64_t ms) {
    now_ += std::chrono::milliseconds(ms);
    session_.tick(now_);
  }
  void drop_messages() { messages_.clear(); }

  /// The other side, by the rules.
  void peer_writes(std::span<const std::byte> bytes) {
    const iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
    peer_writer_.write({&part, 1});
  }
  void peer_reads() { peer_reader_.consume(peer_reader_.peek().size()); }
  /// Against them.
  void peer_overwrites(std::size_t at, std::span<const std::byte> bytes) {
    const std::size_t begin = at % kSmallRing, size = std::min(bytes.size(), kSmallRing - begin);
    std::copy_n(bytes.begin(), size, in_.bytes.begin() + static_cast<std::ptrdiff_t>(begin));
  }

 private:
  static SessionOptions options() {
    SessionOptions options;
    options.window = kWindow;
    return options;
  }
  // Called in the middle of a frame: what this side has read once may be something else now.
  std::shared_ptr<std::byte> allocate(std::size_t num_bytes) {
    if (num_bytes > 4 * kWindow) throw std::bad_alloc();
    if (changes_bytes_) {
      for (std::byte& byte : in_.bytes) byte = ~byte;
    }
    return allocate_aligned(num_bytes);
  }

  const bool changes_bytes_;
  Time now_ = Time() + std::chrono::hours(1);
  Ring in_, out_;
  RingReader reader_{in_.state, in_.bytes}, peer_reader_{out_.state, out_.bytes};
  RingWriter writer_{out_.state, out_.bytes}, peer_writer_{in_.state, in_.bytes};
  std::vector<Message> messages_;
  Session session_;
};

void run(Input input) {
  const auto link = std::make_unique<Link>(input.number(1) % 2 == 1);
  while (!input.empty() && !link->is_over()) {
    switch (input.number(1) % 12) {
      case 0:
        link->peer_writes(input.take(input.number(1)));
        break;
      case 1:
        link->read();
        break;
      case 2:
        link->write();
        break;
      case 3:
        link->peer_reads();
        break;
      case 4:
        link->state_read().written = input.number(8);
        break;
      case 5:
        link->state_written().read = input.number(8);
        break;
      case 6:
        link->state_written().written = input.number(8);
        break;
      case 7: {
        const std::uint64_t flags = input.number(1);
        RingState& state = flags % 2 == 0 ? link->state_read() : link->state_written();
        state.reader_sleeps = static_cast<std::uint32_t>(flags / 2 % 2);
        state.writer_waits = static_cast<std::uint32_t>(flags / 4 % 2);
        break;
      }
      case 8: {
        const std::size_t at = input.number(2);
        link->peer_overwrites(at, input.take(input.number(1)));
        break;
      }
      case 9:
        link->sleep();
        break;
      case 10:
        link->pass_time(input.number(1));
        break;
      case 11:
        link->drop_messages();
        break;
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    run(Input(std::as_bytes(std::span(data, size))));
  } catch (const cohort::CommError&) {
  }
  return 0;
}
