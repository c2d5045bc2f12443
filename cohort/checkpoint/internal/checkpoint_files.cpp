// The folder is opened once, and all files are opened in it, so a rename meanwhile cannot mix two
// checkpoints. All are mapped before the first is checked, because a mapped file stays readable when it is
// deleted. An error counts only if the opened folder still has its name; else the checkpoint was replaced,
// and is read again.
#include "cohort/checkpoint/internal/checkpoint_files.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "cohort/base/error.h"
#include "cohort/base/files/fd.h"
#include "cohort/checkpoint/known.h"
#include "cohort/checkpoint/safetensors_format.h"

namespace cohort::checkpoint {
namespace {

namespace fs = std::filesystem;
using base::concat;

constexpr const char* kWhere = "checkpoint.load";
constexpr int kMaxTries = 100;  // a save takes longer than to open three files

void verify(const MappedFile& file, const std::string& name, const Manifest& manifest,
            const fs::path& folder) {
  const auto entry = manifest.files.find(name);
  if (entry == manifest.files.end()) {
    throw DataError(kWhere, concat((folder / kManifestFile).string(), " does not list ", name), kDamagedHint);
  }
  const auto damaged = [&](const auto& got, const auto& expected) {
    return DataError(kWhere, concat((folder / name).string(), " is damaged: ", got, ", expected ", expected),
                     kDamagedHint);
  };
  if (file.size() != entry->second.bytes) {
    throw damaged(concat("got ", file.size(), " bytes"), entry->second.bytes);
  }
  const uint64_t actual = checksum(file.bytes());
  if (actual != entry->second.checksum) {
    throw damaged(concat("checksum got ", checksum_text(actual)), checksum_text(entry->second.checksum));
  }
}

/// Where `folder` is now: what was found under the name that it had while it was replaced may have its own
/// again.
fs::path place_of(const fs::path& folder) {
  return locate_checkpoint(folder.parent_path() / name_of(folder));
}

base::Fd open_folder(const fs::path& folder) {
  base::Fd opened(::open(place_of(folder).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (opened.is_open()) return opened;
  const bool is_absent = errno == ENOENT || errno == ENOTDIR;
  throw DataError(kWhere, is_absent ? concat(folder.string(), " is not the folder of a checkpoint")
                                    : concat("cannot open ", folder.string(), ": ", std::strerror(errno)));
}

std::shared_ptr<const MappedFile> open_file(const base::Fd& opened, const fs::path& path) {
  auto file = MappedFile::open_in(opened.get(), path);
  if (file == nullptr) throw DataError(kWhere, concat(path.string(), " is missing"), kDamagedHint);
  return file;
}

bool is_at(const base::Fd& opened, const fs::path& folder) {
  struct stat there {
  }, named{};
  return opened.is_open() && ::fstat(opened.get(), &there) == 0 && ::stat(folder.c_str(), &named) == 0 &&
         there.st_dev == named.st_dev && there.st_ino == named.st_ino;
}

}  // namespace

CheckpointFiles open_checkpoint(
    const fs::path& folder,
    const std::function<std::vector<std::string>(const Manifest& manifest)>& names_of) {
  for (int tries = 1;; ++tries) {
    base::Fd opened;
    try {
      opened = open_folder(folder);
      CheckpointFiles found;
      // All are mapped before the first is looked at: what is mapped stays when it is deleted.
      const auto text = open_file(opened, folder / kManifestFile);
      found.manifest = parse_manifest({reinterpret_cast<const char*>(text->bytes().data()), text->size()},
                                      folder / kManifestFile);
      const std::vector<std::string> names = names_of(found.manifest);
      for (const std::string& name : names) found.files[name] = open_file(opened, folder / name);
      for (const std::string& name : names) verify(*found.files[name], name, found.manifest, folder);
      return found;
    } catch (const DataError&) {
      if (tries == kMaxTries || is_at(opened, place_of(folder))) throw;
    }
  }
}

}  // namespace cohort::checkpoint
