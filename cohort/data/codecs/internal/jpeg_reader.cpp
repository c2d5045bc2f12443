// A decompressor stays for all images; the header of each chooses how a decoded row becomes a row of the
// output. For a region, rows above it are skipped, columns are cropped with a margin, and rows below it are
// not decoded. The pixels are always those of a full decode and a crop. So subsamplings for which no test has
// shown that are decoded without skipping. Decoding ends early only in a file with its end marker: truncation
// is an error whatever the region.
#include "cohort/data/codecs/internal/jpeg_reader.h"

#include <algorithm>
#include <csetjmp>
#include <cstring>

#include "cohort/base/error.h"
#include "cohort/data/codecs/internal/color.h"
#include "cohort/data/codecs/internal/jpeg_memory.h"

// Note [Errors of C libraries]: libjpeg and libpng leave by longjmp. Every function here that calls setjmp,
// and every callback, holds only trivial objects, so that no destructor is skipped; it returns false, and its
// caller, which has no setjmp, throws.
namespace cohort::data {
namespace {

/// A progressive file may repeat scans without end; real ones have about ten.
constexpr int kMaxScans = 500;

/// Where the pixels of one row are, and how they become those of the output.
enum class JpegRow { kDirect, kRgbToGray, kCmykToRgb, kCmykToGray };

}  // namespace

struct JpegReader::State : JpegMemory {
  jpeg_decompress_struct info{};
  jpeg_error_mgr errors{};
  jpeg_source_mgr source{};
  jpeg_progress_mgr progress{};
  std::jmp_buf jump{};
  char message[JMSG_LENGTH_MAX] = "";
  bool created = false;
  bool truncated = false;
  bool accept_damage = false;
  bool ends_well = false;  ///< with an end marker: then the file is not truncated
  JpegRow rows = JpegRow::kDirect;
  std::vector<uint8_t> scratch;
  std::string name;
  size_t file_bytes = 0;

  static State& of(void* client_data) { return *static_cast<State*>(static_cast<JpegMemory*>(client_data)); }

