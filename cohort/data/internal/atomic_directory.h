#pragma once

#include <filesystem>
#include <string>

#include "cohort/base/files/fd.h"

namespace cohort::data {

/// A folder that appears whole or not at all. What is written under `path()` becomes `final` with finish();
/// without it, it is removed. It lies beside its place as `<final>.partial/files`, beside a file that is
/// locked while this process lives: so what a killed process left is known from what is another's, and from
/// what is nobody's business. Killed at any moment, either `final` is whole or absent, and the next instance
/// removes the rest.
class AtomicDirectory {
 public:
  /// Throws: DataError if `final` exists and is not an empty folder, or if `<final>.partial` is in use or was
  /// not made by this class; SystemError if nothing can be made there.
  explicit AtomicDirectory(const std::string& final);
  ~AtomicDirectory();
  AtomicDirectory(const AtomicDirectory&) = delete;
  AtomicDirectory& operator=(const AtomicDirectory&) = delete;

  const std::filesystem::path& path() const { return files_; }
  /// Nothing is at `path()` afterwards. Throws: SystemError.
  void finish();

 private:
  void remove_leftover();

  std::filesystem::path final_;
  std::filesystem::path partial_;
  std::filesystem::path files_;  // below it
  base::Fd lock_;
};

}  // namespace cohort::data
