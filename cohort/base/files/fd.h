#pragma once

#include <unistd.h>

#include <utility>

namespace cohort::base {

/// A file descriptor, closed when it goes.
class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { close(); }
  /// The number of the descriptor, which stays this object's; -1 where it has none.
  int get() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  /// Closes it no more.
  int release() { return std::exchange(fd_, -1); }
  /// Closes it now; without one it does nothing. An error of the system is ignored.
  void close() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }

 private:
  int fd_;
};

}  // namespace cohort::base
