#pragma once

#include <cstdint>

#include "cohort/rpc/encoded.h"

/// What agents tell each other: a kind, the number of a call, and what belongs to it.
namespace cohort::rpc {

enum class MessageKind : std::uint8_t {
  kCall = 1,   ///< function, nanoseconds left, arguments
  kMake,       ///< the same before the arguments, and where it is written: a reference keeps the result
  kResult,     ///< value
  kError,      ///< RemoteException
  kCancel,     ///< nobody waits for the call any more
  kReference,  ///< ReferenceMessage
  kLeaving,    ///< this worker has come to shutdown()
};

inline Writer begin_message(MessageKind kind, std::uint64_t call = 0) {
  Writer out;
  out.number(static_cast<std::uint8_t>(kind));
  out.number(call);
  return out;
}

}  // namespace cohort::rpc
