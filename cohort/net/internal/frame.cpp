#include "cohort/net/internal/frame.h"

#include "cohort/base/error.h"
#include "cohort/net/internal/bytes.h"

namespace cohort::net {

std::string encode(const FrameHeader& header) {
  std::string bytes;
  bytes.reserve(kFrameHeaderBytes);
  put(bytes, header.length);
  put(bytes, static_cast<std::uint32_t>(header.kind));
  put(bytes, header.message);
  put(bytes, header.acknowledged);
  put(bytes, header.released);
  return bytes;
}

FrameHeader decode_frame_header(std::span<const std::byte, kFrameHeaderBytes> bytes) {
  ByteReader reader({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  FrameHeader header;
  header.length = reader.number<std::uint32_t>();
  const auto kind = reader.number<std::uint32_t>();
  header.message = reader.number<std::uint64_t>();
  header.acknowledged = reader.number<std::uint64_t>();
  header.released = reader.number<std::uint64_t>();
  if (kind < 1 || kind > 5)
    throw CommError("net.frame", base::concat("a frame is of kind ", kind, ", expected 1 to 5"));
  header.kind = static_cast<FrameKind>(kind);
  const bool has_data = header.kind == FrameKind::kBegin || header.kind == FrameKind::kData;
  const std::size_t most =
      has_data ? kPieceBytes + (header.kind == FrameKind::kBegin ? kMaxTableBytes : 0) : 0;
  if (header.length > most) {
    throw CommError("net.frame", base::concat("a frame of kind ", kind, " has ", header.length,
                                              " bytes, expected at most ", most));
  }
  return header;
}

}  // namespace cohort::net