  bool create();
  bool read_header(const std::byte* data, size_t size, ColorMode color);
  bool decode(const Region& region, uint8_t* out);
  [[gnu::noinline]] void decode_rows(const Region& region, uint8_t* out);
  void read_row(const Region& region, int64_t offset, uint8_t* out);
  bool can_skip() const;
  [[noreturn]] void fail() const;
};

namespace {

// State is private to JpegReader, so the callbacks are reached through function templates of it.
template <typename State>
[[noreturn]] void leave(j_common_ptr info) {
  State& state = State::of(info->client_data);
  info->err->format_message(info, state.message);
  std::longjmp(state.jump, 1);
}

template <typename State>
void on_message(j_common_ptr info, int level) {
  if (level >= 0 || State::of(info->client_data).accept_damage) {
    return;
  }
  switch (info->err->msg_code) {
    case JWRN_HIT_MARKER:  // the data of the image ends too early
    case JWRN_HUFF_BAD_CODE:
    case JWRN_MUST_RESYNC:
      leave<State>(info);
    default:  // nothing of the image is lost, for instance extra bytes before a marker
      return;
  }
}

template <typename State>
boolean on_empty(j_decompress_ptr info) {
  State::of(info->client_data).truncated = true;
  info->err->msg_code = JERR_INPUT_EOF;
  leave<State>(reinterpret_cast<j_common_ptr>(info));
}

template <typename State>
void on_skip(j_decompress_ptr info, long count) {
  if (count <= 0) {
    return;
  }
  // The whole file is in memory, so a skip beyond it is truncation and not a wait for more.
  if (static_cast<size_t>(count) > info->src->bytes_in_buffer) {
    on_empty<State>(info);
  }
  info->src->next_input_byte += count;
  info->src->bytes_in_buffer -= static_cast<size_t>(count);
}

template <typename State>
void on_progress(j_common_ptr info) {
  if (reinterpret_cast<j_decompress_ptr>(info)->input_scan_number > kMaxScans) {
    State& state = State::of(info->client_data);
    std::snprintf(state.message, sizeof(state.message), "it has more than %d scans", kMaxScans);
    std::longjmp(state.jump, 1);
  }
}

}  // namespace

bool JpegReader::State::create() {
  info.err = jpeg_std_error(&errors);
  errors.error_exit = leave<State>;
  errors.emit_message = on_message<State>;
  errors.output_message = [](j_common_ptr) {};
  source.init_source = [](j_decompress_ptr) {};
  source.fill_input_buffer = on_empty<State>;
  source.skip_input_data = on_skip<State>;
  source.resync_to_restart = jpeg_resync_to_restart;
  source.term_source = [](j_decompress_ptr) {};
  progress.progress_monitor = on_progress<State>;
  info.client_data = static_cast<JpegMemory*>(this);
  if (setjmp(jump) != 0) {
    return false;
  }
  jpeg_create_decompress(&info);
  install(info);
  info.src = &source;
  info.progress = &progress;
  created = true;
  return true;
}

bool JpegReader::State::read_header(const std::byte* data, size_t size, ColorMode color) {
  if (setjmp(jump) != 0) {
    return false;
  }
  clear(info);
  source.next_input_byte = reinterpret_cast<const JOCTET*>(data);
  source.bytes_in_buffer = size;
  errors.num_warnings = 0;
  jpeg_read_header(&info, TRUE);
  // libjpeg-turbo 3 writes samples of 12 bits as two bytes; our buffers have one for each.
  if (info.data_precision != BITS_IN_JSAMPLE) ERREXIT1(&info, JERR_BAD_PRECISION, info.data_precision);
  const bool gray = color == ColorMode::kGray;
  rows = JpegRow::kDirect;
  if (info.num_components == 1) {
    info.out_color_space = gray ? JCS_GRAYSCALE : JCS_RGB;
  } else if (info.num_components == 3) {
    info.out_color_space = JCS_RGB;
    if (gray) {
      rows = JpegRow::kRgbToGray;
    }
  } else {
    info.out_color_space = JCS_CMYK;
    rows = gray ? JpegRow::kCmykToGray : JpegRow::kCmykToRgb;
  }
  return true;
}

/// True for the subsamplings whose partial decode is known, by test, to give the same pixels.
bool JpegReader::State::can_skip() const {
  if (info.num_components == 1) {
    return true;
  }
  const auto& parts = info.comp_info;
  return info.num_components == 3 && parts[0].h_samp_factor <= 2 && parts[0].v_samp_factor <= 2 &&
         parts[1].h_samp_factor == 1 && parts[1].v_samp_factor == 1 && parts[2].h_samp_factor == 1 &&
         parts[2].v_samp_factor == 1;
}

void JpegReader::State::read_row(const Region& region, int64_t offset, uint8_t* out) {
  if (rows == JpegRow::kDirect && offset == 0 && region.width == static_cast<int64_t>(info.output_width)) {
    JSAMPROW row = out;
    jpeg_read_scanlines(&info, &row, 1);
    return;
  }
  JSAMPROW row = scratch.data();
  jpeg_read_scanlines(&info, &row, 1);
  const uint8_t* first = row + offset * info.output_components;
  switch (rows) {
    case JpegRow::kDirect:
      std::memcpy(out, first, static_cast<size_t>(region.width * info.output_components));
      break;
    case JpegRow::kRgbToGray:
      rgb_to_gray(first, region.width, out);
      break;
    case JpegRow::kCmykToRgb:
      inverted_cmyk_to_rgb(first, region.width, out);
      break;
    case JpegRow::kCmykToGray:
      inverted_cmyk_to_rgb(first, region.width, row);
      rgb_to_gray(row, region.width, out);
      break;
  }
}

// Note [Exact partial decode]: a pixel of a subsampled image is interpolated from chroma on both sides, and
// libjpeg treats the edges of what it was asked for as edges of the image. So columns are asked for with a
// margin, which is cut off again, and rows are skipped up to one row of blocks before the first that is
// wanted.
bool JpegReader::State::decode(const Region& region, uint8_t* out) {
  if (setjmp(jump) != 0) {
    return false;
  }
  decode_rows(region, out);
  return true;
}

void JpegReader::State::decode_rows(const Region& region, uint8_t* out) {
  jpeg_start_decompress(&info);
  const bool partial = can_skip();
  const int64_t full_width = info.output_width;
  const int64_t margin = 16;
  int64_t left = 0;
  if (partial && region.width + 2 * margin < full_width) {
    left = std::max<int64_t>(0, region.left - margin);
    JDIMENSION offset = static_cast<JDIMENSION>(left);
    JDIMENSION width =
        static_cast<JDIMENSION>(std::min(full_width, region.left + region.width + margin) - left);
    jpeg_crop_scanline(&info, &offset, &width);
    // libjpeg has moved the offset down to a border of its blocks.
    left = offset;
  }
  const int64_t block_rows = 8 * info.max_v_samp_factor;
  const int64_t skip = partial ? std::max<int64_t>(0, ((region.top - 1) / block_rows - 0) * block_rows) : 0;
  if (skip > 0) {
    jpeg_skip_scanlines(&info, static_cast<JDIMENSION>(skip));
  }
  while (info.output_scanline < region.top) {
    JSAMPROW row = scratch.data();
    jpeg_read_scanlines(&info, &row, 1);
  }
  const int64_t out_stride = region.width * (rows == JpegRow::kDirect      ? info.output_components
                                             : rows == JpegRow::kCmykToRgb ? 3
                                                                           : 1);
  // Note [Truncation does not depend on the crop]: a file without its end marker is read to the last row.
  const int64_t bottom = region.top + region.height;
  while (info.output_scanline < bottom) {
    read_row(region, region.left - left, out);
    out += out_stride;
  }
  while (!ends_well && info.output_scanline < info.output_height) {
    JSAMPROW row = scratch.data();
    jpeg_read_scanlines(&info, &row, 1);
  }
}

void JpegReader::State::fail() const {
  if (truncated) {
    throw DataError(
        "data.image",
        base::concat(name, ": truncated JPEG: the file ends within the image, after ", file_bytes, " bytes"),
        "copy the file again, or delete it");
  }
  throw DataError("data.image", base::concat(name, ": broken JPEG: ", message),
                  "open it in an image viewer and save it again, or delete it");
}

JpegReader::JpegReader() : state_(std::make_unique<State>()) {}

JpegReader::~JpegReader() {
  if (state_->created) {
    jpeg_destroy_decompress(&state_->info);
  }
}

ImageHeader JpegReader::open(std::span<const std::byte> file, ColorMode color, const std::string& name,
                             const DecodeOptions& options) {
  State& state = *state_;
  state.name = name;
  state.file_bytes = file.size();
  state.truncated = false;
  state.accept_damage = options.accept_damage;
  state.ends_well =
      file.size() > 4 && file[file.size() - 2] == std::byte{0xFF} && file.back() == std::byte{0xD9};
  if ((!state.created && !state.create()) || !state.read_header(file.data(), file.size(), color)) {
    state.fail();
  }
  const jpeg_decompress_struct& info = state.info;
  const int64_t pixels = int64_t{info.image_height} * info.image_width;
  if (pixels > options.max_pixels) {
    throw DataError("data.image",
                    base::concat(name, ": too large: got ", info.image_height, "x", info.image_width, " = ",
                                 pixels, " pixels, expected at most ", options.max_pixels),
                    "raise DecodeOptions::max_pixels if you trust the file");
  }
  if (info.num_components != 1 && info.num_components != 3 && info.num_components != 4) {
    throw DataError("data.image", base::concat(name, ": a JPEG of ", info.num_components,
                                               " components, expected 1 (gray), 3 (colour) or 4 (CMYK)"));
  }
  return {ImageFormat::kJpeg, info.image_height, info.image_width};
}

void JpegReader::read(const Region& region, Image& out) {
  State& state = *state_;
  const bool gray = state.rows == JpegRow::kRgbToGray || state.rows == JpegRow::kCmykToGray ||
                    state.info.out_color_space == JCS_GRAYSCALE;
  out.reshape(region.height, region.width, gray ? 1 : 3);
  state.scratch.resize(std::max<size_t>(state.scratch.size(), size_t{state.info.image_width} * 4 + 64));
  // After both buffers have their size: decode() may not allocate, as a longjmp would leak it.
  if (!state.decode(region, out.pixels.data())) {
    state.fail();
  }
}

}  // namespace cohort::data
