// The lock is held for one write, so that a process which is stopped holds it seldom. Between two writes the
// number alone keeps an earlier process 0 out: it compares before it writes, under the lock. Numbers count
// within a run. The run is told by the origin of its record: a run that begins takes the folder over where no
// process of another run lives. A file system without locks cannot tell who lives: there the run that has
// begun last has the folder, and the other one ends at its next write.
#include "cohort/elastic/writer_fence.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <system_error>

#include "cohort/base/error.h"
#include "cohort/base/files/file_lock.h"
#include "cohort/base/files/read_at.h"
#include "cohort/base/threads/wait.h"
#include "cohort/elastic/session.h"

namespace cohort::elastic {
namespace {

constexpr const char* kWhereFence = "elastic.writer_fence";
constexpr std::chrono::seconds kWriterTime(2);

[[noreturn]] void fail_fence(const std::filesystem::path& path, const char* what) {
  throw SystemError(kWhereFence, base::concat(path.string(), " cannot be ", what, ": ", std::strerror(errno)),
                    "free space there, or another run.dir");
}

base::Fd open_fence_file(const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::create_directories(path.parent_path(), error);
  base::Fd file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (!file.is_open()) fail_fence(path, "opened");
  return file;
}

/// Returns whether this process has the lock, or the file system has none.
bool try_flock(const base::Fd& file, int operation, const std::filesystem::path& path) {
  while (::flock(file.get(), operation | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) return false;
    if (base::means_no_locks(errno)) return true;
    if (errno != EINTR) fail_fence(path, "locked");
  }
  return true;
}

std::string read_fence_file(const base::Fd& file, const std::filesystem::path& path) {
  constexpr std::size_t kMaxBytes = 4096;
  std::string text = base::read_at(file.get(), 0, kMaxBytes);
  if (text.size() < kMaxBytes && errno != 0) fail_fence(path, "read");
  return text;
}

void write_fence_file(const base::Fd& file, const std::string& text, const std::filesystem::path& path) {
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t length =
        ::pwrite(file.get(), text.data() + done, text.size() - done, static_cast<off_t>(done));
    if (length < 0 && errno == EINTR) continue;
    if (length < 0) fail_fence(path, "written");
    done += static_cast<std::size_t>(length);
  }
  if (::ftruncate(file.get(), static_cast<off_t>(text.size())) != 0) fail_fence(path, "written");
}

}  // namespace

WriterFence::WriterFence(const std::filesystem::path& folder)
    : folder_(folder),
      claim_(open_fence_file(folder / ".origin")),
      writer_(open_fence_file(folder / ".writer")) {}

void WriterFence::claim(const std::string& origin) {
  if (origin_ == origin) return;
  if (!base::poll_until([&] { return try_claim(origin); }, base::Deadline(kWriterTime))) {
    throw SystemError(kWhereFence, base::concat(folder_.string(), " is in use by another elastic run"),
                      "another run.dir, or the same command when that run has ended");
  }
  origin_ = origin;
}

// A lock that changes its kind is given up for a moment, so what was read before is read again.
bool WriterFence::try_claim(const std::string& origin) {
  const std::filesystem::path path = folder_ / ".origin";
  if (!try_flock(claim_, LOCK_SH, path)) return false;  // another process writes its origin
  if (read_fence_file(claim_, path) == origin) return true;
  if (try_flock(claim_, LOCK_EX, path)) {
    if (read_fence_file(claim_, path) != origin) write_fence_file(claim_, origin, path);
    if (try_flock(claim_, LOCK_SH, path) && read_fence_file(claim_, path) == origin) return true;
  }
  ::flock(claim_.get(), LOCK_UN);
  return false;
}

bool WriterFence::write(std::uint64_t generation, const std::function<void()>& write) {
  if (is_writing_) {
    write();
    return true;
  }
  // Each step writes, and would wait anew.
  const base::Deadline deadline(is_blocked_ ? std::chrono::seconds(0) : kWriterTime);
  is_blocked_ = !base::poll_until([&] { return try_flock(writer_, LOCK_EX, folder_ / ".writer"); }, deadline);
  if (is_blocked_) return false;
  struct Unlock {
    ~Unlock() {
      ::flock(file, LOCK_UN);
      is_writing = false;
    }
    int file;
    bool& is_writing;
  } const unlock{writer_.get(), is_writing_};
  is_writing_ = true;
  check_newest(generation);
  write();
  return true;
}

bool WriterFence::write(const GenerationInfo& info, const std::function<void()>& write) {
  claim(info.origin);
  return this->write(info.generation, write);
}

void WriterFence::check_newest(std::uint64_t generation) const {
  if (read_fence_file(claim_, folder_ / ".origin") != origin_) {
    throw SystemError(kWhereFence,
                      base::concat("another elastic run has begun in ", folder_.string(),
                                   ", and this process is of an earlier one"),
                      "a run.dir for each run");
  }
  const Newest newest = read_newest();
  const bool is_of_run = newest.origin == origin_;
  if (is_of_run && newest.generation > generation) {
    throw GenerationEnded(
        kWhereFence, base::concat("generation ", newest.generation,
                                  " has written to the run's folder, and this process is in ", generation));
  }
  if (is_of_run && newest.generation == generation) return;
  // Of one length within a run, so that a process which is killed meanwhile leaves a number.
  char number[32];
  std::snprintf(number, sizeof number, "%020llu ", static_cast<unsigned long long>(generation));
  write_fence_file(writer_, number + origin_, folder_ / ".writer");
}

WriterFence::Newest WriterFence::read_newest() const {
  const std::string text = read_fence_file(writer_, folder_ / ".writer");
  Newest newest;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), newest.generation);
  const auto length = static_cast<std::size_t>(end - text.data());
  // What an earlier version wrote has no origin.
  if (error != std::errc() || length == text.size() || text[length] != ' ') return {};
  newest.origin = text.substr(length + 1);
  return newest;
}

}  // namespace cohort::elastic
