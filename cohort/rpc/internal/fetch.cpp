// The value of an object, for to_here(): a function that every program has.
#include "cohort/rpc/function.h"
#include "cohort/rpc/internal/agent_messages.h"
#include "cohort/rpc/reference.h"

namespace cohort::rpc {
namespace {

// Answers with the value of the object that the arguments refer to, once it is made.
void answer_with_value(const Encoded& arguments, const Reply& reply) {
  try {
    Reader in(arguments);
    const std::shared_ptr<Reference> reference = in.reference();
    in.finish();
    if (reference == nullptr) throw CommError("rpc.decode", "a reference is missing");
    reference->on_value([reference, reply] {
      Encoded result;
      std::exception_ptr error;
      try {
        const ObjectValue value = reference->value({});
        if (value.encode == nullptr) {
          throw UsageError("rpc.rref", base::concat(reference->describe(), " cannot travel"),
                           "a call of one of its functions");
        }
        result = value.encode(value.pointer.get());
      } catch (...) {
        error = std::current_exception();
      }
      reply(std::move(result), error);
    });
  } catch (...) {
    reply({}, std::current_exception());
  }
}

const bool is_registered =
    add_function_at_load(kFetch, {"(RRef) -> value", true, answer_with_value, nullptr}, __FILE__, __LINE__);

}  // namespace

base::Future<Encoded> fetch_value(const std::shared_ptr<Reference>& reference, Reference::Timeout timeout) {
  Writer out;
  out.reference(reference);
  return reference->call(timeout, kFetch, out.take());
}

}  // namespace cohort::rpc
