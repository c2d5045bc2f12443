#pragma once

#include <cstddef>

#include "cohort/base/files/fd.h"
#include "cohort/base/files/shared_memory.h"
#include "cohort/net/internal/ring.h"
#include "cohort/net/internal/role.h"

namespace cohort::net {

/// The bytes of each direction of a link. More than this cannot be overtaken by a short message.
inline constexpr std::size_t kRingBytes = 128 * 1024;

/// A link of two processes of one host: two rings in memory that both map. Who connects makes the memory, and
/// hands its descriptor over during the handshake. The socket stays: a byte over it is a wake-up, and its end
/// is the link's.
class SharedLink {
 public:
  /// Memory for a new link. Throws: SystemError.
  static base::SharedMemory make_memory();
  /// Maps what the other side made. Throws: SystemError where it is no such memory.
  static base::SharedMemory map_memory(const base::Fd& fd);

  SharedLink(base::SharedMemory memory, Role role);

  RingWriter& writer() { return writer_; }
  RingReader& reader() { return reader_; }

 private:
  const base::SharedMemory memory_;
  RingWriter writer_;
  RingReader reader_;
};

}  // namespace cohort::net
