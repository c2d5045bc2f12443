#pragma once

#include <filesystem>
#include <string>

namespace cohort::data {

/// A folder that appears whole or not at all. What is written under `path()` becomes `final` with finish();
/// without it, it is removed.
class PartialFolder {
 public:
  /// Throws: DataError if `final` exists and is not an empty folder; SystemError if nothing can be made
  /// there.
  explicit PartialFolder(const std::string& final);
  ~PartialFolder();
  PartialFolder(const PartialFolder&) = delete;
  PartialFolder& operator=(const PartialFolder&) = delete;

  const std::filesystem::path& path() const { return partial_; }
  void finish();

 private:
  std::filesystem::path final_;
  std::filesystem::path partial_;
  bool finished_ = false;
};

}  // namespace cohort::data
