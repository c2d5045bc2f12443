#include "cohort/membership/etcd/internal/base64.h"

#include <openssl/evp.h>

#include <algorithm>
#include <cstddef>

namespace cohort::membership::etcd {
namespace {

// OpenSSL takes lengths as int.
constexpr std::size_t kPieceBytes = 3 << 20, kPieceText = 4 << 20;

bool is_letter(char letter) {
  return (letter >= 'A' && letter <= 'Z') || (letter >= 'a' && letter <= 'z') ||
         (letter >= '0' && letter <= '9') || letter == '+' || letter == '/';
}

const unsigned char* bytes_of(std::string_view text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}

}  // namespace

std::string encode_base64(std::string_view bytes) {
  std::string text((bytes.size() + 2) / 3 * 4 + 1, '\0');  // OpenSSL writes a zero after each piece
  std::size_t end = 0;
  for (std::size_t at = 0; at < bytes.size(); at += kPieceBytes) {
    const std::string_view piece = bytes.substr(at, kPieceBytes);
    end += static_cast<std::size_t>(::EVP_EncodeBlock(reinterpret_cast<unsigned char*>(&text[end]),
                                                      bytes_of(piece), static_cast<int>(piece.size())));
  }
  text.resize(end);
  return text;
}

std::optional<std::string> decode_base64(std::string_view text) {
  if (text.size() % 4 != 0) return std::nullopt;
  const std::size_t end = std::min(text.find('='), text.size());
  const std::size_t padding = text.size() - end;
  if (padding > 2 || text.find_first_not_of('=', end) != std::string_view::npos ||
      !std::all_of(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(end), is_letter)) {
    return std::nullopt;
  }
  std::string bytes(text.size() / 4 * 3, '\0');
  std::size_t size = 0;
  for (std::size_t at = 0; at < text.size(); at += kPieceText) {
    const std::string_view piece = text.substr(at, kPieceText);
    const int count = ::EVP_DecodeBlock(reinterpret_cast<unsigned char*>(&bytes[size]), bytes_of(piece),
                                        static_cast<int>(piece.size()));
    if (count < 0) return std::nullopt;
    size += static_cast<std::size_t>(count);
  }
  bytes.resize(size - padding);  // '=' gives a zero
  if (encode_base64(std::string_view(bytes).substr(bytes.size() / 3 * 3)) !=
      text.substr(bytes.size() / 3 * 4)) {
    return std::nullopt;  // bits that stand for nothing are not zero
  }
  return bytes;
}

}  // namespace cohort::membership::etcd
