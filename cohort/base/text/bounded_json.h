#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

/// JSON from untrusted files and peers. No LibTorch.
namespace cohort::base {

/// The deepest nesting that is read. nlohmann's `dump()` and every walk over a document call themselves once
/// per level, so a file of brackets would use up the stack.
inline constexpr int kMaxJsonDepth = 64;
/// The longest text that is read. A document takes up to sixteen times as much memory as its text.
inline constexpr std::size_t kMaxJsonBytes = std::size_t{64} << 20;

/// What is read of a text.
struct JsonLimits {
  std::size_t bytes = kMaxJsonBytes;
  int depth = kMaxJsonDepth;
};

/// Returns the document; nothing if `text` is not JSON, or is deeper or longer than the limits.
std::optional<nlohmann::json> parse_bounded_json(std::string_view text, JsonLimits limits = {});

/// True if parse_bounded_json() can read `text` again.
bool is_bounded_json(std::string_view text, JsonLimits limits = {});

}  // namespace cohort::base
