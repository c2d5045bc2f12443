#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace cohort::data {

/// Files kept in memory as they are on disk, in one block, until the block is full. No LibTorch.
/// Threads: any number read and store at once, without locks.
class EncodedCache {
 public:
  /// Takes address space for `bytes`; memory only as files are stored.
  EncodedCache(std::int64_t files, std::int64_t bytes);
  ~EncodedCache();
  EncodedCache(const EncodedCache&) = delete;
  EncodedCache& operator=(const EncodedCache&) = delete;

  /// Throws: UsageError for a file that is not in 0 .. files - 1; so does store.
  std::optional<std::span<const std::byte>> find(std::int64_t file) const;
  /// Keeps a copy, if there is room.
  void store(std::int64_t file, std::span<const std::byte> bytes);
  /// Bytes of the files that are kept.
  std::int64_t bytes_used() const;

 private:
  std::byte* block_;
  std::size_t capacity_;
  std::atomic<std::size_t> used_{0};
  std::vector<std::atomic<const std::byte*>> entries_;
};

}  // namespace cohort::data
