#include "cohort/launch/internal/signed_words.h"

#include <charconv>

#include "cohort/base/error.h"

namespace cohort::launch {
namespace {

constexpr std::size_t kCodeSize = 64;

}  // namespace

// Sizes stand before what may hold anything, so that no two of them read alike.
std::string SignedWords::text_of(const std::string& key, std::string_view rest) const {
  return base::concat("cohort agents 1 ", session_.size(), " ", session_, key.size(), " ", key, rest);
}

// "CODE NUMBER WORD".
std::string SignedWords::sign(const std::string& key, const std::string& word) {
  if (!secret_) return word;
  const std::string rest = base::concat(" ", ++number_, " ", word);
  return secret_->code(text_of(key, rest)) + rest;
}

std::optional<std::string> SignedWords::open(const std::string& key, const std::string& found) {
  if (!secret_) return found;
  const std::string_view text = found;
  if (text.size() < kCodeSize + 3) return std::nullopt;
  const std::string_view rest = text.substr(kCodeSize);
  if (!secret_->matches(text.substr(0, kCodeSize), text_of(key, rest))) return std::nullopt;
  // Whoever made the code wrote the rest as sign() does.
  std::uint64_t number = 0;
  const auto [next, error] = std::from_chars(rest.data() + 1, rest.data() + rest.size(), number);
  if (error != std::errc() || next == rest.data() + rest.size()) return std::nullopt;
  std::uint64_t& last = last_[key];
  if (number < last) return std::nullopt;
  last = number;
  return std::string(next + 1, rest.data() + rest.size());
}

}  // namespace cohort::launch
