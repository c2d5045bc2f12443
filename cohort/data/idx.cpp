// A file is read through a source of bytes, plain or gzip, so the same checks hold for both. The size that
// the header asks for is checked for overflow, against the limit, and against what the source can still give.
// For gzip that is deflate's best compression of the bytes that are left. Only then is memory taken. The body
// must have exactly that many bytes: a short file and an over-long file are both rejected.
#include "cohort/data/idx.h"

#include <zlib.h>

#include <algorithm>
#include <array>
#include <bit>
#include <climits>
#include <filesystem>
#include <memory>
#include <optional>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"
#include "cohort/data/file_bytes.h"

namespace cohort::data {
namespace {

constexpr const char* kWhereIdx = "data.idx";
constexpr std::size_t kMaxDimensions = 8;
// Deflate cannot do better than 1032 to 1.
constexpr std::uint64_t kBestCompression = 1032;

// Where bytes come from: a plain file or a compressed one.
class Source {
 public:
  virtual ~Source() = default;
  // Fills `out` as far as the file goes; returns how many bytes that was.
  virtual std::size_t read(std::span<std::byte> out) = 0;
  // No more bytes than this can follow.
  virtual std::uint64_t most_left() const = 0;
};

class PlainSource : public Source {
 public:
  explicit PlainSource(std::span<const std::byte> file) : left_(file) {}
  std::size_t read(std::span<std::byte> out) override {
    const std::size_t size = std::min(out.size(), left_.size());
    std::copy_n(left_.begin(), size, out.begin());
    left_ = left_.subspan(size);
    return size;
  }
  std::uint64_t most_left() const override { return left_.size(); }

 private:
  std::span<const std::byte> left_;
};

class GzipSource : public Source {
 public:
  GzipSource(std::span<const std::byte> file, const std::string& name) : left_(file), name_(name) {
    // 15: the largest window; + 16: gzip only, no plain zlib data.
    if (::inflateInit2(&stream_, 15 + 16) != Z_OK) throw SystemError(kWhereIdx, "zlib could not start");
  }
  ~GzipSource() override { ::inflateEnd(&stream_); }
  GzipSource(const GzipSource&) = delete;
  GzipSource& operator=(const GzipSource&) = delete;

  std::size_t read(std::span<std::byte> out) override {
    std::size_t done = 0;
    while (done < out.size()) {
      if (at_end_ && !next_member()) break;
      // zlib counts in 32 bits, so a larger file goes in pieces.
      const auto in_now = static_cast<uInt>(std::min<std::size_t>(left_.size(), INT_MAX));
      const auto out_now = static_cast<uInt>(std::min<std::size_t>(out.size() - done, INT_MAX));
      stream_.next_in = reinterpret_cast<Bytef*>(const_cast<std::byte*>(left_.data()));
      stream_.avail_in = in_now;
      stream_.next_out = reinterpret_cast<Bytef*>(out.data() + done);
      stream_.avail_out = out_now;
      const int status = ::inflate(&stream_, Z_NO_FLUSH);
      left_ = left_.subspan(in_now - stream_.avail_in);
      done += out_now - stream_.avail_out;
      // The checksum at the end of the member has been compared by now.
      if (status == Z_STREAM_END) {
        at_end_ = true;
      } else if (status == Z_BUF_ERROR) {
        throw DataError(kWhereIdx, name_ + ": the gzip data ends too early", "fetch the file again");
      } else if (status != Z_OK) {
        throw DataError(kWhereIdx,
                        base::concat(name_, ": the gzip data is broken: ",
                                     stream_.msg != nullptr ? stream_.msg : "unknown reason"),
                        "fetch the file again");
      }
    }
    return done;
  }
  // 64 bytes for what inflate has taken in and not yet given out.
  std::uint64_t most_left() const override { return (left_.size() + 64) * kBestCompression; }

 private:
  // gzip files may be joined end to end; anything else after one is an error that inflate reports.
  bool next_member() {
    if (left_.empty()) return false;
    ::inflateReset(&stream_);
    at_end_ = false;
    return true;
  }

