#include "cohort/base/load_plugin.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <string>
#include <system_error>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"

namespace cohort::base {
namespace {

std::string library_being_loaded;  // read by end_while_loading

// dlopen does not let exceptions through: one thrown while the library's globals are made ends the process.
// What can be done is to say what it was, and of which library.
[[noreturn]] void end_while_loading() {
  std::string what = "an exception that is no std::exception";
  try {
    if (const auto error = std::current_exception()) std::rethrow_exception(error);
  } catch (const std::exception& error) {
    what = message_of(error);
  } catch (...) {
  }
  std::fprintf(stderr, "cohort: [base.load_plugin] %s threw while it was loaded: %s\n",
               library_being_loaded.c_str(), what.c_str());
  std::_Exit(2);
}

}  // namespace

void load_plugin(const std::filesystem::path& library) {
  library_being_loaded = library.string();
  const std::terminate_handler before = std::set_terminate(end_while_loading);
  void* handle = nullptr;
  try {
    handle = dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL);
  } catch (...) {  // a dlopen that does let it through, such as the address sanitizer's
    end_while_loading();
  }
  std::set_terminate(before);
  if (handle == nullptr) {
    const char* reason = dlerror();
    // The linker's own reason for a missing file says the same of a library that the file needs.
    std::error_code ignored;
    if (library.has_parent_path() && !std::filesystem::exists(library, ignored) && !ignored) {
      throw UsageError("base.load_plugin",
                       concat("cannot load ", library.string(), ": there is no such file"),
                       concat("its full path; relative paths count from ",
                              std::filesystem::current_path(ignored).string()));
    }
    throw UsageError("base.load_plugin", concat("cannot load ", library.string(), ": ", reason),
                     "build it against this Cohort and LibTorch (docs/guide/plugins.md), and give its path "
                     "with a slash in it");
  }
}

}  // namespace cohort::base
