#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/core/nested.h"
#include "cohort/rpc/codec_values.h"

/// How values travel: arguments and results of remote calls.
///
/// Understood: numbers, enums, strings, at::Tensor; std::optional, pair, tuple, vector, array, map,
/// unordered_map, variant and unique_ptr of what is understood; structs that COHORT_NESTED lists
/// (cohort/core/nested.h). A type of one's own otherwise:
///
///     template <>
///     struct cohort::rpc::Codec<Pose> {
///       static void write(Writer& out, const Pose& pose) { encode(out, pose.to_array()); }
///       static Pose read(Reader& in) { return Pose(decode<std::array<double, 6>>(in)); }
///       static void describe(TypeText& text) { text.add("Pose"); }  // what both programs must agree on
///     };
///
/// Each value takes at least one byte, so a count that is wrong costs no memory.
namespace cohort::rpc {

/// Whether there is a value, and the value.
template <typename T>
struct Codec<std::optional<T>> {
  static void write(Writer& out, const std::optional<T>& value) {
    out.number(value.has_value());
    if (value) encode(out, *value);
  }
  static std::optional<T> read(Reader& in) {
    if (!in.number<bool>()) return std::nullopt;
    return decode<T>(in);
  }
  static void describe(TypeText& text) { text.add_template<T>("optional"); }
};

/// Null too.
template <typename T>
struct Codec<std::unique_ptr<T>> {
  static void write(Writer& out, const std::unique_ptr<T>& value) {
    out.number(value != nullptr);
    if (value) encode(out, *value);
  }
  static std::unique_ptr<T> read(Reader& in) {
    const Reader::Level level(in);
    if (!in.number<bool>()) return nullptr;
    return std::make_unique<T>(decode<T>(in));
  }
  static void describe(TypeText& text) { text.add_template<T>("optional"); }
};

/// The number of elements, and the elements.
template <typename T>
struct Codec<std::vector<T>> {
  static void write(Writer& out, const std::vector<T>& values) {
    out.count(values.size());
    for (const auto& value : values) encode<T>(out, value);
  }
  static std::vector<T> read(Reader& in) {
    const Reader::Level level(in);
    const std::size_t size = in.count();
    std::vector<T> values;
    for (std::size_t i = 0; i < size; ++i) values.push_back(decode<T>(in));
    return values;
  }
  static void describe(TypeText& text) { text.add_template<T>("vector"); }
};

/// The elements: their number is part of the type.
template <typename T, std::size_t N>
struct Codec<std::array<T, N>> {
  static void write(Writer& out, const std::array<T, N>& values) {
    out.number(false);
    for (const T& value : values) encode(out, value);
  }
  static std::array<T, N> read(Reader& in) {
    in.number<bool>();
    // Braces evaluate in the order of the elements.
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
      return std::array<T, N>{(static_cast<void>(I), decode<T>(in))...};
    }(std::make_index_sequence<N>());
  }
  static void describe(TypeText& text) { text.add_template<T>("array " + std::to_string(N) + " "); }
};

/// std::map, and std::unordered_map in the order of its keys.
template <typename T>
  requires core::nested_detail::is_map<T>
struct Codec<T> {
  using Key = typename T::key_type;
  using Mapped = typename T::mapped_type;
  static void write(Writer& out, const T& map) {
    out.count(map.size());
    for (const Key* key : core::nested_detail::sorted_keys(map)) {
      encode(out, *key);
      encode(out, map.find(*key)->second);
    }
  }
  static T read(Reader& in) {
    const Reader::Level level(in);
    const std::size_t size = in.count();
    T map;
    for (std::size_t i = 0; i < size; ++i) {
      Key key = decode<Key>(in);
      map.insert_or_assign(std::move(key), decode<Mapped>(in));
    }
    return map;
  }
  static void describe(TypeText& text) { text.add_template<Key, Mapped>("map"); }
};

/// std::tuple and std::pair, which are the same for the other side.
template <typename T>
  requires core::nested_detail::is_tuple<T>
struct Codec<T> {
  static_assert(!core::nested_detail::holds_references<T>,
                "a tuple of references cannot travel: send its values");
  static void write(Writer& out, const T& value) {
    out.number(false);
    std::apply([&](const auto&... members) { (encode(out, members), ...); }, value);
  }
  static T read(Reader& in) {
    in.number<bool>();
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
      return T{decode<std::tuple_element_t<I, T>>(in)...};
    }(std::make_index_sequence<std::tuple_size_v<T>>());
  }
  static void describe(TypeText& text) {
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      text.add_template<std::tuple_element_t<I, T>...>("tuple");
    }(std::make_index_sequence<std::tuple_size_v<T>>());
  }
};

/// Which alternative, and its value. Throws: CommError for an alternative that is not there; UsageError to
/// write one that has no value.
template <typename... Alternatives>
struct Codec<std::variant<Alternatives...>> {
  using Variant = std::variant<Alternatives...>;
  static void write(Writer& out, const Variant& value) {
    if (value.valueless_by_exception()) {
      throw UsageError("rpc.encode", "a variant has no value, as its last assignment threw");
    }
    out.number(static_cast<std::uint8_t>(value.index()));
    std::visit([&](const auto& alternative) { encode(out, alternative); }, value);
  }
  static Variant read(Reader& in) {
    const Reader::Level level(in);
    const std::size_t index = in.number<std::uint8_t>();
    std::optional<Variant> value;
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      (static_cast<void>(index == I &&
                         (value.emplace(std::in_place_index<I>, decode<Alternatives>(in)), true)),
       ...);
    }(std::index_sequence_for<Alternatives...>());
    if (!value) Reader::reject_alternative(index, sizeof...(Alternatives));
    return *std::move(value);
  }
  static void describe(TypeText& text) { text.add_template<Alternatives...>("variant"); }
};

/// Structs that COHORT_NESTED lists.
template <typename T>
  requires core::nested_detail::HasFields<T>
struct Codec<T> {
  static void write(Writer& out, const T& value) {
    out.number(false);
    for_each_field([&](const auto& field) { encode(out, value.*field.member); });
  }
  static T read(Reader& in) {
    const Reader::Level level(in);
    in.number<bool>();
    T value{};
    for_each_field([&](const auto& field) {
      value.*field.member = decode<std::remove_cvref_t<decltype(value.*field.member)>>(in);
    });
    return value;
  }
  static void describe(TypeText& text) {
    text.add_struct<T>([&](TypeText& inner) {
      for_each_field([&]<typename Member>(const core::NestedField<T, Member>& field) {
        inner.add_member(field.name);
        Codec<Member>::describe(inner);
      });
    });
  }

 private:
  template <typename Fn>
  static void for_each_field(Fn&& fn) {
    std::apply([&](const auto&... field) { (fn(field), ...); }, core::nested_detail::fields_of<T>());
  }
};

}  // namespace cohort::rpc
