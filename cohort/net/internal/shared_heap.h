#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/files/shared_memory.h"
#include "cohort/net/internal/free_ranges.h"

namespace cohort::net {

/// The words at the beginning of a heap's memory, one for each lease that is out.
inline constexpr std::uint32_t kHeapSlots = 8192;
inline constexpr std::size_t kHeapHeaderBytes = kHeapSlots * sizeof(std::uint64_t);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "two processes share them");

/// Bytes of a heap for another process.
struct Handle {
  std::uint64_t ticket = 0;  ///< Note [Tickets]
  std::uint64_t offset = 0;  ///< of the bytes in the heap
  std::uint32_t slot = 0;
  bool is_receivers = false;  ///< whose heap: the sender's, or the receiver's
};

/// A process that holds blocks of a heap.
class Holder {
 public:
  /// `began`: base::process_start() of it.
  Holder(pid_t process, std::string began) : process_(process), began_(std::move(began)) {}
  /// Nothing is heard of it any more: from now on the heap looks whether the process is there.
  void lose() { is_lost_ = true; }
  bool is_lost() const { return is_lost_; }
  bool is_dead() const;

 private:
  const pid_t process_;
  const std::string began_;
  std::atomic<bool> is_lost_{false};
};

/// Memory of this process that others of this host map, as blocks. A block is free once nobody here and no
/// other process holds it. What is known of blocks lies in private memory, so another process can spoil the
/// bytes of a block, and nothing else.
///
/// The memory is made when it is first needed. It outlives its node as long as a block is held. Threads: any.
class SharedHeap : public std::enable_shared_from_this<SharedHeap> {
 public:
  /// `cached_bytes`: of free blocks that keep their pages, and of blocks for copies. `most_bytes`: of all
  /// blocks; 0: half of the machine's memory.
  explicit SharedHeap(std::size_t cached_bytes, std::size_t most_bytes = 0);

  /// What a block is for: those for copies are limited.
  enum class Purpose : std::uint8_t { kAny, kCopy };
  /// A block, aligned to a page. Null where there is no memory, or no more of it for this purpose.
  std::shared_ptr<std::byte> allocate(std::size_t num_bytes, Purpose purpose = Purpose::kAny);
  /// The descriptor of the memory; -1 where it cannot be had, which is logged once.
  int descriptor();
  bool contains(const std::byte* address) const;

  /// Another process's hold of a block, from here until that process gives it up.
  class Lease {
   public:
    Lease(std::shared_ptr<SharedHeap> heap, const Handle& handle) : heap_(std::move(heap)), handle_(handle) {}
    ~Lease() { withdraw(); }
    /// Takes the hold back. False where the other process has taken it: its message has come whole.
    bool withdraw() const { return heap_->withdraw(handle_); }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    const Handle& handle() const { return handle_; }

   private:
    const std::shared_ptr<SharedHeap> heap_;
    const Handle handle_;
  };
  /// Null for bytes that lie in no block, or where all slots are in use.
  std::shared_ptr<Lease> lend(std::span<const std::byte> bytes, std::shared_ptr<Holder> holder);
  /// The bytes of a handle that `holder` has and sends back: this process holds them too from now on. Null
  /// for a handle that it does not have.
  std::shared_ptr<std::byte> take_back(const Handle& handle, std::size_t num_bytes, const Holder& holder);

  /// Frees what other processes have given up.
  void collect();
  /// Bytes of blocks that somebody holds.
  std::size_t bytes_in_use();
  /// Bytes of free blocks that keep their pages.
  std::size_t bytes_cached();

 private:
  struct HeapBlock {
    std::uint64_t size = 0;
    std::uint64_t holds = 0;  // of this process, and leases
    Purpose purpose = Purpose::kAny;
  };
  using HeapBlocks = std::map<std::uint64_t, HeapBlock>;  // by offset
  struct Slot {
    std::uint64_t ticket = 0;  // of the last lease
    std::uint64_t block = 0;   // its offset; 0: the slot is free
    std::shared_ptr<Holder> holder;
  };

  bool make_memory();
  bool reserve_pages(Range range);
  std::atomic<std::uint64_t>& word(std::uint32_t slot) const;
  HeapBlocks::iterator find_block(std::uint64_t offset, std::uint64_t num_bytes);
  std::shared_ptr<std::byte> hold(std::unique_lock<std::mutex>& lock, HeapBlocks::iterator block,
                                  std::uint64_t offset);
  void drop(std::uint64_t block);
  void release(std::uint64_t block);
  bool withdraw(const Handle& handle);
  void collect_released();
  void trim(std::unique_lock<std::mutex>& lock, std::uint64_t most);
  bool is_own_process() const;

  const std::size_t cached_bytes_, most_bytes_;
  const pid_t process_;
  std::atomic<std::byte*> data_{nullptr};  // set once
  std::atomic<std::size_t> size_{0};

  std::mutex mutex_;  // of all below
  base::SharedMemory memory_;
  bool has_warned_ = false;
  std::optional<FreeRanges> free_;
  HeapBlocks blocks_;
  std::uint64_t bytes_in_use_ = 0, copied_bytes_ = 0;  // of blocks, and of those for copies
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_slots_, used_slots_;
  std::chrono::steady_clock::time_point looked_;  // for processes that have ended
};

}  // namespace cohort::net
