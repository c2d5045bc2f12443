#include "cohort/data/partial_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "cohort/core/error.h"

namespace cohort::data {
namespace {

namespace fs = std::filesystem;
constexpr const char* kWhere = "data.tools";
constexpr const char* kMarker = ".cohort-data";

DataError refusal(const fs::path& folder, const std::string& why) {
  return {kWhere, core::concat(folder.string(), " exists: ", why), "another folder, or remove it"};
}

void check(const std::error_code& error, const std::string& what, const fs::path& path) {
  if (error)
    throw SystemError(kWhere, core::concat("cannot ", what, " ", path.string(), ": ", error.message()));
}

// A locked marker in the new folder `folder`. It gets its name when it is locked, so that a marker without a
// lock is that of a process that has ended. Some file systems know no locks: the marker is then taken for
// another's for ever.
core::Fd make_marker(const fs::path& folder) {
  const fs::path unnamed = folder / (std::string(kMarker) + ".new");
  core::Fd file(::open(unnamed.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  std::error_code error;
  if (!file.is_open()) error.assign(errno, std::system_category());
  check(error, "write", unnamed);
  static_cast<void>(::flock(file.get(), LOCK_EX | LOCK_NB));
  fs::rename(unnamed, folder / kMarker, error);
  check(error, "write", folder / kMarker);
  return file;
}

}  // namespace

PartialFolder::PartialFolder(const std::string& final) {
  std::error_code error;
  final_ = fs::path(final);
  if (!final_.has_filename()) final_ = final_.parent_path();  // a slash at the end
  if (fs::exists(final_, error) && !(fs::is_directory(final_, error) && fs::is_empty(final_, error))) {
    throw DataError(kWhere, final + " exists already", "another folder, or remove it");
  }
  partial_ = final_;
  partial_ += ".partial";
  if (final_.has_parent_path()) fs::create_directories(final_.parent_path(), error);
  check(error, "make", final_.parent_path());
  if (fs::symlink_status(partial_, error).type() != fs::file_type::not_found) remove_leftover();
  const bool made = fs::create_directory(partial_, error);
  check(error, "make", partial_);
  if (!made) throw refusal(partial_, "another process has just made it");
  try {
    lock_ = make_marker(partial_);
  } catch (...) {
    fs::remove_all(partial_, error);
    throw;
  }
}

// Whoever holds the lock of a marker may remove its folder.
void PartialFolder::remove_leftover() {
  const fs::path marker = partial_ / kMarker;
  const core::Fd file(::open(marker.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC));
  if (!file.is_open())
    throw refusal(partial_, "it was not made by `cohort data`, or another process has just made it");
  struct stat status {};
  // Without a name left, the marker was removed by a process that took the folder over just now.
  if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0 || ::fstat(file.get(), &status) != 0 ||
      status.st_nlink == 0) {
    throw refusal(partial_, "another process is writing it");
  }
  std::error_code error;
  fs::remove_all(partial_, error);
  check(error, "remove", partial_);
}

PartialFolder::~PartialFolder() {
  std::error_code ignored;
  if (!finished_) fs::remove_all(partial_, ignored);
}

void PartialFolder::finish() {
  std::error_code error;
  fs::remove(partial_ / kMarker, error);
  check(error, "remove", partial_ / kMarker);
  fs::rename(partial_, final_, error);  // replaces an empty folder
  check(error, "rename", partial_);
  finished_ = true;
}

}  // namespace cohort::data
