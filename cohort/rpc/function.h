#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>

#include "cohort/rpc/codec.h"
#include "cohort/rpc/future.h"

/// Functions that other workers may call. Each program of a job registers them, in one source:
///
///     at::Tensor embed(const at::Tensor& words, double scale);
///     COHORT_REMOTE(embed);
///
/// Parameters and result are types that travel (cohort/rpc/codec.h); a parameter may be a const reference. The
/// name is what the macro was given, such as "models::embed".
namespace cohort::rpc {

/// Takes a result, or an error, once.
using Reply = std::function<void(Encoded result, std::exception_ptr error)>;

/// A function by which a worker answers a call.
struct RemoteFunction {
  std::string signature;  ///< "(Tensor, float64) -> Tensor"
  /// Runs on encoded arguments, and gives the result, or what was thrown, to the reply: before it returns, or later where
  /// the function returns a Future. Does not throw.
  std::function<void(const Encoded& arguments, const Reply& reply)> invoke;
};

namespace function_detail {

template <typename T>
inline constexpr bool is_future = false;
template <typename T>
inline constexpr bool is_future<Future<T>> = true;
template <typename T>
struct AwaitedType {
  using Type = T;
};
template <typename T>
struct AwaitedType<Future<T>> {
  using Type = T;
};
template <typename T>
using Awaited = typename AwaitedType<T>::Type;

}  // namespace function_detail

/// Parts of the type of a function that can be called.
template <typename Function>
struct FunctionType;
template <typename R, typename... P>
struct FunctionType<R (*)(P...)> {
  static_assert(((!std::is_lvalue_reference_v<P> || std::is_const_v<std::remove_reference_t<P>>) && ...),
                "a remote function cannot change its caller's values: take them by value or const reference");
  using Arguments = std::tuple<std::remove_cvref_t<P>...>;
  static constexpr bool is_async = function_detail::is_future<R>;
  using Returned = function_detail::Awaited<std::remove_cvref_t<R>>;  // by the call
  using Result = std::conditional_t<std::is_void_v<Returned>, std::monostate, Returned>;
  static void describe_parameters(TypeText& text) { text.add_list<std::remove_cvref_t<P>...>(); }
};
template <typename R, typename... P>
struct FunctionType<R (*)(P...) noexcept> : FunctionType<R (*)(P...)> {};

/// Returns "(Tensor, float64) -> Tensor".
template <auto function>
std::string signature_of() {
  using Type = FunctionType<decltype(function)>;
  TypeText text;
  text.add("(");
  Type::describe_parameters(text);
  text.add(") -> ");
  describe<typename Type::Result>(text);
  return text.str();
}

/// Returns the arguments as `function` takes them, encoded: each is converted as in a plain call.
template <auto function, typename... Args>
Encoded encode_arguments(Args&&... args) {
  using Arguments = typename FunctionType<decltype(function)>::Arguments;
  static_assert(sizeof...(Args) == std::tuple_size_v<Arguments>,
                "another number of arguments than it has parameters");
  Writer out;
  encode(out, Arguments(std::forward<Args>(args)...));
  return out.take();
}

/// Decodes a result of `function`. Throws: CommError for bytes that are none.
template <auto function>
typename FunctionType<decltype(function)>::Result decode_result(const Encoded& encoded) {
  Reader in(encoded);
  auto result = decode<typename FunctionType<decltype(function)>::Result>(in);
  in.finish();
  return result;
}

/// RemoteFunction::invoke of `function`.
template <auto function>
void invoke_encoded(const Encoded& encoded, const Reply& reply) {
  using Type = FunctionType<decltype(function)>;
  try {
    Reader in(encoded);
    auto arguments = decode<typename Type::Arguments>(in);
    in.finish();
    Writer out;
    if constexpr (Type::is_async) {
      auto future = std::apply(function, std::move(arguments));
      return future.on_ready([future, reply]() mutable {
        Encoded result;
        std::exception_ptr error;
        try {
          result = future.take(base::Deadline(std::chrono::seconds(0)));
        } catch (...) {
          error = std::current_exception();
        }
        reply(std::move(result), error);
      });
    } else if constexpr (std::is_void_v<typename Type::Returned>) {
      std::apply(function, std::move(arguments));
      encode(out, std::monostate());
    } else {
      encode<typename Type::Result>(out, std::apply(function, std::move(arguments)));
    }
    reply(out.take(), nullptr);
  } catch (...) {
    reply({}, std::current_exception());
  }
}

/// Registers a function as the program, or a library, is loaded. Returns true.
bool add_function_at_load(const char* name, RemoteFunction function, const char* file, int line) noexcept;

/// Returns the function of this name. Throws: UsageError for an unknown one, naming the nearest, or for one that was
/// registered twice.
RemoteFunction find_function(const std::string& name);

/// Returns the signatures by name: what workers compare when they meet.
std::map<std::string, std::string> all_signatures();

/// Where the functions of `here` and `there` differ, a line each: "embed: here (Tensor) -> Tensor, there (int64) ->
/// Tensor". A function that one has and the other has not is no difference: it may never be called.
std::string differences(const std::map<std::string, std::string>& here,
                        const std::map<std::string, std::string>& there);

namespace function_detail {

// The name under which this program registered `function`.
template <auto function>
inline const char* registered_name = nullptr;

template <auto function>
bool add_at_load(const char* name, const char* file, int line) noexcept {
  registered_name<function> = name;
  return add_function_at_load(name, {signature_of<function>(), invoke_encoded<function>}, file, line);
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

/// COHORT_REMOTE(function): once in a program, at namespace scope, in a source that each program of the job has.
#define COHORT_REMOTE(function) COHORT_REMOTE_LINE(function, __COUNTER__)
#define COHORT_REMOTE_LINE(function, number) COHORT_REMOTE_NAMED(function, number)
#define COHORT_REMOTE_NAMED(function, number)                 \
  [[maybe_unused]] static const bool cohort_remote_##number = \
      ::cohort::rpc::function_detail::add_at_load<&function>(#function, __FILE__, __LINE__)
