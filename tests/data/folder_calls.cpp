#include "tests/data/folder_calls.h"

#include <dirent.h>
#include <dlfcn.h>
#include <sys/stat.h>

#include <cerrno>

namespace {

int calls_left = -1;
int error_then = 0;

bool fails() {
  if (calls_left < 0 || calls_left-- > 0) return false;
  errno = error_then;
  return true;
}

template <typename Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

namespace cohort::test {

void fail_folder_call(int number, int error) {
  calls_left = number;
  error_then = error;
}

}  // namespace cohort::test

extern "C" {

DIR* opendir(const char* path) {
  static auto* const call = next<DIR*(const char*)>("opendir");
  return fails() ? nullptr : call(path);
}

dirent* readdir(DIR* stream) {
  static auto* const call = next<dirent*(DIR*)>("readdir");
  return fails() ? nullptr : call(stream);
}

int fstatat(int folder, const char* path, struct stat* status, int flags) noexcept {
  static auto* const call = next<int(int, const char*, struct stat*, int)>("fstatat");
  return fails() ? -1 : call(folder, path, status, flags);
}

}  // extern "C"
