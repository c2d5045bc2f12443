#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

/// Errors that Cohort throws: what failed, where, and what to do.
///
/// The caller's or the world's fault is one of the types below; our own fault is an assertion. A message
/// reads
/// `[module.operation] what failed: got X, expected Y. Try: ...`.
///
///     throw cohort::DataError("data.idx", base::concat(path, ": got magic ", m, ", expected 0x803"),
///                             "check that the file is an IDX image file");
namespace cohort {

namespace base {

/// Returns the arguments written one after the other, as `operator<<` writes them.
template <typename... Args>
std::string concat(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

}  // namespace base

/// The root of every error that Cohort throws on purpose.
class Error : public std::runtime_error {
 public:
  /// `where` is `module.operation`; `hint` says what to do and may be empty.
  Error(std::string_view where, std::string_view what, std::string_view hint = "")
      : std::runtime_error(base::concat("[", where, "] ", what, hint.empty() ? "" : ". Try: ", hint)) {}
};

#define COHORT_DEFINE_ERROR(Name) \
  class Name : public Error {     \
   public:                        \
    using Error::Error;           \
  }

/// A call that can never succeed as written: wrong argument, wrong shape, wrong order.
COHORT_DEFINE_ERROR(UsageError);
/// A configuration file, key or value that cannot be used.
COHORT_DEFINE_ERROR(ConfigError);
/// A file or a stream that is missing, broken or not what it claims to be.
COHORT_DEFINE_ERROR(DataError);
/// The machine would not do it: no space left, permission, a folder in use.
COHORT_DEFINE_ERROR(SystemError);
/// A number that must be finite is not: the loss became NaN or infinite.
COHORT_DEFINE_ERROR(NumericError);
/// A deadline has passed.
COHORT_DEFINE_ERROR(TimeoutError);
/// Communication between ranks failed.
COHORT_DEFINE_ERROR(CommError);
/// Another process died or misbehaved.
COHORT_DEFINE_ERROR(PeerError);
/// The rendezvous of a job's processes failed.
COHORT_DEFINE_ERROR(RendezvousError);
/// What another process threw, where no other type fits.
COHORT_DEFINE_ERROR(RemoteError);

#undef COHORT_DEFINE_ERROR

}  // namespace cohort
