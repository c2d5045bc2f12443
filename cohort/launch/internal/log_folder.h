#pragma once

#include <filesystem>

#include "cohort/launch/run_options.h"

namespace cohort::launch {

/// The folder of one job: LOG_DIR/RUN_ID_xxxxxx, with attempt_A/LOCAL_RANK/{stdout.log,stderr.log,error.json}
/// in it. Without a log_dir it is a temporary one, which goes with this object unless streams are kept in it.
class LogFolder {
 public:
  /// Throws: SystemError when it cannot be made.
  explicit LogFolder(const RunOptions& options);
  ~LogFolder();
  LogFolder(const LogFolder&) = delete;
  LogFolder& operator=(const LogFolder&) = delete;

  std::filesystem::path attempt(int number) const { return path_ / ("attempt_" + std::to_string(number)); }
  const std::filesystem::path& path() const { return path_; }
  bool stays() const { return stays_; }

 private:
  std::filesystem::path path_;
  bool stays_;
};

}  // namespace cohort::launch
