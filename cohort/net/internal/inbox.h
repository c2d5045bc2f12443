#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "cohort/net/internal/frame.h"
#include "cohort/net/internal/handles.h"
#include "cohort/net/message.h"

namespace cohort::net {

/// Bytes of messages that came and have been used: what `Message::credit` gives back.
struct Released {
  /// Called by the thread that gives a credit back, once so many bytes are released that the peer does not
  /// know of.
  static constexpr std::uint64_t kWakeBytes = 1 << 20;
  std::function<void()> wake;

  std::atomic<std::uint64_t> bytes{0};
  std::atomic<std::uint64_t> told{0};  ///< what the peer knows of
};

/// Gives memory for a payload that comes, aligned to 64 bytes.
using Allocate = std::function<std::shared_ptr<std::byte>(std::size_t num_bytes)>;
std::shared_ptr<std::byte> allocate_aligned(std::size_t num_bytes);

/// What comes from a peer: bytes to frames to messages. Each message comes out once, and those of a channel
/// in order.
///
/// Reads no clock and does no input. Whatever it throws is the peer's fault, and ends the session.
/// Threads: one at a time; credits are given back by any.
class Inbox {
 public:
  /// `window`: bytes that may be on their way (cost_of()); a message that is larger comes alone. Answers do
  /// not count.
  Inbox(std::size_t window, Allocate allocate, std::shared_ptr<Released> released);

  /// Takes bytes in any pieces. Calls `on_header` for each frame that has begun, and appends messages that
  /// are whole. Throws: CommError for what no peer of this version sends, for more bytes than it may send,
  /// and where there is no memory for a message.
  void consume(std::span<const std::byte> bytes, const std::function<void(const FrameHeader&)>& on_header,
               std::vector<Message>& messages);

  /// Where the next bytes go, if many go to one place: read them there, and say how many with filled(). Else
  /// empty.
  std::span<std::byte> target();
  void filled(std::size_t num_bytes, std::vector<Message>& messages);

  /// There is a new link: what came in part comes again. Without `handles` none may come over it.
  void restart(std::shared_ptr<const Handles> handles = nullptr);

  /// All messages up to this number have come.
  std::uint64_t acknowledged() const { return acknowledged_; }

 private:
  struct Partial {
    Message message;
    std::vector<std::pair<std::byte*, std::size_t>> parts;  // header and payloads
    std::size_t part = 0, position = 0;                     // where the next byte goes
    std::size_t left = 0;
    // Payloads that come by handle, and the handles' bytes.
    struct Lent {
      std::size_t payload = 0, size = 0;
      std::array<char, kHandleBytes> bytes{};
    };
    std::vector<Lent> lent;
  };
  enum class State { kHeader, kTableSize, kTable, kBody };

  void begin_frame(const FrameHeader& header);
  void begin_message();
  void end_frame(std::vector<Message>& messages);
  bool has(std::uint64_t number) const { return number <= acknowledged_ || whole_.contains(number); }
  std::span<std::byte> place();
  void advance(std::size_t num_bytes);
  void deliver(std::uint64_t number, std::vector<Message>& messages);

  const std::size_t window_;
  const Allocate allocate_;
  const std::shared_ptr<Released> released_;
  std::shared_ptr<const Handles> handles_;
  std::uint64_t begun_cost_ = 0;  // of messages that came, whole or in part, once each
  std::uint64_t acknowledged_ = 0, last_begun_ = 0;
  std::set<std::uint64_t> whole_;  // above acknowledged_
  std::map<std::uint64_t, Partial> partials_;
  std::map<std::uint64_t, std::size_t> counted_;  // messages not whole whose bytes count already: their cost
  // The frame that comes.
  State state_ = State::kHeader;
  FrameHeader header_;
  std::string collected_;  // of the header or the table
  std::size_t wanted_ = kFrameHeaderBytes;
  std::size_t frame_left_ = 0;
  Partial* current_ = nullptr;  // null: its bytes are dropped
};

}  // namespace cohort::net
