// The pool reserves a range of addresses and makes it usable from its beginning as it grows. One index has
// all blocks by address, to join neighbours; another has the free blocks by size, for the best fit. Always:
// no two neighbours are both free, and each free block is in both indexes. Pages go back by madvise() and the
// addresses stay, so a block without pages can be given out again like any other. The largest free blocks go
// first.
#include "cohort/memory/internal/block_pool.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <iterator>

namespace cohort::memory {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kHugePage = std::size_t(2) << 20;
constexpr std::size_t kSlack = std::size_t(64) << 20;

// One line more than was asked for, so that tensors of 2^n bytes do not all begin at the same place of a
// page, whose loads and stores the core then takes for each other's.
std::size_t padded(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment + kAlignment;
}

char* up_to_huge_page(char* address) {
  const auto value = reinterpret_cast<std::uintptr_t>(address);
  return address + (kHugePage - value % kHugePage) % kHugePage;
}

}  // namespace

std::size_t BlockPool::bound() const {
  return use_.peak_live + use_.peak_live / 4 + kSlack;
}

BlockPool::BlockPool(std::size_t address_space) : address_space_(address_space) {
  void* const range =
      ::mmap(nullptr, address_space, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) {
    address_space_ = 0;
    return;
  }
  begin_ = end_ = static_cast<char*>(range);
  ::madvise(begin_, address_space_, MADV_HUGEPAGE);  // a wish
}

BlockPool::~BlockPool() {
  if (begin_ != nullptr) ::munmap(begin_, address_space_);
}

void* BlockPool::allocate(std::size_t bytes) {
  if (bytes > address_space_) return nullptr;
  const std::size_t size = padded(bytes);
  const std::lock_guard lock(mutex_);
  auto best = free_.lower_bound({size, nullptr});
  if (best == free_.end()) {
    if (!grow(size)) return nullptr;
    best = free_.lower_bound({size, nullptr});
  }
  const auto block = blocks_.find(best->second);
  free_.erase(best);
  const std::size_t rest = block->second.size - size;
  if (rest > 0) {
    blocks_.emplace_hint(std::next(block), block->first + size, Block{rest, true, block->second.has_pages});
    free_.emplace(rest, block->first + size);
  }
  if (!block->second.has_pages) use_.held += size;
  block->second = {size, false, true};
  use_.live += size;
  use_.peak_live = std::max(use_.peak_live, use_.live);
  give_back_pages();
  return block->first;
}

void BlockPool::free(void* block) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(static_cast<char*>(block));
  use_.live -= found->second.size;
  found->second.is_free = true;
  make_free(found);
}

// Joins a block that nobody has with free neighbours.
void BlockPool::make_free(Blocks::iterator block) {
  const auto join = [&](Blocks::iterator first, Blocks::iterator second) {
    // Whether the whole block has pages is not known once a block with pages and one without are joined.
    if (first->second.has_pages != second->second.has_pages) {
      use_.held += (first->second.has_pages ? second : first)->second.size;
    }
    first->second.has_pages |= second->second.has_pages;
    first->second.size += second->second.size;
    blocks_.erase(second);
    return first;
  };
  if (const auto next = std::next(block); next != blocks_.end() && next->second.is_free) {
    free_.erase({next->second.size, next->first});
    block = join(block, next);
  }
  if (block != blocks_.begin() && std::prev(block)->second.is_free) {
    const auto before = std::prev(block);
    free_.erase({before->second.size, before->first});
    block = join(before, block);
  }
  free_.emplace(block->second.size, block->first);
}

// Makes a free block of at least `size` at the end.
bool BlockPool::grow(std::size_t size) {
  if (!blocks_.empty()) {
    const auto last = std::prev(blocks_.end());
    if (last->second.is_free) size -= last->second.size;
  }
  const auto room = static_cast<std::size_t>(begin_ + address_space_ - end_);
  char* const end = size <= room ? std::min(up_to_huge_page(end_ + size), begin_ + address_space_) : nullptr;
  if (end == nullptr) return false;
  const auto more = static_cast<std::size_t>(end - end_);
  if (::mprotect(end_, more, PROT_READ | PROT_WRITE) != 0) return false;
  const auto block = blocks_.emplace_hint(blocks_.end(), end_, Block{more, true, false});
  end_ = end;
  make_free(block);
  return true;
}

// Largest first, until what is held is within its bound.
void BlockPool::give_back_pages() {
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  for (auto largest = free_.rbegin(); largest != free_.rend() && use_.held > bound(); ++largest) {
    Block& block = blocks_.at(largest->second);
    if (!block.has_pages) continue;
    const auto begin = reinterpret_cast<std::uintptr_t>(largest->second), end = begin + block.size;
    const std::uintptr_t first = (begin + page - 1) / page * page, last = end / page * page;
    if (first >= last || ::madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED) != 0)
      continue;
    block.has_pages = false;
    use_.held -= block.size;
  }
}

BlockPool::Use BlockPool::use() const {
  const std::lock_guard lock(mutex_);
  return use_;
}

}  // namespace cohort::memory
