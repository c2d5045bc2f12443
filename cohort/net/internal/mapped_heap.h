#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>

#include "cohort/base/files/fd.h"
#include "cohort/base/files/shared_memory.h"
#include "cohort/net/internal/shared_heap.h"

namespace cohort::net {

/// Another process's SharedHeap, mapped here. Stays mapped as long as bytes of it are held. Threads: any.
class MappedHeap : public std::enable_shared_from_this<MappedHeap> {
 public:
  /// Throws: SystemError where it is no such memory, or there is no room for it.
  static std::shared_ptr<MappedHeap> map(const base::Fd& fd);
  explicit MappedHeap(base::SharedMemory memory);

  /// Takes the bytes that the other process has lent: this process holds them until the result and its copies
  /// are gone. Throws: CommError for a handle that was not given to this process, or is used a second time.
  std::shared_ptr<std::byte> redeem(const Handle& handle, std::size_t num_bytes);
  /// The handle by which this process holds the bytes, and the hold. Empty where it holds none of them.
  std::optional<std::pair<Handle, std::shared_ptr<std::byte>>> find(std::span<const std::byte> bytes) const;

 private:
  struct Held {
    Handle handle;
    std::size_t size = 0;
    std::weak_ptr<std::byte> hold;
  };
  using Holds = std::multimap<std::uint64_t, Held>;  // by offset

  void drop(Holds::iterator held);
  std::atomic<std::uint64_t>& word(std::uint32_t slot) const;

  const base::SharedMemory memory_;
  const pid_t process_;
  mutable std::mutex mutex_;
  Holds held_;
};

}  // namespace cohort::net
