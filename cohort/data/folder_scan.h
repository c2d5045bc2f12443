#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cohort/data/check_index.h"

/// Image folders: which files belong to which class. No LibTorch.
namespace cohort::data {

/// What happens to files of an image folder that cannot be its images.
enum class OnOtherFiles {
  kIgnore,  ///< FolderIndex::other_files lists them, and nothing else.
  kWarn,    ///< They are counted and named in the log, once for a folder.
  kRaise,   ///< They are a DataError, which counts and names them.
};

/// What a scan of an image folder accepts.
struct FolderScanOptions {
  /// A class without images is an error unless this is set; it keeps its label either way.
  bool allow_empty = false;
  OnOtherFiles on_other_files = OnOtherFiles::kWarn;
};

/// Files that are passed over for one reason.
struct OtherFiles {
  std::string reason;  ///< ".webp", "without an ending", "outside the class folders", "dangling links",
                       ///< "pipes, sockets or devices"
  std::int64_t count = 0;
  std::string example;  ///< path of the first below the root
};

/// The images below a folder, in the order of torchvision's `ImageFolder`: classes sorted by name, in a class
/// by folder, then by file name. One string holds all names.
class FolderIndex {
 public:
  /// How many images there are.
  std::int64_t size() const { return static_cast<std::int64_t>(labels_.size()); }
  /// The folder that was scanned.
  const std::string& root() const { return root_; }
  /// Class names, sorted; a class's label is its place here.
  const std::vector<std::string>& classes() const { return classes_; }
  /// Throws: UsageError for an index that is not in 0 .. size() - 1; so do name and path.
  std::int64_t label(std::int64_t index) const { return labels_[checked(index)]; }
  /// Path below the root; its memory ends with a zero.
  const char* name(std::int64_t index) const { return names_.data() + offsets_[checked(index)]; }
  /// The root and name(), joined.
  std::string path(std::int64_t index) const { return root_ + "/" + name(index); }
  /// Files that are no images, by reason, the most frequent first. Those whose name begins with a dot do not
  /// count.
  const std::vector<OtherFiles>& other_files() const { return other_files_; }
  /// "12 files are passed over: 9 .webp (such as cat/3.webp), 3 .bmp (...)", or nothing where there are none.
  std::string explain_other_files() const;

 private:
  std::size_t checked(std::int64_t index) const {
    check_index("data.image_folder", index, size());
    return static_cast<std::size_t>(index);
  }

  friend FolderIndex scan_image_folder(const std::string& root, const FolderScanOptions& options);
  std::string root_;
  std::vector<std::string> classes_;
  std::string names_;
  std::vector<std::size_t> offsets_;
  std::vector<std::int32_t> labels_;
  std::vector<OtherFiles> other_files_;
};

/// Returns the images (.jpg, .jpeg, .png, in any case) below `root`: a folder per class, nested at will.
/// Symbolic links are followed. 70,000 files take a few tens of milliseconds.
/// Throws: DataError for a folder that is missing, has no classes or cannot be listed to its end, for a class
/// without images, naming it, and for files that are no images where they are rejected.
FolderIndex scan_image_folder(const std::string& root, const FolderScanOptions& options = {});

/// Whether `name` ends like an image that can be read.
bool has_image_extension(std::string_view name);

}  // namespace cohort::data
