// libpng's structures are made anew for each file, in an arena that stays, so nothing is left over from a
// broken file. Rows are decoded in order into a scratch row, and only what lies in the region is converted.
// An interlaced image is decoded as a whole first, since its rows come in several passes. Decoding ends
// below the region only where the file has its proper end: truncation does not depend on the region.
#include "cohort/data/codecs/internal/png_reader.h"

#include <png.h>

#include <algorithm>
#include <csetjmp>
#include <cstdio>
#include <cstring>

#include "cohort/base/error.h"
#include "cohort/data/codecs/internal/arena.h"
#include "cohort/data/codecs/internal/color.h"

// See Note [Errors of C libraries] in jpeg_reader.cpp.
namespace cohort::data {
namespace {

/// The last twelve bytes of every complete PNG.
constexpr unsigned char kEnd[12] = {0, 0, 0, 0, 'I', 'E', 'N', 'D', 0xAE, 0x42, 0x60, 0x82};

/// What libpng hands over, and how it becomes the output.
enum class PngRow { kDirect, kRgbToGray, kGrayToRgb, kGray16ToGray, kGray16ToRgb };

}  // namespace

struct PngReader::State {
  Arena arena;
  png_structp png = nullptr;
  png_infop info = nullptr;
  std::jmp_buf jump{};
  char message[256] = "";
  bool truncated = false;
  bool ends_well = false;
  PngRow rows = PngRow::kDirect;
  const std::byte* next = nullptr;
  size_t left = 0;
  size_t file_bytes = 0;
  std::string name;
  std::vector<uint8_t> scratch;
  std::vector<png_bytep> row_pointers;

