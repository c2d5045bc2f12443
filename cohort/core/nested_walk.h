#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <ostream>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "cohort/core/nested_types.h"

/// How nested.h goes through values. Include nested.h.
namespace cohort::core {

/// Where a tensor is within the value that is visited, such as `.masks[1]`. Lives during the call only.
class NestedPath {
 public:
  /// Writes one step of the path (`.masks`, `[1]`), of which the pointer is the name or the index.
  using Writer = void (*)(std::ostream&, const void*);

  NestedPath() = default;
  NestedPath(const NestedPath& parent, Writer write, const void* step)
      : parent_(&parent), write_(write), step_(step) {}

  /// Returns the path as text; empty at the top.
  std::string str() const;

 private:
  void write(std::ostream& out) const;

  const NestedPath* parent_ = nullptr;
  Writer write_ = nullptr;
  const void* step_ = nullptr;
};

namespace nested_detail {

inline void write_member(std::ostream& out, const void* step) {
  out << '.' << static_cast<const char*>(step);
}
inline void write_index(std::ostream& out, const void* step) {
  out << '[' << *static_cast<const std::size_t*>(step) << ']';
}
template <typename Key>
void write_key(std::ostream& out, const void* step) {
  if constexpr (requires(const Key& key) { out << key; }) {
    out << '[' << *static_cast<const Key*>(step) << ']';
  } else {
    out << "[key]";
  }
}

/// Throws UsageError: the structures that are visited together differ at `path`.
[[noreturn]] void mismatch(const NestedPath& path, const std::string& expected, const std::string& got);
[[noreturn]] void wrong_count(const char* where, std::size_t got, std::size_t expected);

template <typename Map>
auto sorted_keys(const Map& map) {
  using Key = typename Map::key_type;
  std::vector<const Key*> keys;
  keys.reserve(map.size());
  for (const auto& entry : map) keys.push_back(&entry.first);
  if constexpr (is_a<Map, std::unordered_map>) {
    std::sort(keys.begin(), keys.end(), [](const Key* a, const Key* b) { return *a < *b; });
  }
  return keys;
}

// Visits equal structures side by side: one value for visit_tensors, two for zip_tensors.
template <typename Fn, typename T, typename... Rest>
void walk(const NestedPath& path, Fn& fn, T& first, Rest&... rest);

template <typename Fn, typename T, typename... Rest>
void walk_elements(const NestedPath& path, Fn& fn, T& first, Rest&... rest) {
  const std::size_t size = first.size();
  [[maybe_unused]] const auto check = [&](std::size_t other) {
    if (other != size) mismatch(path, std::to_string(size) + " elements", std::to_string(other));
  };
  (check(rest.size()), ...);
  for (std::size_t i = 0; i < size; ++i) walk(NestedPath(path, write_index, &i), fn, first[i], rest[i]...);
}

template <typename Fn, typename T, typename... Rest>
void walk_map(const NestedPath& path, Fn& fn, T& first, Rest&... rest) {
  using Key = typename std::remove_cv_t<T>::key_type;
  [[maybe_unused]] const auto check_size = [&](std::size_t other) {
    if (other != first.size()) mismatch(path, std::to_string(first.size()) + " keys", std::to_string(other));
  };
  (check_size(rest.size()), ...);
  for (const Key* key : sorted_keys(first)) {
    const NestedPath here(path, write_key<Key>, key);
    [[maybe_unused]] const auto check_key = [&](const auto& other) {
      if (other.find(*key) == other.end()) mismatch(here, "this key", "no such key");
    };
    (check_key(rest), ...);
    walk(here, fn, first.find(*key)->second, rest.find(*key)->second...);
  }
}

// A pointer does not hand its constness on to what it points to, so it is handed on here.
template <typename T>
auto& content(T& maybe) {
  if constexpr (std::is_const_v<T>) {
    return std::as_const(*maybe);
  } else {
    return *maybe;
  }
}

// Optional and unique_ptr: present in all or in none.
template <typename Fn, typename T, typename... Rest>
void walk_maybe(const NestedPath& path, Fn& fn, T& first, Rest&... rest) {
  const bool present = static_cast<bool>(first);
  [[maybe_unused]] const auto check = [&](bool other) {
    if (other != present) mismatch(path, present ? "a value" : "no value", other ? "a value" : "none");
  };
  (check(static_cast<bool>(rest)), ...);
  if (!present) return;
  walk(path, fn, content(first), content(rest)...);
}

template <typename Fn, typename T, typename... Rest>
void walk(const NestedPath& path, Fn& fn, T& first, Rest&... rest) {
  using Value = std::remove_cv_t<T>;
  static_assert((std::is_same_v<Value, std::remove_cv_t<Rest>> && ...),
                "structures of one type are visited together");
  if constexpr (std::is_same_v<Value, at::Tensor>) {
    if constexpr (std::is_invocable_v<Fn&, T&, Rest&..., const NestedPath&>) {
      std::invoke(fn, first, rest..., path);
    } else {
      std::invoke(fn, first, rest...);
    }
  } else if constexpr (!holds_tensors<Value>()) {
    return;
  } else if constexpr (HasFields<Value>) {
    const auto walk_field = [&](const auto& field) {
      walk(NestedPath(path, write_member, field.name), fn, first.*field.member, rest.*field.member...);
    };
    std::apply([&](const auto&... field) { (walk_field(field), ...); }, fields_of<Value>());
  } else if constexpr (is_a<Value, std::optional> || is_a<Value, std::unique_ptr>) {
    walk_maybe(path, fn, first, rest...);
  } else if constexpr (is_map<Value>) {
    walk_map(path, fn, first, rest...);
  } else if constexpr (is_tuple<Value>) {
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      constexpr std::array<std::size_t, sizeof...(I)> index{I...};
      const auto walk_element = [&]<std::size_t J>(std::integral_constant<std::size_t, J>) {
        walk(NestedPath(path, write_index, &index[J]), fn, std::get<J>(first), std::get<J>(rest)...);
      };
      (walk_element(std::integral_constant<std::size_t, I>()), ...);
    }(std::make_index_sequence<std::tuple_size_v<Value>>());
  } else if constexpr (is_a<Value, std::variant>) {
    [[maybe_unused]] const auto check = [&](std::size_t other) {
      if (other != first.index()) {
        mismatch(path, "alternative " + std::to_string(first.index()), std::to_string(other));
      }
    };
    (check(rest.index()), ...);
    std::visit(
        [&](auto& value) {
          using Alternative = std::remove_cvref_t<decltype(value)>;
          walk(path, fn, value, std::get<Alternative>(rest)...);
        },
        first);
  } else {
    walk_elements(path, fn, first, rest...);
  }
}

}  // namespace nested_detail

}  // namespace cohort::core
