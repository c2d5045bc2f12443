// The first bytes of a file choose the JPEG or the PNG reader, each of which stays for the next image. A
// read() needs an open() before it, and its region is checked against the header here. So the readers never
// see a region that leaves the image.
#include "cohort/data/codecs/codec.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "cohort/base/error.h"
#include "cohort/data/codecs/internal/jpeg_reader.h"
#include "cohort/data/codecs/internal/png_reader.h"

namespace cohort::data {
namespace {

constexpr std::string_view kJpegMagic = "\xFF\xD8\xFF";
constexpr std::string_view kPngMagic = "\x89PNG\r\n\x1A\n";

bool starts_with(std::span<const std::byte> file, std::string_view magic) {
  return file.size() >= magic.size() && std::memcmp(file.data(), magic.data(), magic.size()) == 0;
}

/// Says what a file that is no image looks like instead.
std::string describe_start(std::span<const std::byte> file) {
  constexpr std::pair<std::string_view, std::string_view> kKnown[] = {
      {"GIF8", "a GIF"},      {"RIFF", "a RIFF file (WebP?)"}, {"BM", "a BMP"},      {"II*", "a TIFF"},
      {"MM", "a TIFF"},       {"\x1F\x8B", "a gzip file"},     {"PK", "a zip file"}, {"<html", "a web page"},
      {"<!DOC", "a web page"}};
  for (const auto& [magic, what] : kKnown) {
    if (starts_with(file, magic)) {
      return std::string(what);
    }
  }
  const size_t count = std::min<size_t>(file.size(), 16);
  const bool text = std::all_of(file.begin(), file.begin() + static_cast<ptrdiff_t>(count), [](std::byte b) {
    const auto c = static_cast<unsigned char>(b);
    return (c >= 32 && c < 127) || c == '\n' || c == '\r' || c == '\t';
  });
  if (text) {
    std::string start(reinterpret_cast<const char*>(file.data()), count);
    std::replace_if(start.begin(), start.end(), [](char c) { return c < 32; }, ' ');
    return "text that starts with \"" + start + "\"";
  }
  std::string hex = "bytes";
  for (size_t i = 0; i < std::min<size_t>(count, 8); ++i) {
    constexpr char kDigits[] = "0123456789abcdef";
    const auto c = static_cast<unsigned char>(file[i]);
    hex += {' ', kDigits[c >> 4], kDigits[c & 15]};
  }
  return hex;
}

}  // namespace

// Both readers keep their memory and their library's tables, so a thread allocates little for each image.
struct ImageDecoder::Impl {
  JpegReader jpeg;
  PngReader png;
  ImageHeader header;
  bool opened = false;
};

ImageDecoder::ImageDecoder() : impl_(std::make_unique<Impl>()) {}
ImageDecoder::~ImageDecoder() = default;

ImageHeader ImageDecoder::open(std::span<const std::byte> file, ColorMode color, const std::string& name,
                               const DecodeOptions& options) {
  // Before anything can throw: after a failed open() there is nothing to read.
  impl_->opened = false;
  if (file.empty()) {
    throw DataError("data.image", base::concat(name, ": the file is empty (0 bytes)"),
                    "delete it, or copy the image again");
  }
  if (starts_with(file, kJpegMagic)) {
    impl_->header = impl_->jpeg.open(file, color, name, options);
  } else if (starts_with(file, kPngMagic)) {
    impl_->header = impl_->png.open(file, color, name, options);
  } else {
    throw DataError(
        "data.image",
        base::concat(name, ": not an image: got ", describe_start(file), ", expected JPEG or PNG"),
        "convert it to JPEG or PNG, or remove it from the folder");
  }
  impl_->opened = true;
  return impl_->header;
}

void ImageDecoder::read(Image& out) {
  read({0, 0, impl_->header.height, impl_->header.width}, out);
}

void ImageDecoder::read(const Region& region, Image& out) {
  if (!impl_->opened) {
    throw UsageError("data.image", "read without an opened file", "call open before each read");
  }
  const ImageHeader& header = impl_->header;
  if (region.top < 0 || region.left < 0 || region.height < 1 || region.width < 1 ||
      // Differences, as a sum of two large numbers could wrap.
      region.height > header.height - region.top || region.width > header.width - region.left) {
    throw UsageError(
        "data.image",
        base::concat("the region ", region.height, "x", region.width, " at (", region.top, ", ", region.left,
                     ") is not within the image of ", header.height, "x", header.width));
  }
  // A library decodes forward only: a second read() needs another open().
  impl_->opened = false;
  if (header.format == ImageFormat::kJpeg) {
    impl_->jpeg.read(region, out);
  } else {
    impl_->png.read(region, out);
  }
}

ImageDecoder& thread_decoder() {
  // Decoders are not for two threads at once, and making one for each image would cost more than small images
  // do.
  static thread_local ImageDecoder decoder;
  return decoder;
}

void decode_image(std::span<const std::byte> file, ColorMode color, const std::string& name, Image& out,
                  const DecodeOptions& options) {
  ImageDecoder& decoder = thread_decoder();
  decoder.open(file, color, name, options);
  decoder.read(out);
}

ImageHeader read_image_header(std::span<const std::byte> file, const std::string& name,
                              const DecodeOptions& options) {
  return thread_decoder().open(file, ColorMode::kRgb, name, options);
}

}  // namespace cohort::data
