#pragma once

#include <cstddef>
#include <utility>

#include "cohort/base/files/fd.h"

namespace cohort::base {

/// Memory that several processes map. It has no name, so nothing is left when the last one ends, and it does
/// not count towards the size of /dev/shm (memfd_create(2)). Its size cannot change.
class SharedMemory {
 public:
  SharedMemory() = default;
  /// New and zero. `reserve`: its pages are taken now, so that a full memory is an error here and no signal
  /// later. Throws: SystemError of `where`.
  static SharedMemory create(const char* where, std::size_t bytes, bool reserve);
  /// Maps, whole, what another process made. Throws: SystemError of `where`, also for memory that could
  /// become shorter.
  static SharedMemory map(const char* where, const Fd& fd);

  SharedMemory(SharedMemory&& other) noexcept
      : fd_(std::move(other.fd_)),
        data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)) {}
  SharedMemory& operator=(SharedMemory&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~SharedMemory();

  std::byte* data() const { return data_; }  ///< aligned to a page; null when there is none
  std::size_t size() const { return size_; }
  int fd() const { return fd_.get(); }
  /// Of memory that was made here: the descriptor, which is not kept. The memory stays mapped.
  Fd take_fd() { return std::move(fd_); }

 private:
  Fd fd_;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace cohort::base
