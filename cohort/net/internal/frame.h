#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

/// A frame: 32 bytes that say what follows, and up to 256 KiB of a message.
namespace cohort::net {

enum class FrameKind : std::uint8_t {
  kBegin = 1,    ///< of a message: its channel, the lengths of its parts, then their first bytes
  kData = 2,     ///< the next bytes of a message that has begun
  kAck = 3,      ///< nothing: it is sent for what its header says, and to be heard
  kGoodbye = 4,  ///< the sender leaves: nothing follows
  kMapped = 5,   ///< nothing: over this link the sender takes handles of the other side's heap
};

struct FrameHeader {
  FrameKind kind = FrameKind::kAck;
  std::uint32_t length = 0;        ///< bytes that follow
  std::uint64_t message = 0;       ///< its number, from 1 on
  std::uint64_t acknowledged = 0;  ///< all messages of the other side up to this number have come
  std::uint64_t released = 0;      ///< bytes of the other side's messages that have been used, all together
};

inline constexpr std::size_t kFrameHeaderBytes = 32;
/// The most bytes of a message in a frame.
inline constexpr std::size_t kPieceBytes = 256 * 1024;
/// The most bytes before them in a frame that begins a message.
inline constexpr std::size_t kMaxTableBytes = 160 * 1024;
/// In the table, beside the length of a payload that goes by handle: the handle is among the bytes in its
/// place.
inline constexpr std::uint64_t kByHandle = std::uint64_t{1} << 63;

std::string encode(const FrameHeader& header);
/// Throws: CommError for a kind that is not known or a length that no frame has.
FrameHeader decode_frame_header(std::span<const std::byte, kFrameHeaderBytes> bytes);

}  // namespace cohort::net
