#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>
#include <type_traits>
#include <variant>

#include "cohort/rpc/encoded.h"
#include "cohort/rpc/type_text.h"

/// How numbers, strings and tensors travel. Include cohort/rpc/codec.h.
namespace cohort::rpc {

/// The way of one type: `write`, `read` and `describe`.
template <typename T>
struct Codec;

/// Appends `value`. Tensors are not copied.
template <typename T>
void encode(Writer& out, const T& value) {
  Codec<T>::write(out, value);
}
/// Reads a value that `encode` wrote. Throws: CommError for bytes that are no `T`.
template <typename T>
T decode(Reader& in) {
  return Codec<T>::read(in);
}
/// Appends what both programs must agree on, such as "vector<Tensor>".
template <typename T>
void describe(TypeText& text) {
  Codec<T>::describe(text);
}

/// Numbers, as they lie in memory. Another type of number on the other side is another signature.
template <typename T>
  requires std::is_arithmetic_v<T>
struct Codec<T> {
  static_assert(!std::is_same_v<T, long double>,
                "a long double differs from machine to machine: send a double");
  static void write(Writer& out, T value) { out.number(value); }
  static T read(Reader& in) { return in.number<T>(); }
  static void describe(TypeText& text) { text.add_number<T>(); }
};

/// Enums, as their underlying type. What the enumerators are called is not compared.
template <typename T>
  requires std::is_enum_v<T>
struct Codec<T> {
  using Number = std::underlying_type_t<T>;
  static void write(Writer& out, T value) { out.number(static_cast<Number>(value)); }
  static T read(Reader& in) { return static_cast<T>(in.number<Number>()); }
  static void describe(TypeText& text) {
    text.add("enum ");
    text.add_number<Number>();
  }
};

/// A length, and the bytes.
template <>
struct Codec<std::string> {
  static void write(Writer& out, std::string_view value) { out.text(value); }
  static std::string read(Reader& in) { return in.text(); }
  static void describe(TypeText& text) { text.add("string"); }
};

/// Tensors, which travel beside the bytes and may be undefined.
template <>
struct Codec<at::Tensor> {
  static void write(Writer& out, const at::Tensor& value) { out.tensor(value); }
  static at::Tensor read(Reader& in) { return in.tensor(); }
  static void describe(TypeText& text) { text.add("Tensor"); }
};

/// Nothing: the result of a function that returns void.
template <>
struct Codec<std::monostate> {
  static void write(Writer& out, std::monostate) { out.number(false); }
  static std::monostate read(Reader& in) {
    in.number<bool>();
    return {};
  }
  static void describe(TypeText& text) { text.add("void"); }
};

}  // namespace cohort::rpc
