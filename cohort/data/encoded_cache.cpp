#include "cohort/data/encoded_cache.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "cohort/base/error.h"
#include "cohort/data/check_index.h"

namespace cohort::data {
namespace {

constexpr std::size_t kAlign = alignof(std::uint64_t);
constexpr const char* kWhereCache = "data.cache";

}  // namespace

// An entry is the file's length, then the file.
EncodedCache::EncodedCache(std::int64_t files, std::int64_t bytes)
    : capacity_(static_cast<std::size_t>(bytes)), entries_(static_cast<std::size_t>(files)) {
  // Pages that are never written to take no memory, so the whole capacity can be reserved at the start.
  void* block =
      ::mmap(nullptr, capacity_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (block == MAP_FAILED) {
    throw SystemError(kWhereCache, base::concat("cannot reserve ", bytes, " bytes: ", std::strerror(errno)),
                      "a smaller cache_bytes");
  }
  block_ = static_cast<std::byte*>(block);
}

EncodedCache::~EncodedCache() {
  ::munmap(block_, capacity_);
}

std::optional<std::span<const std::byte>> EncodedCache::find(std::int64_t file) const {
  check_index(kWhereCache, file, std::ssize(entries_));
  // Pairs with the release in store(): who sees the pointer sees the bytes. Entries never move, so spans stay
  // good.
  const std::byte* entry = entries_[static_cast<std::size_t>(file)].load(std::memory_order_acquire);
  if (entry == nullptr) return std::nullopt;
  std::uint64_t size = 0;
  std::memcpy(&size, entry, sizeof(size));
  return std::span(entry + sizeof(size), size);
}

void EncodedCache::store(std::int64_t file, std::span<const std::byte> bytes) {
  check_index(kWhereCache, file, std::ssize(entries_));
  const std::uint64_t size = bytes.size();
  const std::size_t need = (sizeof(size) + size + kAlign - 1) / kAlign * kAlign;
  // Not fetch_add: a large file that does not fit must leave room for smaller ones.
  std::size_t at = used_.load(std::memory_order_relaxed);
  do {
    if (need > capacity_ - at) return;
  } while (!used_.compare_exchange_weak(at, at + need, std::memory_order_relaxed));
  std::memcpy(block_ + at, &size, sizeof(size));
  std::memcpy(block_ + at + sizeof(size), bytes.data(), bytes.size());
  // Two threads may store one file at the same time. Both copies are whole; the space of one of them is lost.
  entries_[static_cast<std::size_t>(file)].store(block_ + at, std::memory_order_release);
}

std::int64_t EncodedCache::bytes_used() const {
  return static_cast<std::int64_t>(used_.load(std::memory_order_relaxed));
}

}  // namespace cohort::data
