#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "cohort/data/image.h"
#include "cohort/data/tar_reader.h"

/// What `cohort data` does: makes image folders, checks and measures them. No LibTorch.
///
/// A folder that is made appears whole or not at all: it is written beside its place under the name
/// `<folder>.partial` and renamed at the end. What a killed run left there is removed by the next; a folder
/// of that name that is somebody else's, or in use by another process, is a DataError.
namespace cohort::data {

/// What was made.
struct GeneratedFolder {
  std::int64_t files = 0;
  std::int64_t bytes = 0;  ///< of the files' contents
};

/// Unpacks a tar file (plain, or compressed with gzip, bzip2, xz or zstd) into the new folder `folder`. Only
/// files and folders: a link, an absolute name or one with `..` is rejected. The result is not checked to be
/// an image folder; see scan_image_folder. Throws: DataError naming the archive and the entry, or the limit
/// that it passes; SystemError where a file cannot be written.
GeneratedFolder unpack_tar(const std::string& archive, const std::string& folder,
                           const TarOptions& options = {});

/// How folder_from_list() puts files in their places.
struct LabelListOptions {
  /// Hard links instead of copies, where the file system can.
  bool link = false;
};

/// Makes the image folder `folder` of the files in `flat` that the list `csv` names: a line `file,label`
/// each; a label is the name of a class. A first line that names columns, `file` and `label` among them,
/// allows for more columns and another order. Fields may be quoted. Throws: DataError naming list and line.
GeneratedFolder folder_from_list(const std::string& flat, const std::string& csv, const std::string& folder,
                                 const LabelListOptions& options = {});

/// Names for Fashion-MNIST's labels 0 to 9 whose order is theirs, so that an image folder keeps the labels.
const std::array<std::string, 10>& fashion_mnist_class_names();

/// How folder_from_idx() writes images.
struct IdxFolderOptions {
  /// By label; the labels' digits if empty.
  std::vector<std::string> class_names = {};
  /// JPEG quality, 1 to 100.
  int quality = 95;
  /// Threads that decode and encode; the files do not depend on it.
  int threads = 1;
};

/// Makes the image folder `folder` of JPEG files of a pair of IDX files: `<class>/<index>.jpg`.
/// Throws: DataError for the files; UsageError when a label has no name.
GeneratedFolder folder_from_idx(const std::string& images, const std::string& labels,
                                const std::string& folder, const IdxFolderOptions& options = {});

/// An image that cannot be decoded.
struct BrokenFile {
  std::string path;    ///< as FolderIndex::path() gives it
  std::string reason;  ///< the decoder's message
};

/// Decodes every image of an image folder; returns those that cannot be, in order.
struct VerifyReport {
  std::int64_t checked = 0;        ///< images that were decoded, broken ones included
  std::vector<BrokenFile> broken;  ///< in the order of the folder
  /// FolderIndex::explain_other_files: what was not checked, or nothing.
  std::string passed_over;
};
/// Decodes every image below `folder` on `threads` threads. Throws: DataError for a folder that is no image
/// folder.
VerifyReport verify_folder(const std::string& folder, int threads = 1);

/// Mean and (population) deviation per channel of all pixels, scaled to 0 .. 1: the arguments of Normalize.
/// Exact up to the last rounding: sums are integers.
struct ChannelStatistics {
  std::vector<double> mean;       ///< one number per channel, between 0 and 1
  std::vector<double> deviation;  ///< as `mean`
  std::int64_t images = 0;
  std::int64_t pixels = 0;
};
/// Decodes every image below `folder` to `color`, and adds up its pixels. Throws: DataError for a folder
/// that is none, for one without pixels, and for an image that cannot be decoded.
ChannelStatistics channel_statistics(const std::string& folder, ColorMode color, int threads = 1);

}  // namespace cohort::data
