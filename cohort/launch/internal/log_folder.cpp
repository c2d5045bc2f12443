#include "cohort/launch/internal/log_folder.h"

#include <stdlib.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>

#include "cohort/base/error.h"

namespace cohort::launch {

namespace fs = std::filesystem;

LogFolder::LogFolder(const RunOptions& options)
    : stays_(!options.log_dir.empty() || options.redirects.any() || options.tee.any()) {
  const auto fail = [](const fs::path& path, const std::string& why) {
    throw SystemError("launch.log", base::concat("cannot make a folder in ", path.string(), ": ", why),
                      "--log-dir FOLDER that can be written to");
  };
  std::error_code error;
  const fs::path parent =
      options.log_dir.empty() ? fs::temp_directory_path(error) : fs::absolute(options.log_dir, error);
  if (!error) fs::create_directories(parent, error);
  if (error) fail(parent, error.message());
  // The id becomes part of a file's name, and may have slashes.
  std::string name = options.run_id;
  std::replace_if(
      name.begin(), name.end(),
      [](unsigned char c) { return std::isalnum(c) == 0 && c != '-' && c != '_' && c != '.'; }, '_');
  std::string pattern =
      (parent / ((options.log_dir.empty() ? "cohort-run-" : "") + name + "_XXXXXX")).string();
  // A new folder for each run: two jobs with one id do not mix their files.
  if (::mkdtemp(pattern.data()) == nullptr) fail(parent, std::strerror(errno));
  path_ = pattern;
}

LogFolder::~LogFolder() {
  if (stays_) return;
  // A destructor does not throw, and a folder that stays does no harm.
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

}  // namespace cohort::launch
