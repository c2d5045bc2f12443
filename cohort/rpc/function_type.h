#pragma once

#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>

#include "cohort/rpc/codec.h"
#include "cohort/rpc/future.h"
#include "cohort/rpc/rref.h"

/// Functions as workers call them: parameters and result, and how those travel. Include
/// cohort/rpc/function.h.
namespace cohort::rpc {

/// Parts of the type of a function that can be called. A member function's first parameter is a reference to
/// its object.
template <typename R, typename... P>
struct FunctionType<R (*)(P...)> {
  static_assert(((!std::is_lvalue_reference_v<P> || std::is_const_v<std::remove_reference_t<P>>) && ...),
                "a remote function cannot change its caller's values: take them by value or const reference");
  /// What travels to the function: its parameters, without references.
  using Arguments = std::tuple<std::remove_cvref_t<P>...>;
  /// Whether it answers later, with a Future.
  static constexpr bool is_async = function_detail::is_future<R>;
  using Returned = function_detail::Awaited<std::remove_cvref_t<R>>;  // by the call
  /// What travels back; std::monostate for void.
  using Result = std::conditional_t<std::is_void_v<Returned>, std::monostate, Returned>;
  /// Appends the parameters, "int64, Tensor".
  static void describe_parameters(TypeText& text) { text.add_list<std::remove_cvref_t<P>...>(); }
};
template <typename R, typename... P>
struct FunctionType<R (*)(P...) noexcept> : FunctionType<R (*)(P...)> {};
template <typename R, typename C, typename... P>
struct FunctionType<R (C::*)(P...)> : FunctionType<R (*)(RRef<C>, P...)> {};
template <typename R, typename C, typename... P>
struct FunctionType<R (C::*)(P...) const> : FunctionType<R (*)(RRef<C>, P...)> {};
template <typename R, typename C, typename... P>
struct FunctionType<R (C::*)(P...) noexcept> : FunctionType<R (*)(RRef<C>, P...)> {};
template <typename R, typename C, typename... P>
struct FunctionType<R (C::*)(P...) const noexcept> : FunctionType<R (*)(RRef<C>, P...)> {};

namespace function_detail {

// Calls with what decode() made; a member function on the object that its reference points to, which lies
// here.
template <auto function, typename... P>
decltype(auto) apply(std::tuple<P...> arguments) {
  if constexpr (std::is_member_function_pointer_v<decltype(function)>) {
    return std::apply(
        [](auto& object, auto&... rest) {
          const auto value = object.local_value();
          return (value.get()->*function)(std::move(rest)...);
        },
        arguments);
  } else {
    return std::apply(function, std::move(arguments));
  }
}

}  // namespace function_detail

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

/// Decodes the arguments of `function`. Throws: CommError for bytes that are none.
template <auto function>
typename FunctionType<decltype(function)>::Arguments decode_arguments(const Encoded& encoded) {
  Reader in(encoded);
  auto arguments = decode<typename FunctionType<decltype(function)>::Arguments>(in);
  in.finish();
  return arguments;
}

}  // namespace cohort::rpc
