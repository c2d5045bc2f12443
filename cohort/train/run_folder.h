#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "cohort/config/config.h"

namespace cohort::base {
class FileLock;
}

/// The folder that a run writes to, and its life: docs/guide/train.md, "The run folder".
namespace cohort::train {

/// A run folder that this process holds the lock of.
class RunFolder {
 public:
  /// Opens `run.dir`. Without it a new run gets `runs/NAME-DATE-TIME`, in UTC, where `name` is run_name(). A
  /// run that resumes gets the folder of the checkpoint that `run.resume` names, or the newest
  /// `runs/NAME-DATE-TIME`.
  /// Throws: ConfigError if the folder holds a run and `run.resume` is empty; SystemError naming the process
  /// that uses the folder.
  static RunFolder open(const config::RunConfig& run, const std::string& name);

  /// Opens `run.dir`, which all processes of an elastic run have open at once, and no other run. Throws:
  /// ConfigError where it is empty; SystemError as open().
  static RunFolder join(const config::RunConfig& run);

  /// If nothing was written to the folder, it becomes as it was before open(): the lock's file is removed if
  /// the folder was empty, and the folder if open() made it.
  ~RunFolder();
  RunFolder(RunFolder&&) noexcept;

  /// The folder itself.
  const std::filesystem::path& path() const { return path_; }

  /// Writes config.yaml (the effective configuration) and run.json (versions, machine, command, number of
  /// ranks), and the same to starts/N/, which no later start overwrites. A start with an `origin`, of an
  /// elastic run, has one such folder, however many of its processes describe it. Throws: SystemError.
  void describe(config::Config config, const std::string& command, int world_size = 1,
                const std::string& origin = "") const;

 private:
  explicit RunFolder(std::filesystem::path path);

  std::filesystem::path path_;
  std::unique_ptr<base::FileLock> lock_;
  bool is_made_ = false, was_empty_ = false;  // by open(), before it
};

/// Returns the folder of the run that wrote `config`: its config.yaml, or the config.yaml of one of its
/// starts. A run.json of the same run stands beside it. Returns an empty path for any other file.
std::filesystem::path run_folder_of(const std::filesystem::path& config);

}  // namespace cohort::train
