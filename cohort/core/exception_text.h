#pragma once

#include <exception>
#include <string>
#include <string_view>

/// What a person needs of an exception's text.
namespace cohort::core {

/// Returns `text` without what LibTorch and Gloo put around their messages: the C++ backtrace behind, the
/// "[file.cc:123] " of a build machine before. Lines that belong to the message stay.
std::string without_backtrace(std::string_view text);

/// The same of `error.what()`.
inline std::string message_of(const std::exception& error) {
  return without_backtrace(error.what());
}

}  // namespace cohort::core
