#pragma once

#include <exception>
#include <string>

#include "cohort/rpc/codec.h"

/// What a remote function threw, on its way to the caller.
namespace cohort::rpc {

/// An exception in words: `type` is "DataError" of Cohort, "std::out_of_range", "c10::IndexError", or empty
/// for one that only its own program knows.
struct RemoteException {
  std::string type;
  std::string text;  ///< what() of the exception
};
COHORT_NESTED(RemoteException, type, text)

/// Returns the type by its own name, or by that of the nearest base class that travels, and the text without
/// LibTorch's backtrace. A text of more than 64 KiB is cut.
RemoteException describe_exception(const std::exception_ptr& error);

/// Throws an exception of that type, with `where` ("embed on ps/0, call 17") before its text. A type that
/// this program does not know becomes RemoteError.
[[noreturn]] void throw_remote(const RemoteException& exception, const std::string& where);
/// Returns what throw_remote() throws.
std::exception_ptr error_of_remote(const RemoteException& exception, const std::string& where);

}  // namespace cohort::rpc
