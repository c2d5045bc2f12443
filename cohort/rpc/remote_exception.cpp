// Exceptions travel as a name of a type and a text. The table lists a derived class before its base, so the
// first that fits is the nearest. A type that the table does not list arrives as its base, or as RemoteError.
// Errors of Cohort keep their type, and their text says twice where they come from: the call, and what failed
// there. A new exception class of Cohort needs a row here, above its base; else it arrives as that base, or
// as RemoteError where its base is Error.
#include "cohort/rpc/remote_exception.h"

#include <c10/util/Exception.h>

#include <array>
#include <cstddef>
#include <new>
#include <stdexcept>
#include <string_view>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/rpc/reference.h"

namespace cohort::rpc {
namespace {

constexpr std::string_view kWhere = "rpc.call";
// Each call on the way adds its name. A message of more than 64 MiB besides tensors would not be sent, and
// the caller would wait.
constexpr std::size_t kMaxTextBytes = std::size_t{64} << 10;

struct ExceptionType {
  std::string_view name;
  bool (*fits)(const std::exception&);
  void (*raise)(const std::string& text);
};

template <typename T>
bool fits(const std::exception& error) {
  return dynamic_cast<const T*>(&error) != nullptr;
}

template <typename T>
ExceptionType of_cohort(std::string_view name) {
  return {name, fits<T>, [](const std::string& text) { throw T(kWhere, text); }};
}
template <typename T>
ExceptionType of_std(std::string_view name) {
  return {name, fits<T>, [](const std::string& text) { throw T(text); }};
}
template <typename T>
ExceptionType of_c10(std::string_view name) {
  return {name, fits<T>, [](const std::string& text) {
            throw T({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, text);
          }};
}

const auto& kinds() {
  static const std::array all = {
      of_cohort<UsageError>("UsageError"),
      of_cohort<ConfigError>("ConfigError"),
      of_cohort<DataError>("DataError"),
      of_cohort<SystemError>("SystemError"),
      of_cohort<NumericError>("NumericError"),
      of_cohort<TimeoutError>("TimeoutError"),
      of_cohort<CommError>("CommError"),
      of_cohort<OwnerLostError>("OwnerLostError"),
      of_cohort<PeerError>("PeerError"),
      of_cohort<RendezvousError>("RendezvousError"),
      // Any other error of Cohort, so that who catches cohort::Error catches it there too.
      ExceptionType{"RemoteError", fits<Error>,
                    [](const std::string& text) { throw RemoteError(kWhere, text); }},
      of_c10<c10::IndexError>("c10::IndexError"),
      of_c10<c10::ValueError>("c10::ValueError"),
      of_c10<c10::TypeError>("c10::TypeError"),
      of_c10<c10::NotImplementedError>("c10::NotImplementedError"),
      of_c10<c10::LinAlgError>("c10::LinAlgError"),
      of_c10<c10::OutOfMemoryError>("c10::OutOfMemoryError"),
      of_c10<c10::Error>("c10::Error"),
      of_std<std::invalid_argument>("std::invalid_argument"),
      of_std<std::domain_error>("std::domain_error"),
      of_std<std::length_error>("std::length_error"),
      of_std<std::out_of_range>("std::out_of_range"),
      of_std<std::logic_error>("std::logic_error"),
      of_std<std::range_error>("std::range_error"),
      of_std<std::overflow_error>("std::overflow_error"),
      of_std<std::underflow_error>("std::underflow_error"),
      of_std<std::runtime_error>("std::runtime_error"),
      ExceptionType{"std::bad_alloc", fits<std::bad_alloc>,
                    [](const std::string&) { throw std::bad_alloc(); }},
  };
  return all;
}

std::string text_of(const std::exception& error) {
  std::string text = base::message_of(error);
  if (text.size() <= kMaxTextBytes) return text;
  const std::size_t num_bytes = text.size();
  std::size_t end = kMaxTextBytes;
  // Before a character, not within one: in UTF-8 its further bytes begin with the bits 10.
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80U) --end;
  text.resize(end);
  return base::concat(text, "... (", num_bytes, " bytes)");
}

}  // namespace

RemoteException describe_exception(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& caught) {
    for (const ExceptionType& kind : kinds()) {
      if (kind.fits(caught)) return {std::string(kind.name), text_of(caught)};
    }
    return {"", text_of(caught)};
  } catch (...) {
    return {"", "an object was thrown that is no std::exception"};
  }
}

void throw_remote(const RemoteException& exception, const std::string& where) {
  const std::string text = base::concat(where, ": ", exception.text);
  for (const ExceptionType& kind : kinds()) {
    if (kind.name == exception.type) kind.raise(text);
  }
  throw RemoteError(kWhere, text);
}

std::exception_ptr error_of_remote(const RemoteException& exception, const std::string& where) {
  try {
    throw_remote(exception, where);
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace cohort::rpc
