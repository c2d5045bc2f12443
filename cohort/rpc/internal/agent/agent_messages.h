#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "cohort/base/error.h"
#include "cohort/base/threads/deadline.h"
#include "cohort/rpc/encoded.h"
#include "cohort/rpc/internal/protocol/context_protocol.h"
#include "cohort/rpc/internal/protocol/reference_protocol.h"

/// What agents tell each other: a kind, the number of a call, and what belongs to it.
namespace cohort::rpc {

enum class MessageKind : std::uint8_t {
  kCall = 1,  ///< time left, sequence, function, channel, place in a context, CallerState, arguments
  kMake,      ///< time left, function, object, fork, line, channel and the rest: a reference keeps the result
  kResult,    ///< value
  kError,     ///< RemoteException
  kCancel,    ///< sequence, RemoteException: nobody waits for the call any more, and why
  kReference,  ///< ReferenceMessage
  kContext,    ///< ContextMessage
  kLeaving,    ///< this worker has come to shutdown(), or has given up; or IdleReport: and has nothing to do
};

/// Whether the receiver has asked for it, or keeps count of it, or makes room by it: such messages need no
/// room of the window.
inline bool is_answer(MessageKind kind) {
  return kind == MessageKind::kResult || kind == MessageKind::kError || kind == MessageKind::kReference ||
         kind == MessageKind::kCancel;
}

/// The function by which gradients of a call's results come.
inline constexpr const char* kBackwardPart = "rpc::backward_part";
/// The function that gives the value of an object, for to_here(). Its results have no gradient.
inline constexpr const char* kFetch = "rpc::fetch";
/// The function that answers once an object is made, for when_made().
inline constexpr const char* kAwait = "rpc::await";

inline Writer begin_message(MessageKind kind, std::uint64_t call = 0) {
  Writer out;
  out.number(static_cast<std::uint8_t>(kind));
  out.number(call);
  return out;
}

/// Where the time left stands in kCall and kMake: nanoseconds, kForever for a call without a deadline. A
/// message that waits has the end of the caller's deadline there. What is left of it is filled in as the
/// message goes.
inline constexpr std::size_t kTimeLeftOffset = sizeof(MessageKind) + sizeof(std::uint64_t);
inline constexpr std::int64_t kForever = std::numeric_limits<std::int64_t>::max();
/// Where kCall has its sequence: its number among the calls to this worker, from 1 on, in the order in which
/// they were sent. It is filled in as the message is sent.
inline constexpr std::size_t kSequenceOffset = kTimeLeftOffset + sizeof(std::int64_t);

/// The beginning of kCall or kMake.
inline Writer begin_call_message(MessageKind kind, std::uint64_t call, base::Deadline deadline) {
  Writer out = begin_message(kind, call);
  out.number(deadline.is_never()
                 ? kForever
                 : std::int64_t{std::chrono::nanoseconds(deadline.end().time_since_epoch()).count()});
  if (kind == MessageKind::kCall) out.number(std::uint64_t{0});
  return out;
}

inline void write_reference_message(Writer& out, const ReferenceMessage& message) {
  out.number(static_cast<std::uint8_t>(message.type));
  out.number(message.object.creator);
  out.number(message.object.number);
  out.number(message.fork.maker);
  out.number(message.fork.number);
}
/// Throws: CommError for what write_reference_message() does not write.
inline ReferenceMessage read_reference_message(Reader& in) {
  const auto kind = in.number<std::uint8_t>();
  if (kind > static_cast<std::uint8_t>(ReferenceMessage::Type::kDrop)) {
    throw CommError("rpc.receive", base::concat("a message about a reference is of kind ", int{kind}),
                    "the same program on all workers");
  }
  ReferenceMessage message{static_cast<ReferenceMessage::Type>(kind), {}, {}};
  message.object.creator = in.number<std::int32_t>();
  message.object.number = in.number<std::uint64_t>();
  message.fork.maker = in.number<std::int32_t>();
  message.fork.number = in.number<std::uint64_t>();
  return message;
}

inline void write_context_message(Writer& out, const ContextMessage& message) {
  out.number(static_cast<std::uint8_t>(message.type));
  encode(out, message.context);
  out.number(message.num_calls);
}
/// Throws: CommError for what write_context_message() does not write.
inline ContextMessage read_context_message(Reader& in) {
  const auto kind = in.number<std::uint8_t>();
  if (kind > static_cast<std::uint8_t>(ContextMessage::Type::kAbandoned)) {
    throw CommError("rpc.receive", base::concat("a message about a context is of kind ", int{kind}),
                    "the same program on all workers");
  }
  ContextMessage message;
  message.type = static_cast<ContextMessage::Type>(kind);
  message.context = decode<ContextId>(in);
  message.num_calls = in.number<std::uint64_t>();
  return message;
}

}  // namespace cohort::rpc
