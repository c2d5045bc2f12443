// A header is untrusted: a parser of events fills the entries, and each event must fit the grammar at that
// point. No tree of the document is built, so a header costs no more memory than its length. Shapes are
// multiplied with checks for overflow, and the parts, sorted, must cover the data without hole or overlap.
// make_header() writes entries by type and name, so the same entries always give the same bytes.
#include "cohort/checkpoint/safetensors_format.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <unordered_set>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"

namespace cohort::checkpoint {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian");

using base::concat;

constexpr std::string_view kMetadataKey = "__metadata__";
constexpr uint64_t kLengthBytes = 8;
// LibTorch's own limit: more dimensions do not fit the bit sets of its operators.
constexpr size_t kMaxRank = 64;

struct DtypeRow {
  std::string_view name;
  int64_t bits;
};

// In the order of StoredDtype.
constexpr std::array<DtypeRow, 20> kDtypes{{
    {"BOOL", 8},    {"F4", 4},      {"U8", 8},          {"I8", 8},          {"F8_E5M2", 8},
    {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
    {"U16", 16},    {"F16", 16},    {"BF16", 16},       {"I32", 32},        {"U32", 32},
    {"F32", 32},    {"C64", 64},    {"F64", 64},        {"I64", 64},        {"U64", 64},
}};

/// Bytes of a tensor of that shape; empty if the count overflows or is not a whole number of bytes.
std::optional<uint64_t> size_bytes(StoredDtype dtype, const std::vector<int64_t>& shape) {
  // Zero counts as one here, so that a huge dimension is rejected wherever it stands: LibTorch's strides
  // overflow.
  uint64_t padded = static_cast<uint64_t>(dtype_bits(dtype));
  bool empty = false;
  for (const int64_t size : shape) {
    empty = empty || size == 0;
    if (size < 0 ||
        __builtin_mul_overflow(padded, static_cast<uint64_t>(std::max<int64_t>(size, 1)), &padded)) {
      return std::nullopt;
    }
  }
  if (padded > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return std::nullopt;
  }
  if (empty) {
    return 0;
  }
  return padded % 8 == 0 ? std::optional(padded / 8) : std::nullopt;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  return "[" + base::join(shape) + "]";
}

[[noreturn]] void fail_header(std::string_view file, const std::string& what) {
  throw DataError("checkpoint.safetensors", concat(file, ": ", what),
                  "the file is damaged or not a safetensors file; use another copy or an earlier checkpoint");
}

/// Turns the events of the JSON parser into entries. Every event that does not fit the grammar above throws;
/// a tree of the document is never built, so a hostile header costs no more memory than its own length.
class HeaderReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderReader(std::string_view file, SafetensorsHeader& header) : file_(file), header_(header) {}

  bool null() override { unexpected("null"); }
  bool boolean(bool) override { unexpected("a boolean"); }
  bool number_integer(int64_t value) override { unexpected(concat("the number ", value)); }
  bool number_float(double value, const std::string&) override { unexpected(concat("the number ", value)); }
  bool binary(nlohmann::json::binary_t&) override { unexpected("binary"); }

  // The parser gives whole numbers from 0 on here, and negative ones to number_integer().
  bool number_unsigned(uint64_t value) override {
    if (state_ == State::kShape) {
      if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) ||
          entry_.shape.size() == kMaxRank) {
        fail_header(file_, concat("shape of tensor ", printable(entry_.name), " is too large"));
      }
      entry_.shape.push_back(static_cast<int64_t>(value));
    } else if (state_ == State::kOffsets) {
      if (num_offsets_ == 2) {
        fail_header(file_,
                    concat("data_offsets of tensor ", printable(entry_.name), " has more than two numbers"));
      }
      (num_offsets_++ == 0 ? entry_.begin : entry_.end) = value;
    } else {
      unexpected(concat("the number ", value));
    }
    return true;
  }

  bool string(std::string& value) override {
    if (state_ == State::kMetadata) {
      header_.metadata[key_] = value;
    } else if (state_ == State::kEntry && key_ == "dtype") {
      const auto dtype = dtype_from_name(value);
      if (!dtype) {
        fail_header(file_, concat("tensor ", printable(entry_.name), " has dtype ", printable(value),
                                  ", which is unknown here"));
      }
      entry_.dtype = *dtype;
    } else {
      unexpected(concat("the text ", printable(value)));
    }
    return true;
  }

  bool start_object(size_t) override {
    if (state_ == State::kStart) {
      state_ = State::kNames;
    } else if (state_ == State::kNames && key_ == kMetadataKey) {
      state_ = State::kMetadata;
    } else if (state_ == State::kNames) {
      state_ = State::kEntry;
      entry_ = TensorEntry{};
      entry_.name = key_;
      fields_.clear();
      num_offsets_ = 0;
    } else {
      unexpected("an object");
    }
    return true;
  }

  bool key(std::string& value) override {
    bool is_new = true;
    if (state_ == State::kNames) {
      // A set of its own: to look through the entries would take quadratic time on a header of many names.
      is_new = names_.insert(value).second;
    } else if (state_ == State::kMetadata) {
      is_new = !header_.metadata.contains(value);
    } else {
      if (value != "dtype" && value != "shape" && value != "data_offsets") {
        fail_header(file_,
                    concat("tensor ", printable(entry_.name), " has an unknown field ", printable(value)));
      }
      is_new = fields_.insert(value).second;
    }
    if (!is_new) {
      fail_header(file_, concat("the header has ", printable(value), " twice"));
    }
    key_ = value;
    return true;
  }

  bool end_object() override {
    if (state_ == State::kEntry) {
      // Fields may come in any order, so they are counted at the end.
      if (fields_.size() != 3 || num_offsets_ != 2) {
        fail_header(file_,
                    concat("tensor ", printable(entry_.name), " lacks dtype, shape or two data_offsets"));
      }
      header_.entries.push_back(std::move(entry_));
    }
    state_ = state_ == State::kNames ? State::kEnd : State::kNames;
    return true;
  }

  bool start_array(size_t) override {
    if (state_ == State::kEntry && key_ == "shape") {
      state_ = State::kShape;
    } else if (state_ == State::kEntry && key_ == "data_offsets") {
      state_ = State::kOffsets;
    } else {
      unexpected("an array");
    }
    return true;
  }

  bool end_array() override {
    state_ = State::kEntry;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) override {
    fail_header(file_,
                concat("the header is not valid JSON near byte ", kLengthBytes + position, " of the file"));
  }

 private:
  enum class State { kStart, kNames, kMetadata, kEntry, kShape, kOffsets, kEnd };

  [[noreturn]] void unexpected(const std::string& what) const {
    const bool inside = state_ == State::kEntry || state_ == State::kShape || state_ == State::kOffsets;
    fail_header(file_, concat("the header has ", what, " where the format does not allow it (",
                              inside ? concat("tensor ", printable(entry_.name), ", field ", key_)
                                     : concat("at ", key_.empty() ? std::string("the top") : printable(key_)),
                              ")"));
  }

  std::string_view file_;
  SafetensorsHeader& header_;
  State state_ = State::kStart;
  std::string key_;
  TensorEntry entry_;
  std::unordered_set<std::string> names_;
  std::set<std::string> fields_;
  int num_offsets_ = 0;
};

