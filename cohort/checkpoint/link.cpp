#include "cohort/checkpoint/link.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>

#include "cohort/base/error.h"
#include "cohort/checkpoint/file_writer.h"

namespace cohort::checkpoint {
namespace {

namespace fs = std::filesystem;
using base::concat;

// No file name is longer on Linux, so a larger file is no link of ours and is not read.
constexpr uintmax_t kMaxNameBytes = 256;

[[noreturn]] void fail(std::string_view what, const fs::path& path, int error) {
  throw SystemError("checkpoint.save",
                    concat("cannot ", what, " ", path.string(), ": ", std::strerror(error)));
}

// FAT and some network file systems have no symbolic links. There a small file holds the name.
bool means_no_links(int error) {
  return error == EPERM || error == EOPNOTSUPP || error == ENOSYS;
}

}  // namespace

void point_link(const fs::path& link, const std::string& target, const fs::path& temporary) {
  std::error_code absent;
  // Something of the user's has the name: it is not written over.
  if (fs::exists(fs::symlink_status(link, absent)) && !follow_link(link)) {
    fail("replace link", link, EEXIST);
  }
  // A leftover of a save that was killed under this process's own temporary name.
  ::unlink(temporary.c_str());
  if (::symlink(target.c_str(), temporary.c_str()) != 0) {
    if (!means_no_links(errno)) {
      fail("create link", temporary, errno);
    }
    FileWriter writer(temporary, target.size() + 1);
    writer.write(target + "\n");
    writer.finish();
  }
  try {
    // A rename replaces the link in one step: a reader sees the old target or the new one, never none.
    rename_and_sync(temporary, link);
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
}

std::optional<fs::path> follow_link(const fs::path& link) {
  std::error_code error;
  const fs::path target = fs::read_symlink(link, error);
  if (!error) {
    return link.parent_path() / target;
  }
  if (!fs::is_regular_file(link, error) || fs::file_size(link, error) > kMaxNameBytes) {
    return std::nullopt;
  }
  std::ifstream file(link, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  // One plain name and a line break. Anything else could lead out of the folder.
  const bool is_name = text.size() > 1 &&
                       text.find_first_of(std::string_view("/\n\0", 3)) == text.size() - 1 &&
                       text.back() == '\n' && text[0] != '.';
  return is_name ? std::optional(link.parent_path() / text.substr(0, text.size() - 1)) : std::nullopt;
}

}  // namespace cohort::checkpoint
