// The folder `<final>.partial` holds a marker, which this process locks, and `files`, which finish() renames.
// Only a process that has the marker's lock removes a partial folder that is not empty, so no folder in use
// is deleted. A killed process loses its lock, so its folder can be taken for a leftover. The marker is
// removed last: a removal that was cut short leaves a folder that is still known as a leftover.
#include "cohort/data/internal/atomic_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "cohort/base/error.h"

namespace cohort::data {
namespace {

namespace fs = std::filesystem;
constexpr const char* kWhereDirectory = "data.dataset_tools";
constexpr const char* kMarker = ".cohort-data";

DataError rejection(const fs::path& folder, const std::string& why) {
  return {kWhereDirectory, base::concat(folder.string(), " exists: ", why), "another folder, or remove it"};
}

void check(const std::error_code& error, const std::string& what, const fs::path& path) {
  if (error)
    throw SystemError(kWhereDirectory,
                      base::concat("cannot ", what, " ", path.string(), ": ", error.message()));
}

bool is_removed(const base::Fd& marker) {
  struct stat status {};
  return ::fstat(marker.get(), &status) != 0 || status.st_nlink == 0;
}

// A locked marker in the new folder `folder`. Until it is locked another process may take the folder for a
// leftover: then that process continues, and this one does not. Some file systems know no locks: the marker
// is then taken for another's for ever.
base::Fd make_marker(const fs::path& folder) {
  const fs::path path = folder / kMarker;
  base::Fd marker(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  bool is_taken = !marker.is_open() && (errno == ENOENT || errno == EEXIST);
  if (!marker.is_open() && !is_taken) check({errno, std::system_category()}, "write", path);
  if (marker.is_open() && ::flock(marker.get(), LOCK_EX | LOCK_NB) != 0) is_taken = errno == EWOULDBLOCK;
  if (is_taken || is_removed(marker)) throw rejection(folder, "another process has just made it");
  return marker;
}

// The marker goes last, so that what is left of the folder can be told from another's.
void remove_partial(const fs::path& folder, std::error_code& error) {
  for (fs::directory_iterator each(folder, error), end; !error && each != end; each.increment(error)) {
    if (each->path().filename() != kMarker) fs::remove_all(each->path(), error);
    if (error) return;
  }
  if (!error) fs::remove(folder / kMarker, error);
  if (!error) fs::remove(folder, error);
}

}  // namespace

AtomicDirectory::AtomicDirectory(const std::string& final) {
  std::error_code error;
  final_ = fs::path(final);
  if (!final_.has_filename()) final_ = final_.parent_path();  // a slash at the end
  if (fs::exists(final_, error) && !(fs::is_directory(final_, error) && fs::is_empty(final_, error))) {
    throw DataError(kWhereDirectory, final + " exists already", "another folder, or remove it");
  }
  partial_ = final_;
  partial_ += ".partial";
  if (final_.has_parent_path()) fs::create_directories(final_.parent_path(), error);
  check(error, "make", final_.parent_path());
  if (fs::symlink_status(partial_, error).type() != fs::file_type::not_found) remove_leftover();
  const bool made = fs::create_directory(partial_, error);
  check(error, "make", partial_);
  if (!made) throw rejection(partial_, "another process has just made it");
  lock_ = make_marker(partial_);
  files_ = partial_ / "files";
  fs::create_directory(files_, error);
  check(error, "make", files_);
}

// Whoever holds the lock of a marker may remove its folder. One that is empty was left before its marker was
// made, or has nothing to lose.
void AtomicDirectory::remove_leftover() {
  std::error_code error;
  const bool is_link = fs::is_symlink(partial_, error);
  if (!is_link && ::rmdir(partial_.c_str()) == 0) return;
  const base::Fd marker(::open((partial_ / kMarker).c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC));
  if (is_link || !marker.is_open())
    throw rejection(partial_, "it was not made by `cohort data`, or another process has just made it");
  if (::flock(marker.get(), LOCK_EX | LOCK_NB) != 0 || is_removed(marker))
    throw rejection(partial_, "another process is writing it");
  remove_partial(partial_, error);
  check(error, "remove", partial_);
}

AtomicDirectory::~AtomicDirectory() {
  std::error_code ignored;
  remove_partial(partial_, ignored);
}

void AtomicDirectory::finish() {
  std::error_code error;
  fs::rename(files_, final_, error);  // replaces an empty folder
  check(error, "rename", files_);
}

}  // namespace cohort::data