/// Checks that the entries' data are as long as their shapes say and cover `data_bytes` exactly.
void check_layout(std::vector<TensorEntry>& entries, uint64_t data_bytes, std::string_view file) {
  // By (begin, end): a tensor without elements comes before the one that begins at the same byte.
  std::stable_sort(entries.begin(), entries.end(), [](const TensorEntry& a, const TensorEntry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  uint64_t covered = 0;
  for (const TensorEntry& entry : entries) {
    const auto where = [&] {
      return concat("tensor ", printable(entry.name), " (", dtype_name(entry.dtype), " ",
                    shape_text(entry.shape), ", data_offsets [", entry.begin, ", ", entry.end, "])");
    };
    if (entry.begin > entry.end || entry.end > data_bytes) {
      fail_header(file, concat(where(), " lies outside the ", data_bytes, " bytes of data"));
    }
    const auto expected = size_bytes(entry.dtype, entry.shape);
    if (!expected) {
      fail_header(file, concat(where(), " has a shape that overflows or is no whole number of bytes"));
    }
    if (entry.end - entry.begin != *expected) {
      fail_header(file, concat(where(), ": got ", entry.end - entry.begin, " bytes, expected ", *expected));
    }
    // Neither hole nor overlap: bytes that no tensor owns could hide anything, and shared ones would change
    // together.
    if (entry.begin != covered) {
      fail_header(file, concat(where(), entry.begin < covered ? " overlaps" : " leaves a hole after",
                               " the tensor before it, which ends at ", covered));
    }
    covered = entry.end;
  }
  if (covered != data_bytes) {
    fail_header(file,
                concat("got ", data_bytes, " bytes of data, expected ", covered, " as the tensors say"));
  }
}

std::string json_text(const std::string& text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    throw UsageError("checkpoint.safetensors", concat(printable(text), " is not valid UTF-8"));
  }
}

}  // namespace

std::string_view dtype_name(StoredDtype dtype) {
  return kDtypes.at(static_cast<size_t>(dtype)).name;
}

