#pragma once

#include <exception>
#include <string>
#include <string_view>

/// What a person needs of an exception: its text, and whose fault it is.
namespace cohort::base {

/// Returns `text` without what LibTorch and Gloo put around their messages: the C++ backtrace after the text,
/// the "[file.cc:123] " of a build machine before it. Lines that belong to the message stay.
std::string without_backtrace(std::string_view text);

/// The same of `error.what()`.
inline std::string message_of(const std::exception& error) {
  return without_backtrace(error.what());
}

/// True for what is wrong with the user's input: usage, configuration, data. A program ends with status 2
/// then.
bool is_users_fault(const std::exception& error);

}  // namespace cohort::base
