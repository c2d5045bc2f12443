#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cohort/data/codecs/image_header.h"
#include "cohort/data/image.h"

/// JPEG and PNG, read as Pillow's `open(file).convert("RGB")` or `.convert("L")` reads them, and written.
///
/// The format is what the first bytes say, never the file's name. As in Pillow, an EXIF orientation is not
/// applied, alpha is dropped, and four-component JPEGs count as inverted CMYK. Every error is a DataError
/// that names the file.
///
///     Image image;
///     decode_image(bytes, ColorMode::kRgb, "cat.jpg", image);  // reuses image's memory
namespace cohort::data {

/// Reads one image after another. It keeps the decompressors' structures and its scratch memory, so that
/// nothing is allocated once it has seen the largest image. Threads: one caller at a time; see
/// `thread_decoder`.
class ImageDecoder {
 public:
  ImageDecoder();
  ~ImageDecoder();
  ImageDecoder(const ImageDecoder&) = delete;
  ImageDecoder& operator=(const ImageDecoder&) = delete;

  /// Reads the header of `file`. Ownership: `file` and `name` must live until the next `open` or the last
  /// `read`. Throws: DataError when it is neither JPEG nor PNG, is broken, or has too many pixels.
  ImageHeader open(std::span<const std::byte> file, ColorMode color, const std::string& name,
                   const DecodeOptions& options = {});

  /// Decodes the opened file into `out`, whose memory is reused. Once per `open`.
  /// Throws: DataError when the file is truncated or corrupt; `out` is then unspecified.
  void read(Image& out);

  /// The same pixels as `read` and then a crop to `region` (which lies within the image), for less work:
  /// rows below are not decoded, and of the rest only what is needed. A truncated file is an error whatever
  /// the region; corrupt data below it may go unseen.
  void read(const Region& region, Image& out);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Returns this thread's decoder.
ImageDecoder& thread_decoder();

/// Decodes `file` into `out` with this thread's decoder. `name` stands in the messages.
void decode_image(std::span<const std::byte> file, ColorMode color, const std::string& name, Image& out,
                  const DecodeOptions& options = {});

/// Returns what the header of `file` says.
ImageHeader read_image_header(std::span<const std::byte> file, const std::string& name,
                              const DecodeOptions& options = {});

/// Returns `image` as a JPEG file. `quality` is 1 to 100, as in Pillow; colour is subsampled 4:2:0.
/// Throws: UsageError when quality or the image's shape cannot be written.
std::vector<std::byte> encode_jpeg(const Image& image, int quality = 75);

/// Returns `image` as a PNG file, without loss.
std::vector<std::byte> encode_png(const Image& image);

}  // namespace cohort::data
