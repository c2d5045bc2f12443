// The other process's side of Note [Tickets] in shared_heap.cpp. redeem() takes a lease by a
// compare-and-swap, and drop() gives it up by another. A swap that fails in redeem() is a fault of the
// sender, or the second use of a handle. Always: slot and range are checked before the swap, so a wrong
// handle changes nothing. `held_` knows by which handle bytes are held, so a block can go back to its
// owner without a copy.
#include "cohort/net/internal/mapped_heap.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <iterator>
#include <new>

#include "cohort/base/error.h"

namespace cohort::net {

std::shared_ptr<MappedHeap> MappedHeap::map(const base::Fd& fd) {
  base::SharedMemory memory = base::SharedMemory::map("net.mapped_heap", fd);
  if (memory.size() <= kHeapHeaderBytes) {
    throw SystemError("net.mapped_heap", base::concat("the memory of a heap has ", memory.size(),
                                                      " bytes, expected more than ", kHeapHeaderBytes));
  }
  static_cast<void>(::madvise(memory.data(), memory.size(), MADV_DONTDUMP));
  return std::make_shared<MappedHeap>(std::move(memory));
}

MappedHeap::MappedHeap(base::SharedMemory memory) : memory_(std::move(memory)), process_(::getpid()) {}

std::atomic<std::uint64_t>& MappedHeap::word(std::uint32_t slot) const {
  return std::launder(reinterpret_cast<std::atomic<std::uint64_t>*>(memory_.data()))[slot];
}

std::shared_ptr<std::byte> MappedHeap::redeem(const Handle& handle, std::size_t num_bytes) {
  const auto reject = [&](const auto&... why) {
    throw CommError("net.handle", base::concat("a handle of ", num_bytes, " bytes ", why...));
  };
  if (handle.slot >= kHeapSlots) reject("has slot ", handle.slot, " of ", kHeapSlots);
  if (handle.offset < kHeapHeaderBytes || handle.offset > memory_.size() ||
      num_bytes > memory_.size() - handle.offset) {
    reject("begins at ", handle.offset, " of ", memory_.size());
  }
  std::uint64_t expected = handle.ticket;
  if (!word(handle.slot).compare_exchange_strong(expected, handle.ticket + 1, std::memory_order_acq_rel)) {
    reject("has ticket ", handle.ticket, ", but slot ", handle.slot, " has ", expected);
  }
  Handle back = handle;
  back.is_receivers = true;
  Holds::iterator held;
  {
    const std::lock_guard lock(mutex_);
    held = held_.emplace(handle.offset, Held{back, num_bytes, {}});
  }
  // Without the mutex: where there is no memory for its counts, the pointer calls drop() at once.
  const std::shared_ptr<std::byte> hold(memory_.data() + handle.offset,
                                        [self = shared_from_this(), held](std::byte*) { self->drop(held); });
  const std::lock_guard lock(mutex_);
  held->second.hold = hold;
  return hold;
}

// The entry goes first: find() must not give out a handle of which the other process believes that it is
// free.
void MappedHeap::drop(Holds::iterator held) {
  if (process_ != ::getpid()) return;  // a process that was forked holds nothing
  const Handle handle = held->second.handle;
  {
    const std::lock_guard lock(mutex_);
    held_.erase(held);
  }
  std::uint64_t expected = handle.ticket + 1;
  word(handle.slot).compare_exchange_strong(expected, handle.ticket + 2, std::memory_order_acq_rel);
}

std::optional<std::pair<Handle, std::shared_ptr<std::byte>>> MappedHeap::find(
    std::span<const std::byte> bytes) const {
  const std::byte* const data = memory_.data();
  if (bytes.data() < data || bytes.data() >= data + memory_.size()) return std::nullopt;
  const auto offset = static_cast<std::uint64_t>(bytes.data() - data);
  const std::lock_guard lock(mutex_);
  // The last hold that begins at or before the bytes. If it does not cover them the bytes are copied.
  auto found = held_.upper_bound(offset);
  if (found == held_.begin()) return std::nullopt;
  const Held& held = std::prev(found)->second;
  const std::uint64_t inside = offset - held.handle.offset;
  if (inside > held.size || bytes.size() > held.size - inside) return std::nullopt;
  std::shared_ptr<std::byte> hold = held.hold.lock();
  if (hold == nullptr) return std::nullopt;  // it is about to go
  Handle handle = held.handle;
  handle.offset = offset;
  return std::pair(handle, std::move(hold));
}

}  // namespace cohort::net
