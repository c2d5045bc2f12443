#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

/// IDX files, the format of the MNIST family, plain or compressed with gzip. No LibTorch.
///
/// A file is: two zero bytes, a type, a number of dimensions, the extents (big-endian, 32 bits each), then
/// the numbers, big-endian, the last dimension fastest; and nothing more. Source: Y. LeCun, "The MNIST
/// database of handwritten digits", section "File formats".
namespace cohort::data {

/// Types of an IDX file's numbers, by the byte that the file says.
enum class IdxType : std::uint8_t {
  kUInt8 = 0x08,
  kInt8 = 0x09,
  kInt16 = 0x0B,
  kInt32 = 0x0C,
  kFloat32 = 0x0D,
  kFloat64 = 0x0E,
};

/// Bytes of one number.
std::size_t idx_type_bytes(IdxType type);

/// What a file holds; `bytes` in this machine's byte order.
struct IdxArray {
  IdxType type = IdxType::kUInt8;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> bytes;  ///< size: the product of `shape` times idx_type_bytes(type)
};

/// What a reader of IDX files accepts.
struct IdxOptions {
  /// A file that says it holds more is rejected before memory is taken.
  std::uint64_t max_bytes = std::uint64_t{16} << 30;
};

/// Reads the bytes of a file; `name` stands in the messages. Memory: what the header says, which is checked
/// against the length of the file first, also through compression.
/// Throws: DataError naming the file, what is wrong and what was expected.
IdxArray parse_idx(std::span<const std::byte> file, const std::string& name, const IdxOptions& options = {});

/// Reads the file at `path`.
IdxArray read_idx(const std::string& path, const IdxOptions& options = {});

/// Reads a file of images, [n, height, width] or [n, height, width, channels] (1 or 3), of unsigned bytes.
IdxArray read_idx_images(const std::string& path);
/// Reads a file of labels, [n], of unsigned bytes.
IdxArray read_idx_labels(const std::string& path);

/// Paths of a pair of files.
struct IdxPair {
  std::string images;  ///< path of the images
  std::string labels;  ///< path of the labels
};

/// Finds the pair in `folder`: `prefix` is "train" or "t10k", for instance; the files are named as MNIST's
/// (train-images-idx3-ubyte, train-labels-idx1-ubyte, also with a dot before idx), with or without .gz.
/// Throws: DataError naming the folder and what was looked for.
IdxPair find_idx_pair(const std::string& folder, const std::string& prefix);

}  // namespace cohort::data
