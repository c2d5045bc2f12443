#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>

/// Memory for C libraries that allocate much for each image and free it all at its end.
namespace cohort::data {

/// Hands out pieces of blocks; `reset` takes all pieces back at once. After the first images it holds one
/// block that is large enough, and asks the system for nothing. Never throws, so that C code may call it.
class Arena {
 public:
  static constexpr size_t kAlignment = 64;
  /// A block above this size is given back by `reset`: one huge image must not cost memory for ever.
  static constexpr size_t kKeepBytes = size_t{32} << 20;

  Arena() = default;
  ~Arena() { release(); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// Returns `bytes` bytes aligned to kAlignment, or nullptr when there is no memory.
  void* allocate(size_t bytes) {
    bytes = (bytes + kAlignment - 1) & ~(kAlignment - 1);
    if (head_ == nullptr || bytes > head_->capacity - head_->used) {
      if (!grow(bytes)) {
        return nullptr;
      }
    }
    void* piece = reinterpret_cast<char*>(head_) + kAlignment + head_->used;
    head_->used += bytes;
    return piece;
  }

  /// Afterwards nothing is handed out.
  void reset() {
    if (head_ == nullptr) {
      return;
    }
    if (head_->next == nullptr && head_->capacity <= kKeepBytes) {
      head_->used = 0;
      return;
    }
    size_t total = 0;
    for (const ArenaBlock* block = head_; block != nullptr; block = block->next) {
      total += block->capacity;
    }
    release();
    if (total <= kKeepBytes) {
      grow(total);
    }
  }

 private:
  struct ArenaBlock {
    ArenaBlock* next;
    size_t capacity;
    size_t used;
  };

  bool grow(size_t bytes) {
    const size_t capacity = std::max({bytes, size_t{64} << 10, head_ == nullptr ? 0 : head_->capacity});
    auto* block = static_cast<ArenaBlock*>(std::aligned_alloc(kAlignment, capacity + kAlignment));
    if (block == nullptr) {
      return false;
    }
    *block = {head_, capacity, 0};
    head_ = block;
    return true;
  }

  void release() {
    while (head_ != nullptr) {
      ArenaBlock* next = head_->next;
      std::free(head_);
      head_ = next;
    }
  }

  ArenaBlock* head_ = nullptr;
};

}  // namespace cohort::data
