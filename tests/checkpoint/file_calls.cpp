#include "tests/checkpoint/file_calls.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>

namespace {

cohort::test::FileCallLimits limits_now;
int calls_left = -1;

void pass_moment() {
  if (calls_left == 0) ::kill(::getpid(), SIGKILL);
  if (calls_left > 0) --calls_left;
}

template <typename... Args>
long call(long number, Args... args) {
  pass_moment();
  return ::syscall(number, args...);
}

int reject(int error) {
  errno = error;
  return -1;
}

}  // namespace

namespace cohort::test {

void set_file_call_limits(const FileCallLimits& limits) {
  limits_now = limits;
}
void kill_at_file_call(int number) {
  calls_left = number;
}

}  // namespace cohort::test

extern "C" {

int open(const char* path, int flags, ...) {
  va_list list;
  va_start(list, flags);
  const int mode = (flags & O_CREAT) != 0 ? va_arg(list, int) : 0;
  va_end(list);
  if ((flags & O_CREAT) == 0) return static_cast<int>(::syscall(SYS_openat, AT_FDCWD, path, flags, 0));
  return static_cast<int>(call(SYS_openat, AT_FDCWD, path, flags, mode));
}

ssize_t write(int file, const void* data, size_t size) {
  return call(SYS_write, file, data, size);
}
ssize_t pwrite(int file, const void* data, size_t size, off_t offset) {
  return call(SYS_pwrite64, file, data, size, offset);
}
int ftruncate(int file, off_t size) noexcept {
  return static_cast<int>(call(SYS_ftruncate, file, size));
}
int fallocate(int file, int mode, off_t offset, off_t size) {
  return static_cast<int>(call(SYS_fallocate, file, mode, offset, size));
}
// A moment and no more: what is killed is the process, not the machine, and waiting for the disk thousands of
// times takes minutes.
int fsync(int) {
  pass_moment();
  return 0;
}

int mkdir(const char* path, mode_t mode) noexcept {
  return static_cast<int>(call(SYS_mkdirat, AT_FDCWD, path, mode));
}
int rename(const char* from, const char* to) noexcept {
  return static_cast<int>(call(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}
int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) noexcept {
  if (!limits_now.can_exchange && (flags & RENAME_EXCHANGE) != 0) return reject(EINVAL);
  return static_cast<int>(call(SYS_renameat2, from_folder, from, to_folder, to, flags));
}
int symlink(const char* target, const char* path) noexcept {
  if (!limits_now.can_link) return reject(EPERM);
  return static_cast<int>(call(SYS_symlinkat, target, AT_FDCWD, path));
}
int unlink(const char* path) noexcept {
  return static_cast<int>(call(SYS_unlinkat, AT_FDCWD, path, 0));
}
int rmdir(const char* path) noexcept {
  return static_cast<int>(call(SYS_unlinkat, AT_FDCWD, path, AT_REMOVEDIR));
}
int unlinkat(int folder, const char* path, int flags) noexcept {
  return static_cast<int>(call(SYS_unlinkat, folder, path, flags));
}
int remove(const char* path) noexcept {
  const int file = unlink(path);
  return file != 0 && errno == EISDIR ? rmdir(path) : file;
}

}  // extern "C"
