#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

/// What processes of a job send each other.
namespace cohort::net {

/// Memory, and what keeps it alive.
struct Payload {
  std::shared_ptr<const void> owner;  ///< null: the memory outlives the message by itself
  std::span<const std::byte> bytes;
  /// The receiver may have this memory itself, so nobody here writes it any more. It goes by handle where it
  /// lies in a block of Node::allocate_shared(), or in one that came from the same peer; else it is copied.
  /// Of a message that came: it came so, and this process may write it.
  bool moves = false;
};

/// A short part and any number of payloads, which stay as they are until the message is gone.
struct Message {
  std::uint32_t channel = 0;  ///< messages of one channel arrive in the order in which they were sent
  std::string header;
  std::vector<Payload> payloads;
  /// Of a message that came: while it lives, the bytes count towards what the sender may have on its way.
  /// Drop it once the message is in the hands of whom it is for.
  std::shared_ptr<void> credit;
  /// Called each time that the message begins to be written: once it has room, and again over another link.
  /// So its header can say what is true then. Must be quick, must not throw, and calls nothing of the node,
  /// whose mutex is held.
  std::function<void(std::span<char> header)> on_begin;

  /// Size of the header and all payloads.
  std::size_t num_bytes() const {
    std::size_t sum = header.size();
    for (const Payload& payload : payloads) sum += payload.bytes.size();
    return sum;
  }
};

/// Channels from this number on are for answers: what the receiver has asked for. Their messages do not count
/// towards what the sender may have on its way, so they come also while the receiver has no room for what it
/// has not asked for.
inline constexpr std::uint32_t kAnswerChannels = std::uint32_t{1} << 31;

/// The most payloads of one message, and the most bytes of its header.
inline constexpr std::size_t kMaxPayloads = 16'000;
inline constexpr std::size_t kMaxHeaderBytes = std::size_t{64} << 20;

/// A payload of fewer bytes is copied, wherever it lies.
inline constexpr std::size_t kLeastBytesByHandle = std::size_t{64} << 10;

}  // namespace cohort::net
