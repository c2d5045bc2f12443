// The value of an object, for to_here(), and that it is made, for when_made(): functions that every program
// has.
#include <ATen/core/grad_mode.h>

#include "cohort/base/error.h"
#include "cohort/rpc/function.h"
#include "cohort/rpc/internal/agent/agent_messages.h"
#include "cohort/rpc/reference.h"

namespace cohort::rpc {
namespace {

// Calls `answer` with the reference that the arguments hold, once its object is made, and replies with what
// it returns.
void answer_when_made(const Encoded& arguments, const Reply& reply, Encoded (*answer)(const Reference&)) {
  try {
    Reader in(arguments);
    const std::shared_ptr<Reference> reference = in.reference();
    in.finish();
    if (reference == nullptr) throw CommError("rpc.decode", "a reference is missing");
    reference->on_value([reference, reply, answer] {
      Encoded result;
      std::exception_ptr error;
      try {
        result = answer(*reference);
      } catch (...) {
        error = std::current_exception();
      }
      reply(std::move(result), error);
    });
  } catch (...) {
    reply({}, std::current_exception());
  }
}

Encoded encode_object(const Reference& reference) {
  // Does not wait: on_value() has called.
  const ObjectValue value = reference.value({});
  if (value.encode == nullptr) {
    throw UsageError("rpc.rref", base::concat(reference.describe(), " cannot travel"),
                     "a call of one of its functions");
  }
  return value.encode(value.pointer.get());
}

// Throws what the maker of the object threw.
Encoded encode_nothing(const Reference& reference) {
  reference.value({});
  Writer out;
  encode(out, std::monostate());
  return out.take();
}

void answer_with_value(const Encoded& arguments, const Reply& reply) {
  answer_when_made(arguments, reply, encode_object);
}
void answer_with_nothing(const Encoded& arguments, const Reply& reply) {
  answer_when_made(arguments, reply, encode_nothing);
}

[[maybe_unused]] const bool fetch_is_registered =
    add_function_at_load(kFetch, {"(RRef) -> value", true, answer_with_value, nullptr}, __FILE__, __LINE__);
[[maybe_unused]] const bool await_is_registered =
    add_function_at_load(kAwait, {"(RRef) -> void", true, answer_with_nothing, nullptr}, __FILE__, __LINE__);

Encoded only(const std::shared_ptr<Reference>& reference) {
  Writer out;
  out.reference(reference);
  return out.take();
}

}  // namespace

base::Future<Encoded> fetch_value(const std::shared_ptr<Reference>& reference, Reference::Timeout timeout) {
  return reference->call({.timeout = timeout}, kFetch, only(reference));
}

base::Future<Encoded> await_value(const std::shared_ptr<Reference>& reference, Reference::Timeout timeout) {
  // No value travels, so a context need not record the call.
  const at::NoGradGuard not_recorded;
  return reference->call({.timeout = timeout}, kAwait, only(reference));
}

}  // namespace cohort::rpc
