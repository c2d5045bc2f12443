#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "cohort/base/error.h"
#include "cohort/base/files/fd.h"

namespace cohort::launch {

/// A descriptor that any thread makes readable, and a loop polls. Not for users of the library.
class ChangeSignal {
 public:
  ChangeSignal() : fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (!fd_.is_open()) {
      throw SystemError("launch.run", base::concat("no eventfd can be had: ", std::strerror(errno)));
    }
  }
  int fd() const { return fd_.get(); }
  /// Threads: any.
  void set() const {
    const std::uint64_t added = 1;
    [[maybe_unused]] const ssize_t count = ::write(fd_.get(), &added, sizeof added);
  }
  void clear() const {
    std::uint64_t value = 0;
    [[maybe_unused]] const ssize_t count = ::read(fd_.get(), &value, sizeof value);
  }

 private:
  base::Fd fd_;
};

}  // namespace cohort::launch
