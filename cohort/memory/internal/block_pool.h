#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace cohort::memory {

/// Gives out large blocks of memory, and keeps the pages of those that come back for the next ones, on
/// whichever thread. No LibTorch.
///
/// Best fit in one range of addresses, with splitting and joining of neighbours; huge pages where the system
/// gives them (`madvise`). Bound: the pages it holds are at most the most that its blocks ever took at once,
/// plus a quarter of that, plus 64 MiB; what is above goes back to the system before the pool grows.
/// Units: bytes. Blocks are aligned to 64. Ownership: blocks must come back before the pool ends.
/// Threads: any; one lock, held for less than a microsecond but where pages go back.
class BlockPool {
 public:
  /// What a pool gives out and holds.
  struct Use {
    std::size_t live = 0;       ///< given out
    std::size_t peak_live = 0;  ///< most of that so far
    std::size_t held = 0;       ///< what may have pages: given out, or kept
  };

  /// Reserves addresses, no memory. A system that rejects (`ulimit -v`) leaves a pool that gives out nothing.
  explicit BlockPool(std::size_t address_space);
  ~BlockPool();
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  /// Returns null where the addresses, or the system's memory, are used up.
  void* allocate(std::size_t bytes);
  /// Takes back what allocate() returned.
  void free(void* block);
  /// Whether an address lies in this pool's range. Threads: any, without the lock.
  bool owns(const void* block) const { return block >= begin_ && block < begin_ + address_space_; }
  /// What the pool gives out and holds now.
  Use use() const;

 private:
  struct Block {
    std::size_t size = 0;
    bool is_free = false;
    bool has_pages = false;  // of a free block: some of it may have
  };
  using Blocks = std::map<char*, Block>;

  bool grow(std::size_t size);
  void make_free(Blocks::iterator block);
  void give_back_pages();
  std::size_t bound() const;

  std::size_t address_space_;
  char* begin_ = nullptr;

  mutable std::mutex mutex_;
  char* end_ = nullptr;  // under mutex_, as all below: after it nothing was given out yet
  Blocks blocks_;
  std::set<std::pair<std::size_t, char*>> free_;  // by size, then address
  Use use_;
};

}  // namespace cohort::memory
