#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <variant>

#include "cohort/rpc/function_type.h"

/// Functions that other workers may call. Each program of a job registers them, in one source:
///
///     at::Tensor embed(const at::Tensor& words, double scale);
///     COHORT_REMOTE(embed);
///
/// Parameters and result are types that travel (cohort/rpc/codec.h); a parameter may be a const reference.
/// The name is what the macro was given, such as "models::embed".
namespace cohort::rpc {

/// Takes a result, or an error, once.
using Reply = std::function<void(Encoded result, std::exception_ptr error)>;

/// Takes a result that stays here, or an error, once.
using Keep = std::function<void(ObjectValue value, std::exception_ptr error)>;

/// A function by which a worker answers a call.
struct RemoteFunction {
  std::string signature;  ///< "(Tensor, float64) -> Tensor"
  bool is_async = false;  ///< it returns a Future
  /// Runs on encoded arguments, and gives the result, or what was thrown, to the reply: before it returns, or
  /// later where the function returns a Future. Does not throw. By then the arguments' tensors are the
  /// function's alone.
  std::function<void(Encoded arguments, const Reply& reply)> invoke;
  /// The same, for a result that stays here.
  std::function<void(Encoded arguments, const Keep& keep)> invoke_and_keep;
};

namespace function_detail {

// What becomes of a result: it is sent, or stays here.
struct SendResult {
  using Outcome = Encoded;
  template <typename Result>
  static Encoded of_value(const Result& value) {
    Writer out;
    encode(out, value);
    return out.take();
  }
  template <auto function>
  static Encoded of_encoded(Encoded encoded) {
    return encoded;
  }
};
struct KeepResult {
  using Outcome = ObjectValue;
  template <typename Result>
  static ObjectValue of_value(Result value) {
    return make_object_value(std::move(value));
  }
  template <auto function>
  static ObjectValue of_encoded(const Encoded& encoded) {
    return make_object_value(decode_result<function>(encoded));
  }
};

template <auto function, typename Handler>
void invoke(Encoded encoded,
            const std::function<void(typename Handler::Outcome outcome, std::exception_ptr error)>& done) {
  using Type = FunctionType<decltype(function)>;
  using Result = typename Type::Result;
  typename Handler::Outcome outcome;
  std::exception_ptr error;
  try {
    auto arguments = decode_arguments<function>(encoded);
    encoded = {};
    if constexpr (Type::is_async) {
      auto future = apply<function>(std::move(arguments));
      return future.on_ready([future, done] {
        typename Handler::Outcome later;
        std::exception_ptr failure;
        try {
          later = Handler::template of_encoded<function>(future.encoded());
        } catch (...) {
          failure = std::current_exception();
        }
        done(std::move(later), failure);
      });
    } else if constexpr (std::is_void_v<typename Type::Returned>) {
      apply<function>(std::move(arguments));
      outcome = Handler::template of_value<Result>({});
    } else {
      outcome = Handler::template of_value<Result>(apply<function>(std::move(arguments)));
    }
  } catch (...) {
    error = std::current_exception();
  }
  done(std::move(outcome), error);
}

}  // namespace function_detail

/// Registers a function as the program, or a library, is loaded. Returns true.
bool add_function_at_load(const char* name, RemoteFunction function, const char* file, int line) noexcept;

/// Returns the function of this name, which stays where it is until the program ends. Throws: UsageError
/// for an unknown one, naming the nearest, or for one that was registered twice.
const RemoteFunction& find_function(const std::string& name);

/// Returns the signatures by name: what workers compare when they join.
std::map<std::string, std::string> all_signatures();

/// Where the functions of `here` and `there` differ, with "; " between them: "embed: here (Tensor) -> Tensor,
/// there (int64) -> Tensor". A function that one has and the other has not is no difference: it may never be
/// called.
std::string differences(const std::map<std::string, std::string>& here,
                        const std::map<std::string, std::string>& there);

namespace function_detail {

// The name under which this program registered `function`.
template <auto function>
inline const char* registered_name = nullptr;

template <auto function>
bool add_at_load(const char* name, const char* file, int line) noexcept {
  registered_name<function> = name;
  return add_function_at_load(name,
                              {signature_of<function>(), FunctionType<decltype(function)>::is_async,
                               invoke<function, SendResult>, invoke<function, KeepResult>},
                              file, line);
}

[[noreturn]] void throw_not_registered(const std::string& signature);

}  // namespace function_detail

/// Returns the name of a registered function. Throws: UsageError where this program has not registered it.
template <auto function>
const char* name_of() {
  const char* const name = function_detail::registered_name<function>;
  if (name == nullptr) function_detail::throw_not_registered(signature_of<function>());
  return name;
}

}  // namespace cohort::rpc

/// COHORT_REMOTE(function): once in a program, at namespace scope, in a source that each program of the job
/// has. The function may be a member, and a template with its arguments.
#define COHORT_REMOTE(...) COHORT_REMOTE_LINE(__COUNTER__, __VA_ARGS__)
/// COHORT_REMOTE_LAMBDA(square, [](double x) { return x * x; }): the same for a lambda without captures,
/// which gets this name.
#define COHORT_REMOTE_LAMBDA(name, ...)                            \
  static constexpr auto name = +(__VA_ARGS__);                     \
  [[maybe_unused]] static const bool cohort_remote_lambda_##name = \
      ::cohort::rpc::function_detail::add_at_load<name>(#name, __FILE__, __LINE__)
#define COHORT_REMOTE_LINE(number, ...) COHORT_REMOTE_NAMED(number, __VA_ARGS__)
#define COHORT_REMOTE_NAMED(number, ...)                      \
  [[maybe_unused]] static const bool cohort_remote_##number = \
      ::cohort::rpc::function_detail::add_at_load<&__VA_ARGS__>(#__VA_ARGS__, __FILE__, __LINE__)
