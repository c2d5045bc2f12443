#pragma once

#include <bit>
#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "cohort/base/error.h"

/// Numbers and texts to bytes and back.
namespace cohort::net {

static_assert(std::endian::native == std::endian::little,
              "numbers travel in the order of a little-endian machine");

template <typename T>
  requires std::is_arithmetic_v<T>
void put(std::string& to, T value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof value);
}
/// A length in two bytes, and the text.
inline void put_text(std::string& to, std::string_view text) {
  put(to, static_cast<std::uint16_t>(text.size()));
  to += text;
}

/// Reads what put() wrote. Throws: CommError where there are fewer bytes.
class ByteReader {
 public:
  explicit ByteReader(std::string_view bytes) : bytes_(bytes) {}

  template <typename T>
    requires std::is_arithmetic_v<T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string text() { return std::string(take(number<std::uint16_t>())); }
  std::string_view take(std::size_t size) {
    if (size > bytes_.size()) {
      throw CommError("net.read",
                      base::concat("a field of ", size, " bytes is cut off after ", bytes_.size()));
    }
    const std::string_view taken = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return taken;
  }
  bool empty() const { return bytes_.empty(); }

 private:
  std::string_view bytes_;
};

}  // namespace cohort::net
