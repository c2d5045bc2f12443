#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

namespace cohort::memory {
class LayeredAllocator;
}

/// Memory that a replay's tensors are laid into at planned places: docs/design/script.md, "Memory".
namespace cohort::script {

inline constexpr std::int64_t kElsewhere = -1;  ///< the offset of a block that the arena does not hold

/// One block that an operator asks LibTorch's CPU allocator for, and where in the arena it is to lie.
struct PlannedBlock {
  std::size_t bytes = 0;
  std::int64_t offset = kElsewhere;  ///< from the arena's begin
  bool is_raw = false;               ///< taken by raw_allocate(): Note [Blocks that are handed on raw]
  /// Blocks of the arena that the operator holds by then: one that it gave back may lie where this one does.
  std::size_t held = 0;
};

/// A piece of memory from LibTorch's CPU allocator. It lives as long as somebody holds it or a block of it.
class Arena : public c10::intrusive_ptr_target {
 public:
  explicit Arena(std::size_t bytes);

  /// Size of the piece.
  std::size_t bytes() const { return bytes_; }
  /// Returns the block at `offset`, which holds the arena.
  c10::DataPtr block(std::int64_t offset);
  /// The same for raw_allocate(), whose blocks are found again by their address.
  c10::DataPtr raw_block(std::int64_t offset);
  /// Whether the block at `offset` begins at `data`.
  bool begins(const void* data, std::int64_t offset) const {
    return data == static_cast<const char*>(memory_.get()) + offset;
  }

 private:
  std::size_t bytes_;
  c10::DataPtr memory_;
};

/// Who is asked for CPU memory on the calling thread before LibTorch's allocator is.
class MemorySource {
 public:
  virtual ~MemorySource() = default;
  /// Returns memory, from `allocator` if it has none itself.
  virtual c10::DataPtr allocate(std::size_t bytes, memory::LayeredAllocator& allocator) = 0;
};

/// While it lives, `source` is asked on the calling thread; as before afterwards. The first one in a process
/// puts a layer before LibTorch's allocator, where it stays and hands on what it is asked for.
class MemoryScope {
 public:
  explicit MemoryScope(MemorySource* source);
  ~MemoryScope();
  MemoryScope(const MemoryScope&) = delete;
  MemoryScope& operator=(const MemoryScope&) = delete;

 private:
  MemorySource* before_;
};

/// Serves the blocks that are expected, in their order, from an arena. Where an operator asks for others, or
/// holds more than it did, it gets memory from elsewhere.
class ArenaSource final : public MemorySource {
 public:
  explicit ArenaSource(Arena* arena) : arena_(arena) {}
  /// Says what the next operator asks for.
  void expect(std::span<const PlannedBlock> blocks) {
    blocks_ = blocks;
    if (!blocks.empty()) owners_ = owners();
  }
  c10::DataPtr allocate(std::size_t bytes, memory::LayeredAllocator& allocator) override;

 private:
  std::size_t owners() const { return c10::raw::intrusive_ptr::use_count(arena_); }

  Arena* arena_;
  std::span<const PlannedBlock> blocks_;  // still to come
  std::size_t owners_ = 0;                // of the arena, before the operator
};

/// Writes down what is allocated and when it is given back. Blocks may outlive it.
class AllocationLog final : public MemorySource {
 public:
  /// Of a block that was not given back, and find()'s answer where there is none.
  static constexpr std::size_t kNever = SIZE_MAX;
  /// One block: where it lay, and from when to when it was held.
  struct Allocation {
    std::size_t step = 0;  ///< in which it was allocated
    std::size_t bytes = 0;
    const void* data = nullptr;
    std::size_t born = 0;       ///< moments: a clock that each step, block and return moves on
    std::size_t died = kNever;  ///< in the same moments; kNever: still held
    bool is_raw = false;        ///< by raw_deallocate()
  };

  AllocationLog();
  /// Returns the moment at which it begins.
  std::size_t begin_step(std::size_t step);
  /// Returns the number of the entry of this step that holds `data`; kNever: none does.
  std::size_t find(const void* data) const;
  /// All blocks so far, in the order in which they were allocated.
  std::vector<Allocation> entries() const;
  c10::DataPtr allocate(std::size_t bytes, memory::LayeredAllocator& allocator) override;

 private:
  struct Log;
  std::shared_ptr<Log> log_;
};

}  // namespace cohort::script
