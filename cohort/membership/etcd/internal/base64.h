#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace cohort::membership::etcd {

/// Bytes as letters, digits, '+' and '/', filled up with '=' (RFC 4648, section 4). In one line. OpenSSL's.
std::string encode_base64(std::string_view bytes);

/// The bytes; nothing for a text that encode_base64() cannot have written.
std::optional<std::string> decode_base64(std::string_view text);

}  // namespace cohort::membership::etcd
