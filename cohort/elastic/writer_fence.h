#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "cohort/base/files/fd.h"

namespace cohort::elastic {

struct GenerationInfo;

/// Keeps out of an elastic run's folder who writes there no more, and may not know it yet: a process that was
/// process 0, and a process of another run.
///
///     elastic::WriterFence fence("runs/7");
///     options.on_enter = [&](const elastic::GenerationInfo& info) { fence.claim(info.origin); };
///     options.on_commit = [&](const elastic::GenerationInfo& info) {
///       fence.write(info, [&] { save_checkpoint("runs/7/last", info.steps); });
///     };
///
/// The file `.origin` there says whose the folder is, by the origin of the run's record. Each process of the
/// run holds a shared lock of it, so no other run gets the folder meanwhile. The file `.writer` has the
/// number of the generation that has written last, and its origin. Who writes holds the lock of that file
/// meanwhile. Where a later generation has written, nobody of an earlier one does any more. Threads: one
/// caller at a time.
class WriterFence {
 public:
  /// Makes the folder. Throws: SystemError where the files cannot be made.
  explicit WriterFence(const std::filesystem::path& folder);
  WriterFence(const WriterFence&) = delete;
  WriterFence& operator=(const WriterFence&) = delete;

  /// The folder is that of the run `origin` from here on. Waits two seconds at most for processes of another
  /// run, which may be about to end. Throws: SystemError where they do not.
  void claim(const std::string& origin);

  /// Calls `write`, also from within another call. Waits two seconds at most for a process that writes.
  /// Returns false where that has not ended: it is stopped, and nothing is written. Later calls do not wait,
  /// until one has written. Throws: GenerationEnded where a later generation has written; SystemError where
  /// another run has claimed the folder; what `write` throws.
  bool write(std::uint64_t generation, const std::function<void()>& write);
  /// The same for a process that may not have claimed the folder yet, as one that comes after the last step:
  /// as claim() before.
  bool write(const GenerationInfo& info, const std::function<void()>& write);

 private:
  /// What `.writer` says.
  struct Newest {
    std::uint64_t generation = 0;
    std::string origin = {};
  };
  bool try_claim(const std::string& origin);
  void check_newest(std::uint64_t generation) const;
  Newest read_newest() const;

  const std::filesystem::path folder_;
  const base::Fd claim_, writer_;
  std::string origin_;
  bool is_writing_ = false, is_blocked_ = false;
};

}  // namespace cohort::elastic