  bool read_header(ColorMode color);
  void choose_conversions(ColorMode color);
  bool decode(const Region& region, uint8_t* out);
  bool decode_interlaced(const Region& region, uint8_t* out);
  void convert_row(const uint8_t* row, int64_t count, uint8_t* out) const;
  int64_t in_channels() const { return png_get_channels(png, info); }
  int64_t bytes_per_pixel() const { return in_channels() * png_get_bit_depth(png, info) / 8; }
  int64_t out_channels() const {
    const bool colour = rows == PngRow::kGrayToRgb || rows == PngRow::kGray16ToRgb;
    return colour ? 3 : rows == PngRow::kDirect ? in_channels() : 1;
  }
  bool start(bool interlaced);
  void destroy();
  [[noreturn]] void fail() const;
};

namespace {

template <typename State>
[[noreturn]] void on_error(png_structp png, png_const_charp text) {
  auto& state = *static_cast<State*>(png_get_error_ptr(png));
  std::snprintf(state.message, sizeof(state.message), "%s", text);
  std::longjmp(state.jump, 1);
}

template <typename State>
void on_read(png_structp png, png_bytep out, size_t count) {
  auto& state = *static_cast<State*>(png_get_io_ptr(png));
  if (count > state.left) {
    state.truncated = true;
    png_error(png, "the file ends too early");
  }
  std::memcpy(out, state.next, count);
  state.next += count;
  state.left -= count;
}

template <typename State>
png_voidp on_allocate(png_structp png, png_alloc_size_t bytes) {
  return static_cast<State*>(png_get_mem_ptr(png))->arena.allocate(bytes);
}

}  // namespace

void PngReader::State::destroy() {
  if (png != nullptr) {
    png_destroy_read_struct(&png, &info, nullptr);
  }
  // All of libpng's memory at once, also what an error left behind.
  arena.reset();
}

bool PngReader::State::read_header(ColorMode color) {
  if (setjmp(jump) != 0) {
    return false;
  }
  // libpng reports this failure by a null pointer only, without a message.
  std::snprintf(message, sizeof(message), "out of memory");
  png = png_create_read_struct_2(
      PNG_LIBPNG_VER_STRING, this, on_error<State>, [](png_structp, png_const_charp) {}, this,
      on_allocate<State>, [](png_structp, png_voidp) {});
  if (png == nullptr) {
    return false;
  }
  info = png_create_info_struct(png);
  if (info == nullptr) {
    return false;
  }
  png_set_read_fn(png, this, on_read<State>);
  // libpng's own limits off: open() checks the number of pixels against DecodeOptions before any row is
  // decoded.
  png_set_user_limits(png, 0x7FFFFFFF, 0x7FFFFFFF);
  // A chunk of a few kilobytes may inflate to gigabytes.
  png_set_chunk_malloc_max(png, 8u << 20);
  // Texts, profiles and times are not wanted: their chunks are passed over, not inflated.
  png_set_keep_unknown_chunks(png, PNG_HANDLE_CHUNK_NEVER, nullptr, -1);
  png_read_info(png, info);
  choose_conversions(color);
  return true;
}

void PngReader::State::choose_conversions(ColorMode color) {
  const bool gray_out = color == ColorMode::kGray;
  const int type = png_get_color_type(png, info);
  const int depth = png_get_bit_depth(png, info);
  bool gray_in = false;
  rows = PngRow::kDirect;
  // Pillow clips gray of 16 bits and takes the high byte of other kinds; png_set_strip_16() does the second.
  if (type == PNG_COLOR_TYPE_GRAY && depth == 16) {
    rows = gray_out ? PngRow::kGray16ToGray : PngRow::kGray16ToRgb;
    return;
  }
  if (type == PNG_COLOR_TYPE_PALETTE) {
    png_set_palette_to_rgb(png);
  } else if (type == PNG_COLOR_TYPE_GRAY || type == PNG_COLOR_TYPE_GRAY_ALPHA) {
    gray_in = true;
    png_set_expand_gray_1_2_4_to_8(png);
  }
  png_set_strip_16(png);
  // Dropped, not blended, as Pillow's convert("RGB") does.
  png_set_strip_alpha(png);
  if (gray_in != gray_out) {
    rows = gray_in ? PngRow::kGrayToRgb : PngRow::kRgbToGray;
  }
}

bool PngReader::State::start(bool interlaced) {
  if (setjmp(jump) != 0) {
    return false;
  }
  // Asked for before the update below, which fixes the layout of rows.
  if (interlaced) {
    png_set_interlace_handling(png);
  }
  png_read_update_info(png, info);
  return true;
}

void PngReader::State::convert_row(const uint8_t* row, int64_t count, uint8_t* out) const {
  switch (rows) {
    case PngRow::kDirect:
      std::memcpy(out, row, static_cast<size_t>(count * in_channels()));
      break;
    case PngRow::kRgbToGray:
      rgb_to_gray(row, count, out);
      break;
    case PngRow::kGrayToRgb:
      gray_to_rgb(row, count, out);
      break;
    case PngRow::kGray16ToGray:
      gray16_to_gray(row, count, out);
      break;
    case PngRow::kGray16ToRgb:
      for (int64_t i = 0; i < count; ++i) {
        gray16_to_gray(row + 2 * i, 1, out + 3 * i);
        out[3 * i + 1] = out[3 * i + 2] = out[3 * i];
      }
      break;
  }
}

bool PngReader::State::decode(const Region& region, uint8_t* out) {
  if (setjmp(jump) != 0) {
    return false;
  }
  const int64_t pixel = bytes_per_pixel();
  const int64_t height = png_get_image_height(png, info);
  const int64_t out_row = region.width * out_channels();
  // See Note [Truncation does not depend on the crop].
  const int64_t bottom = ends_well ? region.top + region.height : height;
  // Rows above the region too: a row is stored as its difference to the row before it.
  for (int64_t y = 0; y < bottom; ++y) {
    png_read_row(png, scratch.data(), nullptr);
    if (y >= region.top && y < region.top + region.height) {
      convert_row(scratch.data() + region.left * pixel, region.width, out + (y - region.top) * out_row);
    }
  }
  return true;
}

bool PngReader::State::decode_interlaced(const Region& region, uint8_t* out) {
  if (setjmp(jump) != 0) {
    return false;
  }
  const int64_t pixel = bytes_per_pixel();
  const int64_t out_row = region.width * out_channels();
  png_read_image(png, row_pointers.data());
  for (int64_t y = 0; y < region.height; ++y) {
    convert_row(row_pointers[static_cast<size_t>(region.top + y)] + region.left * pixel, region.width,
                out + y * out_row);
  }
  return true;
}

void PngReader::State::fail() const {
  if (truncated) {
    throw DataError(
        "data.image",
        base::concat(name, ": truncated PNG: the file ends within the image, after ", file_bytes, " bytes"),
        "copy the file again, or delete it");
  }
  throw DataError("data.image", base::concat(name, ": broken PNG: ", message),
                  "open it in an image viewer and save it again, or delete it");
}

PngReader::PngReader() : state_(std::make_unique<State>()) {}

PngReader::~PngReader() {
  state_->destroy();
}

ImageHeader PngReader::open(std::span<const std::byte> file, ColorMode color, const std::string& name,
                            const DecodeOptions& options) {
  State& state = *state_;
  state.destroy();
  state.name = name;
  state.file_bytes = file.size();
  state.truncated = false;
  state.next = file.data();
  state.left = file.size();
  state.ends_well = file.size() > sizeof(kEnd) &&
                    std::memcmp(file.data() + file.size() - sizeof(kEnd), kEnd, sizeof(kEnd)) == 0;
  if (!state.read_header(color)) {
    state.fail();
  }
  const int64_t height = png_get_image_height(state.png, state.info);
  const int64_t width = png_get_image_width(state.png, state.info);
  // A division, as the product of two 31-bit sizes could pass any limit. libpng has rejected a width of 0.
  if (height > options.max_pixels / width) {
    throw DataError("data.image",
                    base::concat(name, ": too large: got ", height, "x", width, " pixels, expected at most ",
                                 options.max_pixels, " in all"),
                    "raise DecodeOptions::max_pixels if you trust the file");
  }
  return {ImageFormat::kPng, height, width};
}

void PngReader::read(const Region& region, Image& out) {
  State& state = *state_;
  const bool interlaced = png_get_interlace_type(state.png, state.info) != PNG_INTERLACE_NONE;
  if (!state.start(interlaced)) {
    state.fail();
  }
  const size_t row_bytes = png_get_rowbytes(state.png, state.info);
  const size_t height = png_get_image_height(state.png, state.info);
  out.reshape(region.height, region.width, state.out_channels());
  state.scratch.resize(row_bytes * (interlaced ? height : 1));
  state.row_pointers.clear();
  for (size_t y = 0; interlaced && y < height; ++y) {
    state.row_pointers.push_back(state.scratch.data() + y * row_bytes);
  }
  const bool done = interlaced ? state.decode_interlaced(region, out.pixels.data())
                               : state.decode(region, out.pixels.data());
  // One huge interlaced image must not stay in each worker's memory for the rest of the run.
  if (state.scratch.capacity() > Arena::kKeepBytes) {
    state.scratch = {};
  }
  if (!done) {
    state.fail();
  }
}

}  // namespace cohort::data
