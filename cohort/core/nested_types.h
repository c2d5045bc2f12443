#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

/// Which types nested.h understands, and which of them can hold a tensor. Include nested.h.
namespace cohort::core {

/// What nested.h knows of a struct of somebody else's, to be specialised: `static constexpr bool plain =
/// true`, for a type that holds no tensor, or `static auto fields()`, which returns a tuple of NestedField.
/// docs/guide/core.md
template <typename T>
struct NestedTraits {};

/// A member that nested.h visits: its name for messages, and where it is.
template <typename Struct, typename Member>
struct NestedField {
  const char* name;
  Member Struct::*member;
};
template <typename Struct, typename Member>
NestedField(const char*, Member Struct::*) -> NestedField<Struct, Member>;  // clang before 17 needs it said

namespace nested_detail {

template <typename T, template <typename...> class Template>
inline constexpr bool is_a = false;
template <template <typename...> class Template, typename... Args>
inline constexpr bool is_a<Template<Args...>, Template> = true;
template <typename T>
inline constexpr bool is_array = false;
template <typename T, std::size_t N>
inline constexpr bool is_array<std::array<T, N>> = true;

template <typename T>
inline constexpr bool is_map = is_a<T, std::map> || is_a<T, std::unordered_map>;
template <typename T>
inline constexpr bool is_tuple = is_a<T, std::tuple> || is_a<T, std::pair>;

template <typename T>
concept HasTraitFields = requires { NestedTraits<T>::fields(); };
template <typename T>
concept HasMacroFields = requires { cohort_nested_fields(static_cast<const T*>(nullptr)); };
template <typename T>
concept HasFields = HasTraitFields<T> || HasMacroFields<T>;
template <typename T>
concept DeclaredPlain = requires { requires NestedTraits<T>::plain; };
template <typename T>
concept Plain =
    DeclaredPlain<T> || std::is_arithmetic_v<T> || std::is_enum_v<T> || is_a<T, std::basic_string> ||
    is_a<T, std::basic_string_view> || std::is_same_v<T, std::monostate>;

template <typename T>
auto fields_of() {
  if constexpr (HasTraitFields<T>) {
    return NestedTraits<T>::fields();
  } else {
    return cohort_nested_fields(static_cast<const T*>(nullptr));
  }
}

template <typename T>
constexpr bool holds_tensors();

template <typename T, std::size_t... I>
constexpr bool tuple_holds_tensors(std::index_sequence<I...>) {
  return (false || ... || holds_tensors<std::remove_cvref_t<std::tuple_element_t<I, T>>>());
}
template <typename... Alternatives>
constexpr bool variant_holds_tensors(const std::variant<Alternatives...>*) {
  return (false || ... || holds_tensors<Alternatives>());
}

// False for types that can hold no tensor (they are carried along); a type that is not understood stops here.
template <typename T>
constexpr bool holds_tensors() {
  if constexpr (std::is_same_v<T, at::Tensor> || HasFields<T>) {
    return true;
  } else if constexpr (Plain<T>) {
    return false;
  } else if constexpr (is_a<T, std::optional> || is_a<T, std::vector> || is_array<T>) {
    return holds_tensors<typename T::value_type>();
  } else if constexpr (is_a<T, std::unique_ptr>) {
    return holds_tensors<typename T::element_type>();
  } else if constexpr (is_map<T>) {
    return holds_tensors<typename T::mapped_type>();
  } else if constexpr (is_tuple<T>) {
    return tuple_holds_tensors<T>(std::make_index_sequence<std::tuple_size_v<T>>());
  } else if constexpr (is_a<T, std::variant>) {
    return variant_holds_tensors(static_cast<const T*>(nullptr));
  } else {
    static_assert(
        Plain<T>,
        "Cohort does not know where this type holds tensors: write COHORT_NESTED(Struct, member, ...) beside "
        "the struct, or say that it holds none by NestedTraits<T>::plain (cohort/core/nested.h)");
    return false;
  }
}

template <typename T>
inline constexpr bool holds_references = false;
template <typename... Members>
inline constexpr bool holds_references<std::tuple<Members...>> = (std::is_reference_v<Members> || ...);
template <typename A, typename B>
inline constexpr bool holds_references<std::pair<A, B>> = std::is_reference_v<A> || std::is_reference_v<B>;

}  // namespace nested_detail

}  // namespace cohort::core
