#pragma once

#include <cstddef>
#include <utility>

#include "cohort/base/files/fd.h"

namespace cohort::comm::shm {

/// Memory that several processes map. It has no name, so nothing stays behind when the last one ends, and it
/// does not count towards the size of /dev/shm (memfd_create(2)).
class SharedMemory {
 public:
  SharedMemory() = default;
  /// New and zero. `reserve`: its pages are taken now, so that a full memory is an error here and no signal
  /// later. Throws: SystemError.
  static SharedMemory create(std::size_t bytes, bool reserve);
  /// Maps, whole, what another process made. Throws: SystemError.
  static SharedMemory map(const base::Fd& fd);

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

 private:
  base::Fd fd_;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace cohort::comm::shm
