#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "cohort/core/nested_walk.h"

/// One visitor over nested tensors: what a batch, a model's input or its output is made of.
///
/// Understood: at::Tensor, and std::optional, pair, tuple, vector, array, map, unordered_map (in the order of
/// its keys), variant and unique_ptr of what is understood, and structs that are listed once:
///
///     struct Detection { at::Tensor boxes; std::vector<at::Tensor> masks; std::string name; };
///     COHORT_NESTED(Detection, boxes, masks, name)           // beside the struct, in its namespace
///
///     core::visit_tensors(d, [](const at::Tensor& t) { ... });
///     core::visit_tensors(d, [](at::Tensor& t, const core::NestedPath& path) { log(path.str()); });
///     d = core::to_device(std::move(d), at::kCUDA);
///
/// Numbers, enums and strings are carried along. Any other type does not compile, so that no tensor is passed
/// over in silence; `template <> struct cohort::core::NestedTraits<T> { static constexpr bool plain = true;
/// };` says that T holds none, and `static auto fields()` there, a tuple of NestedField, is COHORT_NESTED by
/// hand. Order: as written; it depends on nothing but the value, so ranks agree on it.
namespace cohort::core {

/// Calls `fn(tensor)` or `fn(tensor, path)` for each tensor of `value`, undefined ones too. The tensor is
/// `const at::Tensor&` when `value` is const, else `at::Tensor&`, which `fn` may assign.
template <typename T, typename Fn>
void visit_tensors(T&& value, Fn&& fn) {
  nested_detail::walk(NestedPath(), fn, value);
}

/// Calls `fn(a, b)` or `fn(a, b, path)` for the tensors at equal places of two values of one type.
/// Throws: UsageError saying where they differ (length, key, presence); what lies before was visited.
template <typename T, typename U, typename Fn>
void zip_tensors(T&& first, U&& second, Fn&& fn) {
  nested_detail::walk(NestedPath(), fn, first, second);
}

/// Returns `value` with each tensor replaced by `fn(tensor)` or `fn(tensor, path)`; all else is copied, or
/// moved when `value` is moved in, so what cannot be copied has to be.
template <typename T, typename Fn>
std::remove_cvref_t<T> map_tensors(T&& value, Fn&& fn) {
  using Value = std::remove_cvref_t<T>;
  static_assert(!nested_detail::holds_references<Value>,
                "a tuple of references cannot be mapped without changing them");
  static_assert(std::is_constructible_v<Value, T&&>, "this value cannot be copied: pass std::move(value)");
  Value result(std::forward<T>(value));
  visit_tensors(result, [&](at::Tensor& tensor, const NestedPath& path) {
    if constexpr (std::is_invocable_v<Fn&, const at::Tensor&, const NestedPath&>) {
      tensor = std::invoke(fn, std::as_const(tensor), path);
    } else {
      tensor = std::invoke(fn, std::as_const(tensor));
    }
  });
  return result;
}

/// Returns `value` with its tensors on `device`; those that are there already are shared, undefined ones
/// stay. With `non_blocking`, a copy to a GPU may still be under way afterwards; one to the CPU never is, as
/// nothing there would wait for it.
template <typename T>
std::remove_cvref_t<T> to_device(T&& value, c10::Device device, bool non_blocking = false) {
  return map_tensors(std::forward<T>(value), [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    return tensor.to(tensor.options().device(device), non_blocking && !device.is_cpu());
  });
}

/// Returns the tensors of `value` in visiting order.
template <typename T>
std::vector<at::Tensor> flatten_tensors(const T& value) {
  std::vector<at::Tensor> tensors;
  visit_tensors(value, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

/// Returns `value` with its tensors replaced by `tensors`, in visiting order: the way back from
/// flatten_tensors. Throws: UsageError when there are fewer or more tensors than places.
template <typename T>
std::remove_cvref_t<T> unflatten_tensors(T&& value, std::span<const at::Tensor> tensors) {
  std::size_t places = 0;
  auto result = map_tensors(std::forward<T>(value), [&](const at::Tensor& tensor) {
    const std::size_t place = places++;
    return place < tensors.size() ? tensors[place] : tensor;
  });
  if (places != tensors.size()) nested_detail::wrong_count("core.unflatten_tensors", tensors.size(), places);
  return result;
}

}  // namespace cohort::core

// COHORT_NESTED(Struct, member, ...): lists the members of a struct for the functions above. Stands beside
// the struct, in its namespace; members are public (else specialise NestedTraits, as a friend). The rest
// repeats a macro for each member, up to 50 or so of them.
#define COHORT_NESTED(Struct, ...)                                                 \
  [[maybe_unused]] inline auto cohort_nested_fields(const Struct*) {               \
    return std::make_tuple(COHORT_NESTED_EACH(Struct __VA_OPT__(, ) __VA_ARGS__)); \
  }
#define COHORT_NESTED_PARENS ()
#define COHORT_NESTED_EACH(Struct, ...) \
  __VA_OPT__(COHORT_NESTED_EXPAND(COHORT_NESTED_STEP(Struct, __VA_ARGS__)))
#define COHORT_NESTED_STEP(Struct, name, ...) \
  ::cohort::core::NestedField{                \
      #name, &Struct::name} __VA_OPT__(, COHORT_NESTED_AGAIN COHORT_NESTED_PARENS(Struct, __VA_ARGS__))
#define COHORT_NESTED_AGAIN() COHORT_NESTED_STEP
#define COHORT_NESTED_EXPAND(...) \
  COHORT_NESTED_EXPAND3(COHORT_NESTED_EXPAND3(COHORT_NESTED_EXPAND3(__VA_ARGS__)))
#define COHORT_NESTED_EXPAND3(...) \
  COHORT_NESTED_EXPAND2(COHORT_NESTED_EXPAND2(COHORT_NESTED_EXPAND2(__VA_ARGS__)))
#define COHORT_NESTED_EXPAND2(...) \
  COHORT_NESTED_EXPAND1(COHORT_NESTED_EXPAND1(COHORT_NESTED_EXPAND1(__VA_ARGS__)))
#define COHORT_NESTED_EXPAND1(...) \
  COHORT_NESTED_EXPAND0(COHORT_NESTED_EXPAND0(COHORT_NESTED_EXPAND0(__VA_ARGS__)))
#define COHORT_NESTED_EXPAND0(...) __VA_ARGS__
