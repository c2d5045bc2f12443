// The files of a folder are shared out over threads by item, and no result depends on the number of threads.
// Broken files are sorted by their place; statistics come from a histogram of pixel values for each thread
// and channel. Mean and deviation follow from the added counts in 128-bit integers, so nothing is rounded
// before the last steps.
#include "cohort/data/dataset_tools.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <span>

#include "cohort/base/error.h"
#include "cohort/data/codecs/codec.h"
#include "cohort/data/file_bytes.h"
#include "cohort/data/folder_scan.h"
#include "cohort/data/idx.h"
#include "cohort/data/internal/atomic_directory.h"
#include "cohort/data/internal/parallel.h"

namespace cohort::data {
namespace {

constexpr const char* kWhereTools = "data.dataset_tools";

void write_file(const std::string& path, std::span<const std::byte> bytes) {
  // O_EXCL: in a folder of our own no name may be there already; two items with one name would be a mistake
  // of ours.
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  bool ok = fd >= 0;
  while (ok && !bytes.empty()) {
    const ssize_t done = ::write(fd, bytes.data(), bytes.size());
    if (done < 0 && errno == EINTR) continue;
    ok = done >= 0;
    if (ok) bytes = bytes.subspan(static_cast<std::size_t>(done));
  }
  // Kept before close(), which may set errno too.
  const int cause = errno;
  if (fd >= 0 && ::close(fd) != 0) ok = false;
  if (!ok) throw SystemError(kWhereTools, base::concat("cannot write ", path, ": ", std::strerror(cause)));
}

// Reads and decodes image `item` of a folder into memory of this thread.
const Image& decode(const FolderIndex& index, std::int64_t item, ColorMode color) {
  // Kept for the thread's next image: decoding a folder then allocates nothing for each file.
  thread_local std::vector<std::byte> buffer;
  thread_local Image image;
  const std::string path = index.path(item);
  decode_image(read_file_bytes(path, buffer), color, path, image);
  return image;
}

void check_class_name(const std::string& name) {
  if (!name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos &&
      name.find('\0') == std::string::npos) {
    return;
  }
  throw UsageError(kWhereTools, "class name '" + name + "' cannot be a folder's name");
}

// Zeros in front, so that names sort in the order of the numbers.
std::string padded(std::int64_t number, std::int64_t count) {
  std::string digits = std::to_string(number);
  const std::size_t width = std::to_string(std::max<std::int64_t>(count - 1, 0)).size();
  return std::string(width - digits.size(), '0') + digits;
}

}  // namespace

const std::array<std::string, 10>& fashion_mnist_class_names() {
  static const std::array<std::string, 10> names = {"0-t-shirt", "1-trouser",   "2-pullover", "3-dress",
                                                    "4-coat",    "5-sandal",    "6-shirt",    "7-sneaker",
                                                    "8-bag",     "9-ankle-boot"};
  return names;
}

GeneratedFolder folder_from_idx(const std::string& images, const std::string& labels,
                                const std::string& folder, const IdxFolderOptions& options) {
  const IdxArray pixels = read_idx_images(images);
  const IdxArray classes = read_idx_labels(labels);
  const std::int64_t count = pixels.shape[0];
  if (count != classes.shape[0]) {
    throw DataError(kWhereTools, base::concat(images, " has ", count, " images, ", labels, " has ",
                                              classes.shape[0], " labels"));
  }
  // The largest label counts, not how many differ: a label keeps its place when a class before it has no
  // images.
  const auto largest = std::ranges::max_element(classes.bytes);
  const std::size_t num_classes =
      largest == classes.bytes.end() ? 0 : std::to_integer<std::size_t>(*largest) + 1;
  std::vector<std::string> names = options.class_names;
  if (names.empty()) {
    for (std::size_t i = 0; i < num_classes; ++i)
      names.push_back(padded(static_cast<std::int64_t>(i), static_cast<std::int64_t>(num_classes)));
  }
  if (names.size() < num_classes) {
    throw UsageError(kWhereTools, base::concat("label ", num_classes - 1, " has no name: got ", names.size(),
                                               " class names"));
  }
  AtomicDirectory made(folder);
  std::vector<std::string> paths;
  for (const std::string& name : names) {
    check_class_name(name);
    paths.push_back((made.path() / name).string());
    std::filesystem::create_directory(paths.back());
  }
  const std::int64_t channels = pixels.shape.size() == 4 ? pixels.shape[3] : 1;
  // A slot for each thread, so that no lock is needed; added up at the end.
  std::vector<std::int64_t> bytes(static_cast<std::size_t>(std::max(options.threads, 1)));
  for_each_item(count, options.threads, [&](int thread, std::int64_t item) {
    thread_local Image image;
    image.reshape(pixels.shape[1], pixels.shape[2], channels);
    std::memcpy(image.pixels.data(),
                pixels.bytes.data() + static_cast<std::size_t>(item) * image.pixels.size(),
                image.pixels.size());
    const std::vector<std::byte> file = encode_jpeg(image, options.quality);
    const auto label = std::to_integer<std::size_t>(classes.bytes[static_cast<std::size_t>(item)]);
    write_file(paths[label] + "/" + padded(item, count) + ".jpg", file);
    bytes[static_cast<std::size_t>(thread)] += static_cast<std::int64_t>(file.size());
  });
  made.finish();
  GeneratedFolder result{count, 0};
  for (const std::int64_t part : bytes) result.bytes += part;
  return result;
}

VerifyReport verify_folder(const std::string& folder, int threads) {
  const FolderIndex index =
      // Nothing is rejected here: the report lists what is wrong, all of it.
      scan_image_folder(folder, {.allow_empty = true, .on_other_files = OnOtherFiles::kIgnore});
  VerifyReport report;
  report.passed_over = index.explain_other_files();
  report.checked = index.size();
  std::mutex mutex;
  std::vector<std::pair<std::int64_t, std::string>> broken;
  for_each_item(index.size(), threads, [&](int, std::int64_t item) {
    try {
      decode(index, item, ColorMode::kRgb);
    } catch (const Error& error) {
      const std::lock_guard lock(mutex);
      broken.emplace_back(item, error.what());
    }
  });
  // Threads find broken files in any order.
  std::ranges::sort(broken);
  for (auto& [item, reason] : broken) report.broken.push_back({index.path(item), std::move(reason)});
  return report;
}

ChannelStatistics channel_statistics(const std::string& folder, ColorMode color, int threads) {
  const FolderIndex index = scan_image_folder(folder, {.allow_empty = true});
  const auto channels = static_cast<std::size_t>(num_channels(color));
  // A histogram per thread and channel: mean and deviation follow from it without rounding.
  using Histogram = std::array<std::uint64_t, 256>;
  std::vector<std::vector<Histogram>> parts(static_cast<std::size_t>(std::max(threads, 1)),
                                            std::vector<Histogram>(channels, Histogram{}));
  for_each_item(index.size(), threads, [&](int thread, std::int64_t item) {
    const Image& image = decode(index, item, color);
    std::vector<Histogram>& histograms = parts[static_cast<std::size_t>(thread)];
    for (std::size_t i = 0; i < image.pixels.size(); i += channels) {
      for (std::size_t c = 0; c < channels; ++c) ++histograms[c][image.pixels[i + c]];
    }
  });
  ChannelStatistics result;
  result.images = index.size();
  for (std::size_t c = 0; c < channels; ++c) {
    // count * squares leaves 64 bits from about 17 million white pixels on.
    unsigned __int128 count = 0, sum = 0, squares = 0;
    for (std::uint64_t value = 0; value < 256; ++value) {
      std::uint64_t times = 0;
      for (const auto& part : parts) times += part[c][value];
      count += times;
      sum += static_cast<unsigned __int128>(times) * value;
      squares += static_cast<unsigned __int128>(times) * value * value;
    }
    if (count == 0) throw DataError(kWhereTools, folder + " has no pixels");
    const auto n = static_cast<double>(count);
    // count * squares - sum^2 is exact, so no digits are lost where the deviation is small.
    const auto spread = static_cast<double>(count * squares - sum * sum);
    result.mean.push_back(static_cast<double>(sum) / n / 255.0);
    result.deviation.push_back(std::sqrt(spread) / n / 255.0);
    result.pixels = static_cast<std::int64_t>(count);
  }
  return result;
}

}  // namespace cohort::data
