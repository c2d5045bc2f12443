// A sample takes three steps: its file's bytes, the pipeline's decoding and transforms, and the floats in the
// batch's memory. The bytes come from the cache, where there is any, or from the file into a buffer that the
// thread keeps. The shape of a sample is fixed in the constructor, by the transforms or by the first image
// whose header can be read.
#include "cohort/data/image_folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>

#include "cohort/base/error.h"
#include "cohort/data/file_bytes.h"
#include "cohort/data/internal/fingerprint.h"

namespace cohort::data {
namespace {

std::vector<TransformSpec> or_to_tensor(const std::vector<TransformSpec>& specs) {
  return specs.empty() ? std::vector<TransformSpec>{{"ToTensor", {}}} : specs;
}

std::vector<std::byte>& thread_buffer() {
  thread_local std::vector<std::byte> buffer;
  return buffer;
}

}  // namespace

ImageFolder::ImageFolder(const std::string& path, const ImageFolderOptions& options)
    : index_(scan_image_folder(path, {options.allow_empty, options.on_other_files})),
      pipeline_(or_to_tensor(options.transforms), options.color, options.decode),
      channels_last_(options.channels_last) {
  if (options.cache_bytes < 0) {
    throw UsageError("data.image_folder",
                     base::concat("cache_bytes is ", options.cache_bytes, ", expected at least 0"));
  }
  // Files are named from here on: the system then walks one folder per open and not the whole path.
  root_ = ::open(path.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (root_ < 0)
    throw DataError("data.image_folder", base::concat("cannot open ", path, ": ", std::strerror(errno)));
  try {
    if (options.cache_bytes > 0) cache_ = std::make_unique<EncodedCache>(size(), options.cache_bytes);
    if (!pipeline_.has_output_shape() && size() > 0) pipeline_.set_input_size(common_size(options.decode));
  } catch (...) {
    ::close(root_);
    throw;
  }
}

ImageFolder::~ImageFolder() {
  ::close(root_);
}

// Where nothing in the transforms fixes the size, all images must have that of the first which can be read;
// what becomes of those before it is the loader's affair.
ImageSize ImageFolder::common_size(const DecodeOptions& decode) const {
  constexpr std::int64_t kMaxTried = 100;
  std::exception_ptr first_error;
  for (std::int64_t index = 0; index < std::min(size(), kMaxTried); ++index) {
    try {
      return read_image_header(file_bytes(index), describe(index), decode).size();
    } catch (const Error&) {
      if (first_error == nullptr) first_error = std::current_exception();
    }
  }
  std::rethrow_exception(first_error);
}

std::vector<Field> ImageFolder::fields() const {
  const ImageShape shape = pipeline_.output_shape();
  return {{"image", at::kFloat, {shape.begin(), shape.end()}, channels_last_},
          {"label", at::kLong, {}, false}};
}

std::string ImageFolder::fingerprint() const {
  // A size is a system call, which takes as long as opening the file where that lies on a network.
  constexpr std::int64_t kSizes = 1024;
  Fingerprint fingerprint;
  for (std::int64_t i = 0; i < size(); ++i) fingerprint.add(index_.name(i), std::strlen(index_.name(i)) + 1);
  const std::int64_t stride = std::max<std::int64_t>(1, (size() + kSizes - 1) / kSizes);
  for (std::int64_t i = 0; i < size(); i += stride) {
    struct stat status {};
    const std::int64_t bytes = ::fstatat(root_, index_.name(i), &status, 0) == 0 ? status.st_size : -1;
    fingerprint.add(&bytes, sizeof bytes);
  }
  return fingerprint.text();
}

std::span<const std::byte> ImageFolder::file_bytes(std::int64_t index) const {
  if (cache_ != nullptr) {
    if (const auto bytes = cache_->find(index)) return *bytes;
  }
  const auto bytes = read_file_bytes(root_, index_.name(index), index_.path(index), thread_buffer());
  if (cache_ != nullptr) cache_->store(index, bytes);
  return bytes;
}

void ImageFolder::read(std::int64_t index, base::RandomStream& random,
                       std::span<std::byte* const> out) const {
  // The name is only needed for messages, but it must exist by then; it reuses its memory.
  thread_local std::string name;
  name.assign(index_.root()).append("/").append(index_.name(index));
  pipeline_.run_encoded(file_bytes(index), name, random, reinterpret_cast<float*>(out[0]),
                        channels_last_ ? Layout::kChannelsLast : Layout::kChannelsFirst);
  const std::int64_t label = index_.label(index);
  std::memcpy(out[1], &label, sizeof(label));
}

}  // namespace cohort::data
