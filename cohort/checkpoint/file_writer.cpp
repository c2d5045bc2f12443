// Small pieces are gathered in a buffer; large pieces are written from where they are, after the buffer. Each
// chunk is checksummed and written while it is in the cache, and the disk is started early. The space is
// reserved first, so that a full disk is known before anything is written. A file that was not finished is
// removed, so a complete file alone stays.
#include "cohort/checkpoint/file_writer.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "cohort/base/error.h"
#include "cohort/base/files/atomic_file.h"

namespace cohort::checkpoint {
namespace {

using base::concat;

constexpr size_t kBufferBytes = 1 << 20;           // small tensors are gathered up to this
constexpr size_t kSmallBytes = 64 << 10;           // larger ones are written from where they are
constexpr size_t kChunkBytes = 1 << 20;            // checksummed, then written, while still in the cache
constexpr uint64_t kWritebackBytes = 16ull << 20;  // the disk starts after so much, not only at fsync

[[noreturn]] void fail_system(std::string_view what, const std::filesystem::path& path) {
  const int error = errno;
  throw SystemError("checkpoint.save",
                    concat("cannot ", what, " ", path.string(), ": ", std::strerror(error)));
}

/// The folder that holds `path`.
std::filesystem::path parent_of(const std::filesystem::path& path) {
  const auto parent = path.parent_path();
  return parent.empty() ? "." : parent;
}

}  // namespace

uint64_t checksum(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

std::string checksum_text(uint64_t checksum) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(checksum));
  return text;
}

struct FileWriter::Hash {
  XXH3_state_t* state = XXH3_createState();
  Hash() { XXH3_64bits_reset(state); }
  ~Hash() { XXH3_freeState(state); }
};

FileWriter::FileWriter(std::filesystem::path path, uint64_t expected_bytes)
    : path_(std::move(path)), expected_bytes_(expected_bytes), hash_(std::make_unique<Hash>()) {
  // O_EXCL: two saves can never write into one file. The name is a temporary one, so a file that is there is
  // an error.
  file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (file_ < 0) {
    fail("create");
  }
  if (expected_bytes_ > 0 && ::fallocate(file_, 0, 0, static_cast<off_t>(expected_bytes_)) != 0 &&
      // Other errors only say that the file system cannot reserve. Then a full disk is found while writing.
      (errno == ENOSPC || errno == EDQUOT || errno == EFBIG)) {
    const int error = errno;
    ::close(file_);
    ::unlink(path_.c_str());
    errno = error;
    fail("reserve space for");
  }
}

FileWriter::~FileWriter() {
  if (file_ >= 0) {
    ::close(file_);
    ::unlink(path_.c_str());
  }
}

void FileWriter::fail(const char* operation) const {
  // Kept first, as statvfs() below sets errno too.
  const int error = errno;
  std::string free_text;
  struct statvfs disk {};
  if (::statvfs(parent_of(path_).c_str(), &disk) == 0) {
    free_text = concat(", ", static_cast<uint64_t>(disk.f_bavail) * disk.f_frsize, " bytes free there");
  }
  const bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
  throw SystemError("checkpoint.save",
                    concat("cannot ", operation, " ", path_.string(), ": ", std::strerror(error), " (needs ",
                           expected_bytes_, " bytes, ", summary_.bytes, " written", free_text, ")"),
                    full ? "free space, raise the file size limit, or keep fewer checkpoints" : "");
}

void FileWriter::write(std::string_view text) {
  write(std::as_bytes(std::span(text.data(), text.size())));
}

void FileWriter::write(std::span<const std::byte> bytes) {
  if (bytes.size() <= kSmallBytes) {
    buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
    if (buffer_.size() < kBufferBytes) {
      return;
    }
    bytes = {};
  }
  // What is in the buffer comes before `bytes` in the file, and in the checksum.
  write_through(buffer_);
  buffer_.clear();
  write_through(bytes);
}

void FileWriter::write_through(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const auto chunk = bytes.first(std::min(bytes.size(), kChunkBytes));
    XXH3_64bits_update(hash_->state, chunk.data(), chunk.size());
    for (size_t done = 0; done < chunk.size();) {
      const ssize_t written = ::write(file_, chunk.data() + done, chunk.size() - done);
      if (written < 0 && errno == EINTR) {
        continue;
      }
      if (written <= 0) {
        fail("write");
      }
      done += static_cast<size_t>(written);
      summary_.bytes += static_cast<uint64_t>(written);
    }
    bytes = bytes.subspan(chunk.size());
    if (summary_.bytes - started_writeback_ >= kWritebackBytes) {
      // Only a hint: a filesystem that cannot do it writes everything at fsync.
      (void)::sync_file_range(file_, static_cast<off_t>(started_writeback_),
                              static_cast<off_t>(summary_.bytes - started_writeback_), SYNC_FILE_RANGE_WRITE);
      started_writeback_ = summary_.bytes;
    }
  }
}

FileSummary FileWriter::finish() {
  write_through(buffer_);
  // The reserved rest would stay as zeros at the end.
  if (summary_.bytes < expected_bytes_ && ::ftruncate(file_, static_cast<off_t>(summary_.bytes)) != 0) {
    fail("shorten");
  }
  // Before the file gets its name: after a power cut a name must not stand for data that never reached the
  // disk.
  if (::fsync(file_) != 0) {
    fail("sync");
  }
  // NFS may report a failed write only here. close() is not called again: the number may belong to another
  // file.
  const int closed = ::close(file_);
  file_ = -1;
  if (closed != 0) {
    const int error = errno;
    ::unlink(path_.c_str());
    errno = error;
    fail("close");
  }
  summary_.checksum = XXH3_64bits_digest(hash_->state);
  return summary_;
}

void rename_and_sync(const std::filesystem::path& from, const std::filesystem::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) {
    fail_system(concat("rename ", from.string(), " to"), to);
  }
  // The name is an entry of the folder, which has to reach the disk by itself.
  base::sync_folder(parent_of(to));
}

}  // namespace cohort::checkpoint