int64_t dtype_bits(StoredDtype dtype) {
  return kDtypes.at(static_cast<size_t>(dtype)).bits;
}

std::optional<StoredDtype> dtype_from_name(std::string_view name) {
  for (size_t i = 0; i < kDtypes.size(); ++i) {
    if (kDtypes[i].name == name) {
      return static_cast<StoredDtype>(i);
    }
  }
  return std::nullopt;
}

const TensorEntry* SafetensorsHeader::find(std::string_view name) const {
  for (const TensorEntry& entry : entries) {
    if (entry.name == name) {
      return &entry;
    }
  }
  return nullptr;
}

SafetensorsHeader parse_header(std::span<const std::byte> file, std::string_view name) {
  if (file.empty()) {
    fail_header(name, "the file is empty (0 bytes)");
  }
  if (file.size() < kLengthBytes) {
    fail_header(name,
                concat("got ", file.size(), " bytes, expected at least 8 with the length of the header"));
  }
  uint64_t length = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) {
    // Byte by byte: the file may be mapped at any address.
    length |= std::to_integer<uint64_t>(file[i]) << (8 * i);
  }
  if (length > kMaxHeaderBytes) {
    fail_header(name, concat("header length: got ", length, ", expected at most ", kMaxHeaderBytes));
  }
  // The difference cannot wrap, as the size was checked above; a sum with `length` could.
  if (length > file.size() - kLengthBytes) {
    fail_header(name, concat("header length: got ", length, ", but the file has only ",
                             file.size() - kLengthBytes, " bytes after it"));
  }
  const auto* text = reinterpret_cast<const char*>(file.data()) + kLengthBytes;
  if (length == 0 || *text != '{') {
    fail_header(name, "the header does not start with '{'");
  }
  SafetensorsHeader header;
  header.data_start = kLengthBytes + length;
  HeaderReader reader(name, header);
  nlohmann::json::sax_parse(text, text + length, &reader);
  check_layout(header.entries, file.size() - header.data_start, name);
  return header;
}

std::string make_header(std::vector<TensorEntry>& entries, const Metadata& metadata) {
  std::sort(entries.begin(), entries.end(), [](const TensorEntry& a, const TensorEntry& b) {
    // Types are numbered by size. The widest come first, so each tensor begins at a multiple of its element's
    // size.
    return a.dtype != b.dtype ? a.dtype > b.dtype : a.name < b.name;
  });
  base::TextList fields(",");
  if (!metadata.empty()) {
    base::TextList pairs(",");
    for (const auto& [key, value] : metadata) pairs.add(json_text(key), ":", json_text(value));
    fields.add('"', kMetadataKey, "\":{", pairs.text(), "}");
  }
  uint64_t offset = 0;
  std::unordered_set<std::string_view> names;
  for (TensorEntry& entry : entries) {
    const auto bytes = size_bytes(entry.dtype, entry.shape);
    if (!names.insert(entry.name).second || entry.name == kMetadataKey) {
      throw UsageError("checkpoint.safetensors",
                       concat("the name ", printable(entry.name), " is used twice or reserved"));
    }
    entry.begin = offset;
    if (!bytes || __builtin_add_overflow(offset, *bytes, &offset)) {
      throw UsageError("checkpoint.safetensors", concat("tensor ", printable(entry.name), " of shape ",
                                                        shape_text(entry.shape), " cannot be stored"));
    }
    entry.end = offset;
    fields.add(json_text(entry.name), ":{\"dtype\":\"", dtype_name(entry.dtype), "\",\"shape\":[",
               base::join(entry.shape, ","), "],\"data_offsets\":[", entry.begin, ",", entry.end, "]}");
  }
  std::string json = concat("{", fields.text(), "}");
  // Blanks are allowed after the object. So the data begins at a multiple of 8, the size of the widest
  // element.
  json.resize((json.size() + 7) / 8 * 8, ' ');
  if (json.size() > kMaxHeaderBytes) {
    throw UsageError("checkpoint.safetensors", concat("the header would have ", json.size(),
                                                      " bytes, at most ", kMaxHeaderBytes, " are allowed"));
  }
  std::string result(kLengthBytes, '\0');
  for (size_t i = 0; i < kLengthBytes; ++i) {
    result[i] = static_cast<char>((json.size() >> (8 * i)) & 0xff);
  }
  return result + json;
}

std::string printable(std::string_view text) {
  constexpr size_t kShown = 120;
  std::string shown(text.substr(0, kShown));
  // Names come from files of strangers: control characters could rewrite the user's terminal.
  std::replace_if(shown.begin(), shown.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, '?');
  return concat('\'', shown, text.size() > kShown ? "...'" : "'");
}

}  // namespace cohort::checkpoint