  std::span<const std::byte> left_;
  const std::string& name_;
  z_stream stream_{};
  bool at_end_ = false;
};

std::unique_ptr<Source> open_source(std::span<const std::byte> file, const std::string& name) {
  if (file.size() >= 2 && file[0] == std::byte{0x1f} && file[1] == std::byte{0x8b}) {
    return std::make_unique<GzipSource>(file, name);
  }
  return std::make_unique<PlainSource>(file);
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  return base::join(shape, " x ");
}

std::string hex(std::span<const std::byte> bytes) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text = "0x";
  for (const std::byte b : bytes) {
    text += kDigits[std::to_integer<int>(b) >> 4];
    text += kDigits[std::to_integer<int>(b) & 15];
  }
  return text;
}

bool is_type(std::byte code) {
  const int value = std::to_integer<int>(code);
  return value == 0x08 || value == 0x09 || (value >= 0x0B && value <= 0x0E);
}

// Reads type and shape; returns the number of bytes that must follow.
std::uint64_t read_header(Source& source, const std::string& name, const IdxOptions& options,
                          IdxArray& array) {
  std::array<std::byte, 4> magic{};
  if (const std::size_t got = source.read(magic); got < magic.size()) {
    throw DataError(kWhereIdx, base::concat(name, ": ", got, " bytes are too short for an IDX file"));
  }
  const auto num_dims = std::to_integer<std::size_t>(magic[3]);
  if (magic[0] != std::byte{0} || magic[1] != std::byte{0} || !is_type(magic[2]) || num_dims == 0 ||
      num_dims > kMaxDimensions) {
    throw DataError(kWhereIdx,
                    base::concat(name, ": wrong magic: got ", hex(magic),
                                 ", expected 0x0000, a type (08, 09, 0b to 0e) and 01 to 08 dimensions"),
                    "check that this is an IDX file, such as train-images-idx3-ubyte");
  }
  array.type = static_cast<IdxType>(magic[2]);
  std::uint64_t bytes = idx_type_bytes(array.type);
  for (std::size_t d = 0; d < num_dims; ++d) {
    std::array<std::byte, 4> raw{};
    if (source.read(raw) < raw.size()) {
      throw DataError(kWhereIdx, base::concat(name, ": ends inside its header of ", num_dims, " dimensions"));
    }
    std::uint64_t extent = 0;
    // Big-endian, as all numbers of the format.
    for (const std::byte b : raw) extent = extent << 8 | std::to_integer<std::uint64_t>(b);
    array.shape.push_back(static_cast<std::int64_t>(extent));
    if (__builtin_mul_overflow(bytes, extent, &bytes) || bytes > options.max_bytes) {
      throw DataError(kWhereIdx, base::concat(name, ": absurd dimensions ", shape_text(array.shape),
                                              ", expected at most ", options.max_bytes, " bytes"));
    }
  }
  return bytes;
}

void to_native_order(IdxArray& array) {
  const std::size_t width = idx_type_bytes(array.type);
  if (width == 1 || std::endian::native == std::endian::big) return;
  for (auto at = array.bytes.begin(); at != array.bytes.end(); at += static_cast<std::ptrdiff_t>(width)) {
    std::reverse(at, at + static_cast<std::ptrdiff_t>(width));
  }
}

}  // namespace

std::size_t idx_type_bytes(IdxType type) {
  switch (type) {
    case IdxType::kUInt8:
    case IdxType::kInt8:
      return 1;
    case IdxType::kInt16:
      return 2;
    case IdxType::kInt32:
    case IdxType::kFloat32:
      return 4;
    case IdxType::kFloat64:
      break;
  }
  return 8;
}

IdxArray parse_idx(std::span<const std::byte> file, const std::string& name, const IdxOptions& options) {
  const std::unique_ptr<Source> source = open_source(file, name);
  IdxArray array;
  const std::uint64_t expected = read_header(*source, name, options, array);
  const auto too_short = [&](const std::string& got) {
    return DataError(kWhereIdx,
                     base::concat(name, ": short body: got ", got, ", expected ", expected, " for ",
                                  shape_text(array.shape)),
                     "fetch the file again");
  };
  if (expected > source->most_left()) {
    throw too_short(base::concat("at most ", source->most_left(), " bytes"));
  }
  array.bytes.resize(expected);
  if (const std::size_t got = source->read(array.bytes); got < expected) {
    throw too_short(base::concat(got, " bytes"));
  }
  std::array<std::byte, 1> more{};
  // For gzip this also reads on to the end of the member, where its checksum is.
  if (source->read(more) > 0) {
    throw DataError(kWhereIdx, base::concat(name, ": over-long: there are bytes after the ", expected,
                                            " expected for ", shape_text(array.shape)));
  }
  to_native_order(array);
  return array;
}

IdxArray read_idx(const std::string& path, const IdxOptions& options) {
  std::vector<std::byte> buffer;
  return parse_idx(read_file_bytes(path, buffer), path, options);
}

IdxArray read_idx_images(const std::string& path) {
  IdxArray array = read_idx(path);
  const std::size_t dims = array.shape.size();
  const bool channels = dims == 3 || (dims == 4 && (array.shape[3] == 1 || array.shape[3] == 3));
  if (array.type != IdxType::kUInt8 || !channels || array.shape[1] == 0 || array.shape[2] == 0) {
    throw DataError(
        kWhereIdx,
        base::concat(path, ": not images: got type ", static_cast<int>(array.type), " and shape ",
                     shape_text(array.shape), ", expected unsigned bytes (8), count x height x width"),
        "the images file, not the labels file");
  }
  return array;
}

IdxArray read_idx_labels(const std::string& path) {
  IdxArray array = read_idx(path);
  if (array.type != IdxType::kUInt8 || array.shape.size() != 1) {
    throw DataError(kWhereIdx,
                    base::concat(path, ": not labels: got type ", static_cast<int>(array.type), " and shape ",
                                 shape_text(array.shape), ", expected unsigned bytes (8), one per sample"),
                    "the labels file, not the images file");
  }
  return array;
}

IdxPair find_idx_pair(const std::string& folder, const std::string& prefix) {
  const auto find = [&](const std::string& kind) -> std::optional<std::string> {
    // Both spellings are on the web: train-images-idx3-ubyte and train-images.idx3-ubyte.
    for (const char* separator : {"-", "."}) {
      for (const char* ending : {"", ".gz"}) {
        const auto path = std::filesystem::path(folder) /
                          (prefix + "-" + kind.substr(0, 6) + separator + kind.substr(7) + ending);
        if (std::filesystem::exists(path)) return path.string();
      }
    }
    return std::nullopt;
  };
  const auto images = find("images-idx3-ubyte");
  const auto labels = find("labels-idx1-ubyte");
  if (!images || !labels) {
    throw DataError(kWhereIdx,
                    base::concat(folder, " has no ", prefix, "-",
                                 images ? "labels-idx1-ubyte" : "images-idx3-ubyte", ", plain or .gz"));
  }
  return {*images, *labels};
}

}  // namespace cohort::data
