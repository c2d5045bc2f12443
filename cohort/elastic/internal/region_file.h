#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "cohort/base/files/fd.h"

/// Memory that an agent holds and its rank maps, so that it outlives the rank. No LibTorch.
namespace cohort::elastic {

/// What a region says of the state in it.
struct CommitWord {
  enum class Phase : std::uint8_t {
    kEmpty,      ///< there is none
    kCommitted,  ///< that after `steps`
    kChanging,   ///< of no use: a process was about to make that after `steps`
  };
  Phase phase = Phase::kEmpty;
  std::uint64_t steps = 0;

  bool operator==(const CommitWord&) const = default;
};

/// Reads the word of a region whose process has ended. Empty for a file that is no region.
CommitWord read_commit_word(const base::Fd& file);

/// Bytes of a region, mapped until this goes. Threads: any, one at a time.
class RegionBytes {
 public:
  /// Maps. `offset`: a multiple of a page. Ownership: shares the file. Throws: SystemError.
  RegionBytes(std::shared_ptr<const base::Fd> file, std::uint64_t offset, std::uint64_t bytes);
  ~RegionBytes();
  RegionBytes(const RegionBytes&) = delete;
  RegionBytes& operator=(const RegionBytes&) = delete;

  std::byte* data() const { return data_; }
  std::uint64_t offset() const { return offset_; }
  std::uint64_t bytes() const { return bytes_; }
  /// Takes the memory of bytes [begin, begin + bytes) now, so that a full memory is an error here and no
  /// signal later. Throws: SystemError.
  void reserve(std::uint64_t begin, std::uint64_t bytes) const;
  /// The next process has no use for them: their memory is given back when this goes.
  void drop() { is_dropped_ = true; }

 private:
  const std::shared_ptr<const base::Fd> file_;
  const std::uint64_t offset_, bytes_;
  std::byte* data_ = nullptr;
  bool is_dropped_ = false;
};

/// The region of a process: a commit word, two records of any bytes, of which the word names one, and memory.
/// A process that is killed anywhere leaves a word that is true. Threads: one at a time.
class RegionFile {
 public:
  /// No other process takes the file while this one lives. Waits `lock_time` for one that is ending: the
  /// kernel may need a while to take its memory apart. Throws: SystemError where another one has it, or where
  /// it cannot be mapped.
  explicit RegionFile(base::Fd file, std::chrono::milliseconds lock_time = std::chrono::seconds(2));
  ~RegionFile();

  CommitWord word() const;
  /// The record of the committed state. Nothing where there is none, or its bytes are not those that were
  /// written.
  std::optional<std::span<const std::byte>> record() const;
  /// Throws away all that is in it. Nothing of it may be mapped but records.
  void clear();

  /// New memory, of which none is taken yet. Throws: SystemError.
  std::shared_ptr<RegionBytes> allocate(std::uint64_t bytes);
  /// Memory of the process before. Throws: SystemError; DataError for bytes that the file does not have.
  std::shared_ptr<RegionBytes> map(std::uint64_t offset, std::uint64_t bytes) const;

  /// From here on the state is of no use, until commit(). `steps`: what it will be then.
  void mark_changing(std::uint64_t steps);
  void mark_empty();
  /// The state is that after so many steps. Its record is `parts`, one after the other. Throws: SystemError;
  /// the word stays then.
  void commit(std::uint64_t steps, std::span<const std::span<const std::byte>> parts);

 private:
  struct Header;
  struct Slot;
  Header& header() const;
  void grow(std::uint64_t bytes);
  void map_header();
  void make_header();
  void map_slots();
  std::byte* place_of_record(std::size_t slot, std::uint64_t bytes);

  const std::shared_ptr<const base::Fd> file_;
  std::unique_ptr<RegionBytes> head_;
  std::shared_ptr<RegionBytes> slots_[2];
  std::uint64_t size_ = 0;  // of the file
};

}  // namespace cohort::elastic
