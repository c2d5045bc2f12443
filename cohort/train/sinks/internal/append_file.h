#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>

#include "cohort/base/error.h"

namespace cohort::train {

/// A file that only grows: a write is whole in the kernel, or throws SystemError naming the file.
class AppendFile {
 public:
  explicit AppendFile(std::filesystem::path path) : path_(std::move(path)) {
    descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (descriptor_ < 0) fail("cannot be opened for writing");
  }
  ~AppendFile() { ::close(descriptor_); }
  AppendFile(const AppendFile&) = delete;
  AppendFile& operator=(const AppendFile&) = delete;

  void write(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t written = ::write(descriptor_, bytes.data(), bytes.size());
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) fail("cannot be written");
      bytes.remove_prefix(static_cast<std::size_t>(written));
    }
  }
  /// What was written is on disk when it returns.
  void sync() {
    if (::fdatasync(descriptor_) != 0) fail("cannot be brought to disk");
  }
  const std::filesystem::path& path() const { return path_; }

 private:
  [[noreturn]] void fail(const char* what) const {
    throw SystemError("train.sinks", base::concat(path_.string(), " ", what, ": ", std::strerror(errno)),
                      "free space there, or another run.dir");
  }

  std::filesystem::path path_;
  int descriptor_ = -1;
};

}  // namespace cohort::train
