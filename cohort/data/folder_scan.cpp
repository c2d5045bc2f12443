// A walk lists each class folder and sorts what it finds, so the order of the file system never shows. Every
// name goes into the index, with its label, or into a count of files passed over for a reason. Only what the
// listing calls neither a file nor a folder costs a stat, such as a link. A read error is told from the end
// of a listing, so a folder is never taken for shorter than it is. The depth is limited, because a symbolic
// link may lead back to a folder above.
#include "cohort/data/folder_scan.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/base/text/format_list.h"

namespace cohort::data {
namespace {

constexpr const char* kWhereImageFolder = "data.image_folder";
constexpr int kDeepest = 64;

struct Listing {
  std::vector<std::string> folders;
  std::vector<std::string> files;
  std::vector<std::string> dangling;  // links that lead nowhere
  std::vector<std::string> special;   // neither files nor folders
};

// The list of `listing` that an entry of the open folder `path` belongs to.
std::vector<std::string>& list_of(Listing& listing, const std::string& path, int folder,
                                  const dirent& entry) {
  if (entry.d_type == DT_DIR) return listing.folders;
  if (entry.d_type == DT_REG) return listing.files;
  struct stat status {};  // a link, or a file system that does not say
  if (::fstatat(folder, entry.d_name, &status, 0) != 0) {
    if (errno == ENOENT || errno == ENOTDIR || errno == ELOOP) return listing.dangling;
    throw DataError(kWhereImageFolder,
                    base::concat("cannot look at ", path, "/", entry.d_name, ": ", std::strerror(errno)));
  }
  if (S_ISDIR(status.st_mode)) return listing.folders;
  return S_ISREG(status.st_mode) ? listing.files : listing.special;
}

Listing list(const std::string& path) {
  struct Close {
    void operator()(DIR* open) const { ::closedir(open); }
  };
  const std::unique_ptr<DIR, Close> stream(::opendir(path.c_str()));
  if (stream == nullptr) {
    throw DataError(kWhereImageFolder, base::concat("cannot open folder ", path, ": ", std::strerror(errno)),
                    errno == ENOENT ? "check the path" : "");
  }
  Listing listing;
  for (;;) {
    errno = 0;  // only so is an error known from the end
    const dirent* entry = ::readdir(stream.get());
    if (entry == nullptr && errno != 0)
      throw DataError(kWhereImageFolder,
                      base::concat("cannot list folder ", path, ": ", std::strerror(errno)));
    if (entry == nullptr) return listing;
    const std::string_view name = entry->d_name;
    if (name == "." || name == "..") continue;
    list_of(listing, path, ::dirfd(stream.get()), *entry).emplace_back(name);
  }
}

// A folder of a class, named from the root.
struct ClassSubfolder {
  std::string folder;
  Listing listing;
};

void walk(const std::string& root, const std::string& folder, int depth, std::vector<ClassSubfolder>& parts) {
  if (depth > kDeepest) {
    throw DataError(kWhereImageFolder,
                    base::concat(root, "/", folder, " is nested more than ", kDeepest, " deep"),
                    "look for a symbolic link that leads back to a folder above it");
  }
  Listing listing = list(root + "/" + folder);
  for (const std::string& inner : listing.folders) walk(root, folder + "/" + inner, depth + 1, parts);
  std::ranges::sort(listing.files);
  parts.push_back({folder, std::move(listing)});
}

std::string empty_class(const std::string& name, const std::vector<ClassSubfolder>& parts) {
  std::size_t num_others = 0;
  std::string example;
  for (const ClassSubfolder& part : parts) {
    num_others += part.listing.files.size();
    if (example.empty() && !part.listing.files.empty()) example = part.listing.files.front();
  }
  std::string text = base::concat("class '", name, "' has no image (.jpg, .jpeg, .png)");
  if (num_others > 0) text += base::concat(" among ", num_others, " files such as ", example);
  return text;
}

// ASCII only: tolower() depends on the locale, and endings of images do not.
char lower(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

// In small letters and with its dot; empty where there is none.
std::string ending_of(std::string_view name) {
  const std::size_t dot = name.rfind('.');
  if (dot == std::string_view::npos) return "";
  std::string ending(name.substr(dot));
  std::ranges::transform(ending, ending.begin(), lower);
  return ending;
}

// Counts files by the reason for which they are passed over.
class Others {
 public:
  void add(const std::string& reason, const std::string& folder, const std::string& name) {
    // Not counted: nobody put these files there, and a warning of them would hide others.
    if (name.starts_with('.')) return;  // .DS_Store and its like
    OtherFiles& files = by_reason_[reason];
    if (files.count++ == 0) files.example = folder.empty() ? name : folder + "/" + name;
  }
  // What is no file, whatever its name.
  void add_no_files(const std::string& folder, const Listing& listing) {
    for (const std::string& name : listing.dangling) add("dangling links", folder, name);
    for (const std::string& name : listing.special) add("pipes, sockets or devices", folder, name);
  }
  std::vector<OtherFiles> take() {
    std::vector<OtherFiles> all;
    for (auto& [reason, files] : by_reason_) {
      files.reason = reason;
      all.push_back(std::move(files));
    }
    // The largest group first: the message names a few only.
    std::ranges::stable_sort(all, std::ranges::greater(), &OtherFiles::count);
    return all;
  }

 private:
  std::map<std::string, OtherFiles> by_reason_;
};

void report_other_files(const FolderIndex& index, OnOtherFiles action) {
  if (action == OnOtherFiles::kIgnore || index.other_files().empty()) return;
  const std::string what = base::concat(index.root(), ": ", index.explain_other_files());
  if (action == OnOtherFiles::kWarn) return base::warn_once("data.other_files " + index.root(), what);
  throw DataError(kWhereImageFolder, what, "turn them into JPEG or PNG, or take them out of the folder");
}

}  // namespace

bool has_image_extension(std::string_view name) {
  const std::string ending = ending_of(name);
  return ending == ".jpg" || ending == ".jpeg" || ending == ".png";
}

std::string FolderIndex::explain_other_files() const {
  constexpr std::size_t kNamed = 5;
  std::int64_t total = 0;
  base::TextList named;
  for (std::size_t i = 0; i < other_files_.size(); ++i) {
    const OtherFiles& files = other_files_[i];
    total += files.count;
    if (i == kNamed) named.add("...");
    if (i >= kNamed) continue;
    named.add(files.count, " ", files.reason, " (such as ", files.example, ")");
  }
  if (total == 0) return "";
  return base::concat(total, total == 1 ? " file is" : " files are",
                      " passed over, images are .jpg, .jpeg and .png: ", named.text());
}

FolderIndex scan_image_folder(const std::string& root, const FolderScanOptions& options) {
  FolderIndex index;
  index.root_ = root;
  while (index.root_.size() > 1 && index.root_.back() == '/') index.root_.pop_back();
  Others other_files;
  Listing top = list(root);
  for (const std::string& name : top.files) other_files.add("outside the class folders", "", name);
  other_files.add_no_files("", top);
  index.classes_ = std::move(top.folders);
  if (index.classes_.empty()) {
    throw DataError(kWhereImageFolder, root + " has no class folders, expected a folder of images per class",
                    "the folder above or below, or `cohort data` to make an image folder");
  }
  // The label of a class is its place in this order, as in torchvision's ImageFolder.
  std::ranges::sort(index.classes_);
  for (std::size_t label = 0; label < index.classes_.size(); ++label) {
    std::vector<ClassSubfolder> parts;
    walk(index.root_, index.classes_[label], 0, parts);
    // By folder, then by name, whatever order walk() went in.
    std::ranges::sort(parts, {}, &ClassSubfolder::folder);
    const std::size_t before = index.labels_.size();
    for (const ClassSubfolder& part : parts) {
      other_files.add_no_files(part.folder, part.listing);
      for (const std::string& file : part.listing.files) {
        if (!has_image_extension(file)) {
          const std::string ending = ending_of(file);
          other_files.add(ending.empty() ? "without an ending" : ending, part.folder, file);
          continue;
        }
        // All names stand in one string, ended by zeros for openat(): millions of small strings would take
        // several times the memory.
        index.offsets_.push_back(index.names_.size());
        index.names_.append(part.folder).append("/").append(file).push_back('\0');
        index.labels_.push_back(static_cast<std::int32_t>(label));
      }
    }
    if (index.labels_.size() == before && !options.allow_empty) {
      throw DataError(kWhereImageFolder,
                      base::concat(empty_class(index.classes_[label], parts), " in ", index.root_),
                      "remove the class, or allow empty classes");
    }
  }
  index.other_files_ = other_files.take();
  report_other_files(index, options.on_other_files);
  return index;
}

}  // namespace cohort::data
