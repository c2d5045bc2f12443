#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>

namespace cohort::train {

/// Keeps a process that is process 0 no longer, and may not know it yet, from writing to the folder of an elastic run.
///
/// The file `.writer` there holds the number of the generation that has written last. Who writes holds the lock of the
/// file meanwhile. Where a later generation has written, nobody of an earlier one does any more.
/// Threads: one caller at a time.
class WriterFence {
 public:
  /// Makes the folder. Throws: SystemError where the file cannot be made.
  explicit WriterFence(const std::filesystem::path& folder);
  ~WriterFence();
  WriterFence(const WriterFence&) = delete;
  WriterFence& operator=(const WriterFence&) = delete;

  /// Calls `write`, also from within another call. Waits two seconds at most for a process that writes. Returns false
  /// where that has not ended: it is stopped, and nothing is written. Throws: elastic::GenerationEnded where a later
  /// generation has written; what `write` throws.
  bool write(std::uint64_t generation, const std::function<void()>& write);

  /// A job begins, no process of which has written: its generations count from 1, whatever those of an earlier job were.
  void begin(std::uint64_t generation);

 private:
  bool lock() const;
  void set_number(std::uint64_t generation) const;

  const std::filesystem::path path_;
  int file_ = -1;
  bool is_writing_ = false;
};

}  // namespace cohort::train
