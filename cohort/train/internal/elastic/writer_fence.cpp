// The lock is held for one write, so that a process which is stopped holds it seldom. Between two writes the number alone
// keeps an earlier process 0 out: it compares before it writes, under the lock.
#include "cohort/train/internal/elastic/writer_fence.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <system_error>

#include "cohort/base/error.h"
#include "cohort/base/threads/wait.h"
#include "cohort/elastic/session.h"

namespace cohort::train {
namespace {

constexpr std::chrono::seconds kWriterTime(2);

}  // namespace

WriterFence::WriterFence(const std::filesystem::path& folder) : path_(folder / ".writer") {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  file_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (file_ >= 0) return;
  throw SystemError("train.elastic", base::concat("cannot open ", path_.string(), ": ", std::strerror(errno)),
                    "another run.dir");
}

WriterFence::~WriterFence() {
  ::close(file_);
}

// A file system without locks has none to wait for: the number alone keeps earlier generations out.
bool WriterFence::lock() const {
  constexpr int kOperation = LOCK_EX | LOCK_NB;
  return base::poll_until([&] { return ::flock(file_, kOperation) == 0 || errno != EWOULDBLOCK; },
                          base::Deadline(kWriterTime));
}

bool WriterFence::write(std::uint64_t generation, const std::function<void()>& write) {
  if (is_writing_) {
    write();
    return true;
  }
  if (!lock()) return false;
  struct Unlock {
    ~Unlock() {
      ::flock(file, LOCK_UN);
      is_writing = false;
    }
    int file;
    bool& is_writing;
  } const unlock{file_, is_writing_};
  is_writing_ = true;
  std::array<char, 24> text{};
  const ssize_t length = ::pread(file_, text.data(), text.size() - 1, 0);
  const std::uint64_t newest = length > 0 ? std::strtoull(text.data(), nullptr, 10) : 0;
  if (newest > generation) {
    throw elastic::GenerationEnded(
        "train.elastic",
        base::concat("generation ", newest, " has written to the run's folder, and this process is in ",
                     generation));
  }
  if (newest < generation) set_number(generation);
  write();
  return true;
}

void WriterFence::begin(std::uint64_t generation) {
  if (::ftruncate(file_, 0) == 0) set_number(generation);
}

void WriterFence::set_number(std::uint64_t generation) const {
  const std::string number = std::to_string(generation) + "\n";
  if (::pwrite(file_, number.data(), number.size(), 0) == static_cast<ssize_t>(number.size())) return;
  throw SystemError("train.elastic",
                    base::concat(path_.string(), " cannot be written: ", std::strerror(errno)),
                    "free space there, or another run.dir");
}

}  // namespace cohort::train
