#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

/// The safetensors file format without LibTorch: 8 bytes little-endian header length, a JSON header, data.
///
///     {"__metadata__": {"key": "text"}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
///     ...}
///
/// Offsets count from the first byte after the header. Everything that a header can claim is checked before
/// it is used; see parse_header().
namespace cohort::checkpoint {

/// The dtypes of the format that LibTorch has, in the order in which Python's safetensors ranks them (it
/// writes the highest first, which keeps each tensor aligned).
enum class StoredDtype {
  kBool,
  kF4,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBf16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
};

/// The name in the header, such as "BF16".
std::string_view dtype_name(StoredDtype dtype);
/// The size of one element.
/// Units: bits (F4 has 4).
std::int64_t dtype_bits(StoredDtype dtype);
/// The dtype of that name; empty if there is none, or none that LibTorch has.
std::optional<StoredDtype> dtype_from_name(std::string_view name);

/// One tensor of a file.
/// Units: `begin` and `end` in bytes after the header.
struct TensorEntry {
  std::string name;
  StoredDtype dtype = StoredDtype::kF32;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  ///< of the first byte
  std::uint64_t end = 0;    ///< one past the last byte
};

/// The file's own texts by name, under `__metadata__`.
using Metadata = std::map<std::string, std::string>;

/// A checked header. `entries` are in the order of their data.
struct SafetensorsHeader {
  std::vector<TensorEntry> entries;
  Metadata metadata;
  std::uint64_t data_start = 0;  ///< Offset of the first data byte in the file.

  /// The entry of that name, or null.
  const TensorEntry* find(std::string_view name) const;
};

/// The longest header that is read or written, as in Python's safetensors.
inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;

/// Reads and checks the header of the file whose bytes are `file`.
/// Afterwards: header length fits the file; names are unique; every shape times its dtype is exactly
/// its part of the data, without overflow; the parts cover the data from its first to its last byte
/// without hole or overlap. `name` (a path) is only used in messages.
/// Throws: DataError saying which of these does not hold, for which tensor.
SafetensorsHeader parse_header(std::span<const std::byte> file, std::string_view name);

/// Puts `entries` into the order in which they are written (as Python does: largest dtype first, then
/// by name), sets their offsets, and returns the first bytes of the file: length and header, padded
/// with spaces so that the data starts at a multiple of 8. The same entries in any order give the same
/// bytes.
/// Throws: UsageError for a duplicate, reserved or non-UTF-8 name, a shape that overflows, or a header
/// beyond kMaxHeaderBytes.
std::string make_header(std::vector<TensorEntry>& entries, const Metadata& metadata);

/// Text from a file, made safe to show: at most 120 bytes, in quotes, control characters as `?`.
std::string printable(std::string_view text);

}  // namespace cohort::checkpoint
