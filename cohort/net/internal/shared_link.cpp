#include "cohort/net/internal/shared_link.h"

#include <new>

#include "cohort/base/error.h"

namespace cohort::net {
namespace {

// A page of states, then the caller's bytes, then the listener's.
constexpr std::size_t kHeaderBytes = 4096, kMemoryBytes = kHeaderBytes + 2 * kRingBytes;
static_assert(2 * sizeof(RingState) <= kHeaderBytes);

// Which of the two rings a side writes, or reads.
std::size_t ring_of(Role role, bool writes) {
  return (role == Role::kCaller) == writes ? 0 : 1;
}
RingState& state_of(const base::SharedMemory& memory, std::size_t ring) {
  return std::launder(reinterpret_cast<RingState*>(memory.data()))[ring];
}
std::span<std::byte> bytes_of_ring(const base::SharedMemory& memory, std::size_t ring) {
  return {memory.data() + kHeaderBytes + ring * kRingBytes, kRingBytes};
}

}  // namespace

base::SharedMemory SharedLink::make_memory() {
  base::SharedMemory memory = base::SharedMemory::create("net.shared_link", kMemoryBytes, true);
  new (memory.data()) RingState[2];
  return memory;
}

base::SharedMemory SharedLink::map_memory(const base::Fd& fd) {
  base::SharedMemory memory = base::SharedMemory::map("net.shared_link", fd);
  if (memory.size() == kMemoryBytes) return memory;
  throw SystemError("net.shared_link", base::concat("the memory of a link has ", memory.size(),
                                                    " bytes, expected ", kMemoryBytes));
}

SharedLink::SharedLink(base::SharedMemory memory, Role role)
    : memory_(std::move(memory)),
      writer_(state_of(memory_, ring_of(role, true)), bytes_of_ring(memory_, ring_of(role, true))),
      reader_(state_of(memory_, ring_of(role, false)), bytes_of_ring(memory_, ring_of(role, false))) {}

}  // namespace cohort::net
