// An event is a protocol-buffer message, written field by field; a record is its length and bytes, each with
// a checksum. A new file's name has a later time than all files in the folder, because TensorBoard reads them
// by name. On resume the first event starts a session at the next step, which makes TensorBoard drop later
// events. The files of before stay as they are.
#include "cohort/train/sinks/tensorboard.h"

#include <unistd.h>

#include <array>
#include <bit>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "cohort/base/error.h"
#include "cohort/base/host.h"
#include "cohort/train/sinks/internal/append_file.h"

namespace cohort::train {
namespace fs = std::filesystem;
namespace {

// Field numbers are those of tensorflow/core/util/event.proto and framework/summary.proto.
enum EventField { kWallTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5, kSessionLog = 7 };

/// Protocol-buffer wire format, as much of it as events need.
class Message {
 public:
  Message& varint(int field, uint64_t value) {
    tag(field, 0);
    raw_varint(value);
    return *this;
  }
  Message& fixed64(int field, double value) {
    tag(field, 1);
    little_endian(std::bit_cast<uint64_t>(value), 8);
    return *this;
  }
  Message& fixed32(int field, float value) {
    tag(field, 5);
    little_endian(std::bit_cast<uint32_t>(value), 4);
    return *this;
  }
  Message& bytes(int field, std::string_view value) {
    tag(field, 2);
    raw_varint(value.size());
    data_ += value;
    return *this;
  }
  Message& message(int field, const Message& value) { return bytes(field, value.data_); }
  const std::string& data() const { return data_; }

 private:
  void tag(int field, int wire_type) {
    // "Encoding" in the documentation of Protocol Buffers: field number and wire type are one varint.
    raw_varint(static_cast<uint64_t>(field) << 3 | static_cast<uint64_t>(wire_type));
  }
  void raw_varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) data_ += static_cast<char>(value | 0x80);
    data_ += static_cast<char>(value);
  }
  void little_endian(uint64_t value, int count) {
    for (int i = 0; i < count; ++i) data_ += static_cast<char>(value >> (8 * i));
  }

  std::string data_;
};

constexpr std::array<uint32_t, 256> make_crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t value = i;
    // 0x82f63b78 is Castagnoli's polynomial 0x1edc6f41 with its bits reversed: CRC-32C.
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? 0x82f63b78U : 0U);
    table[i] = value;
  }
  return table;
}

std::string little_endian(uint64_t value, int count) {
  std::string bytes;
  for (int i = 0; i < count; ++i) bytes += static_cast<char>(value >> (8 * i));
  return bytes;
}

std::string masked_crc(std::string_view text) {
  const uint32_t crc = crc32c(std::as_bytes(std::span(text.data(), text.size())));
  // TFRecord's mask (tensorflow/core/lib/hash/crc32c.h): a checksum of data that holds checksums would be
  // weak.
  return little_endian(((crc >> 15) | (crc << 17)) + 0xa282ead8U, 4);
}

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

constexpr std::string_view kPrefix = "events.out.tfevents.";

/// TensorBoard reads a folder's files in the order of their names: the new one gets a later time than all
/// others.
fs::path new_file_path(const fs::path& folder) {
  long long time = static_cast<long long>(now_seconds());
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(kPrefix)) continue;
    time = std::max(time, std::atoll(name.c_str() + kPrefix.size()) + 1);
  }
  std::array<char, 24> digits;
  // Ten digits, so that names sort in the order of their numbers.
  std::snprintf(digits.data(), digits.size(), "%010lld", time);
  return folder / base::concat(kPrefix, digits.data(), ".", base::host_name(), ".", ::getpid(), ".0");
}

fs::path make_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) {
    throw SystemError("train.tensorboard",
                      base::concat(folder.string(), " cannot be made: ", error.message()),
                      "another run.dir, or run.tensorboard=false");
  }
  return folder;
}

constexpr std::size_t kBufferBytes = 64 * 1024;

}  // namespace

uint32_t crc32c(std::span<const std::byte> bytes) {
  static constexpr std::array<uint32_t, 256> kTable = make_crc_table();
  uint32_t crc = ~0U;
  for (const std::byte byte : bytes) crc = kTable[(crc ^ static_cast<uint32_t>(byte)) & 0xff] ^ (crc >> 8);
  return ~crc;
}

struct TensorBoardWriter::File {
  explicit File(const fs::path& folder) : file(new_file_path(make_folder(folder))) {}

  void flush() {
    file.write(buffer);
    buffer.clear();
  }
  /// A record is length, its checksum, the event, its checksum.
  void add(const Message& event) {
    const std::string length = little_endian(event.data().size(), 8);
    buffer += length + masked_crc(length) + event.data() + masked_crc(event.data());
    if (buffer.size() >= kBufferBytes) flush();
  }
  void add_summary(std::string_view tag, int64_t step, const std::function<void(Message&)>& fill) {
    Message value;
    value.bytes(1, tag);
    fill(value);
    add(Message()
            .fixed64(kWallTime, now_seconds())
            .varint(kStep, static_cast<uint64_t>(step))
            .message(kSummary, Message().message(1, value)));
  }

  AppendFile file;
  std::string buffer;
};

TensorBoardWriter::TensorBoardWriter(const fs::path& folder, std::optional<int64_t> resume_step)
    : file_(std::make_unique<File>(folder)) {
  // TensorBoard takes a file for events only where this comes first.
  file_->add(Message().fixed64(kWallTime, now_seconds()).bytes(kFileVersion, "brain.Event:2"));
  if (resume_step) {
    // A session that starts at step N makes TensorBoard drop earlier files' events from step N on.
    constexpr uint64_t kStart = 1;
    file_->add(Message()
                   .fixed64(kWallTime, now_seconds())
                   .varint(kStep, static_cast<uint64_t>(*resume_step + 1))
                   .message(kSessionLog, Message().varint(1, kStart)));
  }
  file_->flush();
}

TensorBoardWriter::~TensorBoardWriter() {
  try {
    file_->flush();
  } catch (const Error&) {  // a destructor does not throw; flush() before it does
  }
}

void TensorBoardWriter::scalar(std::string_view tag, double value, int64_t step) {
  file_->add_summary(tag, step, [&](Message& message) { message.fixed32(2, static_cast<float>(value)); });
}

void TensorBoardWriter::image_png(std::string_view tag, std::span<const std::byte> png, int64_t height,
                                  int64_t width, int64_t channels, int64_t step) {
  file_->add_summary(tag, step, [&](Message& message) {
    message.message(4, Message()
                           .varint(1, static_cast<uint64_t>(height))
                           .varint(2, static_cast<uint64_t>(width))
                           .varint(3, static_cast<uint64_t>(channels))
                           .bytes(4, {reinterpret_cast<const char*>(png.data()), png.size()}));
  });
}

void TensorBoardWriter::text(std::string_view tag, std::string_view markdown, int64_t step) {
  file_->add_summary(tag, step, [&](Message& message) {
    // A string tensor of one element, with the text plugin named in its metadata.
    constexpr uint64_t kString = 7;  // DT_STRING
    message.message(8, Message().varint(1, kString).message(2, Message()).bytes(8, markdown));
    message.message(9, Message().message(1, Message().bytes(1, "text")));
  });
}

void TensorBoardWriter::flush() {
  file_->flush();
}

const fs::path& TensorBoardWriter::path() const {
  return file_->file.path();
}

}  // namespace cohort::train
