#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "cohort/train/config.h"

namespace cohort::core {
class FileLock;
}

/// The folder that a run writes to, and its life: docs/train.md, "The run folder".
namespace cohort::train {

/// A run folder that this process holds the lock of.
class RunFolder {
 public:
  /// Opens `config.run.dir`, or makes `runs/NAME-DATE-TIME`, in UTC; with `run.resume` and no `run.dir`, the
  /// folder of the checkpoint that is named, or the newest of `runs/NAME-DATE-TIME`. Throws: ConfigError when
  /// the folder holds a run and `run.resume` is empty; SystemError naming the process that uses it.
  static RunFolder open(const Config& config);

  /// Removes the folder if it was new or empty when open() took it, and nothing was written to it.
  ~RunFolder();
  RunFolder(RunFolder&&) noexcept;

  const std::filesystem::path& path() const { return path_; }

  /// Writes config.yaml (the effective configuration) and run.json (versions, machine, command), and the same
  /// to starts/N/, which no later start overwrites. Throws: SystemError.
  void describe(Config config, const std::string& command) const;

 private:
  explicit RunFolder(std::filesystem::path path);

  std::filesystem::path path_;
  std::unique_ptr<core::FileLock> lock_;
  bool is_new_ = false;
};

}  // namespace cohort::train
