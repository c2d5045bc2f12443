// The libraries write into memory of malloc, which becomes a vector only at the end. Both leave by longjmp:
// write_jpeg() and write_png() keep the message and return false, and their callers throw. So no destructor
// of C++ is skipped. After an error of libjpeg its buffer is given up, as libjpeg may have freed it.

#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cohort/base/error.h"
#include "cohort/data/codecs/codec.h"

// clang-format off: jpeglib.h needs <cstdio> before it
#include <jpeglib.h>
#include <png.h>
// clang-format on

// See Note [Errors of C libraries] in jpeg_reader.cpp.
namespace cohort::data {
namespace {

void check_shape(const Image& image, const char* where) {
  if (image.height < 1 || image.width < 1 || (image.channels != 1 && image.channels != 3) ||
      static_cast<int64_t>(image.pixels.size()) != image.height * image.width * image.channels) {
    throw UsageError(where,
                     base::concat("an image of ", image.height, "x", image.width, "x", image.channels, " in ",
                                  image.pixels.size(), " bytes, expected 1 or 3 channels without gaps"));
  }
}

/// A file that grows in malloc's memory, so that C callbacks need not throw.
struct Output {
  unsigned char* data = nullptr;
  unsigned long size = 0;
  size_t capacity = 0;
  std::jmp_buf jump{};
  char message[JMSG_LENGTH_MAX] = "";

  ~Output() { std::free(data); }
  std::vector<std::byte> bytes() const {
    const auto* first = reinterpret_cast<const std::byte*>(data);
    return {first, first + size};
  }
};

bool write_jpeg(const Image& image, int quality, Output& output) {
  jpeg_compress_struct info;
  jpeg_error_mgr errors;
  // Before jpeg_create_compress(), which may fail already.
  info.err = jpeg_std_error(&errors);
  info.client_data = &output;
  errors.error_exit = [](j_common_ptr common) {
    auto* out = static_cast<Output*>(common->client_data);
    common->err->format_message(common, out->message);
    std::longjmp(out->jump, 1);
  };
  errors.output_message = [](j_common_ptr) {};
  if (setjmp(output.jump) != 0) {
    jpeg_destroy_compress(&info);
    output.data = nullptr;  // libjpeg may have freed it already
    return false;
  }
  jpeg_create_compress(&info);
  jpeg_mem_dest(&info, &output.data, &output.size);
  info.image_height = static_cast<JDIMENSION>(image.height);
  info.image_width = static_cast<JDIMENSION>(image.width);
  info.input_components = static_cast<int>(image.channels);
  info.in_color_space = image.channels == 1 ? JCS_GRAYSCALE : JCS_RGB;
  jpeg_set_defaults(&info);
  // TRUE: tables of 8 bits, which every decoder of baseline JPEG reads.
  jpeg_set_quality(&info, quality, TRUE);
  jpeg_start_compress(&info, TRUE);
  while (info.next_scanline < info.image_height) {
    auto* row = const_cast<JSAMPROW>(image.pixels.data() + info.next_scanline * image.width * image.channels);
    jpeg_write_scanlines(&info, &row, 1);
  }
  jpeg_finish_compress(&info);
  jpeg_destroy_compress(&info);
  return true;
}

void append_png(png_structp png, png_bytep data, size_t count) {
  auto* out = static_cast<Output*>(png_get_io_ptr(png));
  if (out->size + count > out->capacity) {
    // Doubled, so that the cost of copying grows with the size of the file and not with its square.
    const size_t capacity = 2 * (out->size + count) + 1024;
    auto* grown = static_cast<unsigned char*>(std::realloc(out->data, capacity));
    if (grown == nullptr) {
      png_error(png, "out of memory");
    }
    out->data = grown;
    out->capacity = capacity;
  }
  std::memcpy(out->data + out->size, data, count);
  out->size += count;
}

bool write_png(const Image& image, Output& output) {
  png_structp png = png_create_write_struct(
      PNG_LIBPNG_VER_STRING, &output,
      [](png_structp failed, png_const_charp text) {
        auto* out = static_cast<Output*>(png_get_error_ptr(failed));
        std::snprintf(out->message, sizeof(out->message), "%s", text);
        std::longjmp(out->jump, 1);
      },
      [](png_structp, png_const_charp) {});
  png_infop info = png == nullptr ? nullptr : png_create_info_struct(png);
  if (info == nullptr) {
    png_destroy_write_struct(&png, nullptr);
    std::snprintf(output.message, sizeof(output.message), "out of memory");
    return false;
  }
  // After the structures exist: an error before is told by a null pointer.
  if (setjmp(output.jump) != 0) {
    png_destroy_write_struct(&png, &info);
    return false;
  }
  png_set_write_fn(png, &output, append_png, [](png_structp) {});
  png_set_IHDR(png, info, static_cast<png_uint_32>(image.width), static_cast<png_uint_32>(image.height), 8,
               image.channels == 1 ? PNG_COLOR_TYPE_GRAY : PNG_COLOR_TYPE_RGB, PNG_INTERLACE_NONE,
               PNG_COMPRESSION_TYPE_DEFAULT, PNG_FILTER_TYPE_DEFAULT);
  png_write_info(png, info);
  for (int64_t y = 0; y < image.height; ++y) {
    png_write_row(png, image.pixels.data() + y * image.width * image.channels);
  }
  png_write_end(png, nullptr);
  png_destroy_write_struct(&png, &info);
  return true;
}

}  // namespace

std::vector<std::byte> encode_jpeg(const Image& image, int quality) {
  check_shape(image, "data.encode_jpeg");
  if (quality < 1 || quality > 100) {
    throw UsageError("data.encode_jpeg", base::concat("quality: got ", quality, ", expected 1 to 100"));
  }
  Output output;
  if (!write_jpeg(image, quality, output)) {
    throw UsageError("data.encode_jpeg",
                     base::concat("an image of ", image.height, "x", image.width, ": ", output.message));
  }
  return output.bytes();
}

std::vector<std::byte> encode_png(const Image& image) {
  check_shape(image, "data.encode_png");
  Output output;
  if (!write_png(image, output)) {
    throw UsageError("data.encode_png",
                     base::concat("an image of ", image.height, "x", image.width, ": ", output.message));
  }
  return output.bytes();
}

}  // namespace cohort::data
