// A recorded call has its arguments as IValues, and a boxed call copies them to a stack in each run. Here a
// table lists C++ signatures that many operators share. unbox() takes the first signature that fits the
// schema, and keeps the arguments with their C++ types. run() calls the kernel with references into the
// frame. Always: the kernel is redispatched with the recorded keys, so the recorded kernel runs. Surprising:
// a schema does not tell the C++ types in full. LibTorch's typed() finds a wrong guess, and then the call
// stays boxed.
#include "cohort/script/internal/ir/unboxed.h"

#include <c10/util/Exception.h>

#include <array>
#include <tuple>
#include <type_traits>
#include <utility>

namespace cohort::script {
namespace {

using c10::TypeKind;

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// The element of an optional, or nothing.
c10::TypePtr within_optional(const c10::TypePtr& type) {
  return type->kind() == TypeKind::OptionalType ? type->castRaw<c10::OptionalType>()->getElementType()
                                                : nullptr;
}

bool is_list_of(const c10::TypePtr& type, TypeKind kind) {
  return type != nullptr && type->kind() == TypeKind::ListType &&
         type->castRaw<c10::ListType>()->getElementType()->kind() == kind;
}

// How a parameter of C++ type T is told from a schema, kept, and handed over.
template <typename T>
struct Argument;

// What a missing tensor is. Not within the function that hands it over, which would ask at every operator
// whether it has been made.
at::Tensor no_tensor;

template <typename T, bool kWritten>
struct TensorArgument {
  TensorArgument(const c10::IValue& /*value*/, int place) : slot(place) {}
  static bool fits(const c10::Argument& argument) {
    return argument.type()->kind() == TypeKind::TensorType && is_written(argument) == kWritten;
  }
  // A reference into the frame: no reference count is touched.
  T get(Tensors& values) const { return slot < 0 ? no_tensor : values[at_slot(slot)]; }
  int slot;
};
template <>
struct Argument<const at::Tensor&> : TensorArgument<const at::Tensor&, false> {
  using TensorArgument::TensorArgument;
};
template <>
struct Argument<at::Tensor&> : TensorArgument<at::Tensor&, true> {
  using TensorArgument::TensorArgument;
};

template <typename T, TypeKind kKind>
struct PlainArgument {
  PlainArgument(const c10::IValue& constant, int /*slot*/) : value(constant.to<T>()) {}
  // A SymInt is an int only by its first name.
  static bool fits(const c10::Argument& argument) { return argument.real_type()->kind() == kKind; }
  const T& get(Tensors& /*values*/) const { return value; }
  T value;
};
template <>
struct Argument<bool> : PlainArgument<bool, TypeKind::BoolType> {
  using PlainArgument::PlainArgument;
};
template <>
struct Argument<std::int64_t> : PlainArgument<std::int64_t, TypeKind::IntType> {
  using PlainArgument::PlainArgument;
};
template <>
struct Argument<at::ScalarType> : PlainArgument<at::ScalarType, TypeKind::ScalarTypeType> {
  using PlainArgument::PlainArgument;
};
template <>
struct Argument<double> : PlainArgument<double, TypeKind::FloatType> {
  using PlainArgument::PlainArgument;
};
template <>
struct Argument<const at::Scalar&> : PlainArgument<at::Scalar, TypeKind::NumberType> {
  using PlainArgument::PlainArgument;
};

template <>
struct Argument<std::string_view> {
  Argument(const c10::IValue& constant, int /*slot*/) : text(constant.toStringRef()) {}
  static bool fits(const c10::Argument& argument) {
    return argument.real_type()->kind() == TypeKind::StringType;
  }
  std::string_view get(Tensors& /*values*/) const { return text; }
  std::string text;
};

template <>
struct Argument<std::optional<at::ScalarType>> {
  Argument(const c10::IValue& constant, int /*slot*/) : type(constant.toOptional<at::ScalarType>()) {}
  static bool fits(const c10::Argument& argument) {
    const auto inner = within_optional(argument.real_type());
    return inner != nullptr && inner->kind() == TypeKind::ScalarTypeType;
  }
  std::optional<at::ScalarType> get(Tensors& /*values*/) const { return type; }
  std::optional<at::ScalarType> type;
};

template <>
struct Argument<at::OptionalIntArrayRef> {
  Argument(const c10::IValue& constant, int /*slot*/) {
    if (!constant.isNone()) numbers = constant.toIntVector();
  }
  static bool fits(const c10::Argument& argument) {
    return is_list_of(within_optional(argument.real_type()), TypeKind::IntType);
  }
  at::OptionalIntArrayRef get(Tensors& /*values*/) const {
    return numbers ? at::OptionalIntArrayRef(*numbers) : at::OptionalIntArrayRef();
  }
  std::optional<std::vector<std::int64_t>> numbers;
};

template <typename Signature>
class Typed;

template <typename Result, typename... Args>
class Typed<Result(Args...)> final : public Unboxed {
 public:
  static std::unique_ptr<const Unboxed> make(const OperatorCall& call, int result) {
    const auto& schema = call.op.schema();
    if (schema.arguments().size() != sizeof...(Args) || schema.returns().size() != 1) return nullptr;
    if (schema.returns().front().type()->kind() != TypeKind::TensorType) return nullptr;
    const c10::AliasInfo* const alias = schema.returns().front().alias_info();
    if (std::is_reference_v<Result> != (alias != nullptr && alias->isWrite())) return nullptr;
    // A view must share its base's version counter, which only the boxed path sees to.
    if (!std::is_reference_v<Result> && alias != nullptr) return nullptr;
    return make(call, result, std::index_sequence_for<Args...>());
  }

  void run(Tensors& values) const override {
    std::apply(
        [&](const auto&... argument) {
          // In place or out=: the result is a tensor that the frame holds already.
          if constexpr (std::is_reference_v<Result>) {
            op_.redispatch(keys_, argument.get(values)...);
          } else {
            at::Tensor made = op_.redispatch(keys_, argument.get(values)...);
            if (result_ >= 0) values[at_slot(result_)] = std::move(made);
          }
        },
        arguments_);
  }

 private:
  using Handle = c10::TypedOperatorHandle<Result(Args...)>;

  Typed(Handle op, c10::DispatchKeySet keys, int result, std::tuple<Argument<Args>...> arguments)
      : op_(std::move(op)), keys_(keys), result_(result), arguments_(std::move(arguments)) {}

  template <std::size_t... I>
  static std::unique_ptr<const Unboxed> make(const OperatorCall& call, int result,
                                             std::index_sequence<I...>) {
    const auto& arguments = call.op.schema().arguments();
    if (!(Argument<Args>::fits(arguments[I]) && ...)) return nullptr;
    std::array<int, sizeof...(Args)> slots;
    slots.fill(kUndefined);
    for (const TensorPlace& place : call.inputs) {
      // Lists and fresh handles are made anew in each run, by the boxed path.
      if (place.kind != TensorPlace::ArgumentType::kTensor || place.fresh_handle) return nullptr;
      slots[place.index] = place.slots.front();
    }
    try {  // throws where C++ has other types than the schema suggests
      return std::unique_ptr<const Unboxed>(new Typed(call.op.typed<Result(Args...)>(), call.keys, result,
                                                      {Argument<Args>(call.arguments[I], slots[I])...}));
    } catch (const c10::Error&) {
      return nullptr;
    }
  }

  Handle op_;
  c10::DispatchKeySet keys_;
  int result_;
  std::tuple<Argument<Args>...> arguments_;
};

template <typename... Signatures>
std::unique_ptr<const Unboxed> first_of(const OperatorCall& call, int result) {
  std::unique_ptr<const Unboxed> found;
  static_cast<void>(((found = Typed<Signatures>::make(call, result)) || ...));
  return found;
}

// Of a function of Rest: itself, the one that writes into its last argument, and the one in place.
template <typename... Rest>
std::unique_ptr<const Unboxed> of_forms(const OperatorCall& call, int result) {
  return first_of<at::Tensor(const at::Tensor&, Rest...),
                  at::Tensor&(const at::Tensor&, Rest..., at::Tensor&), at::Tensor&(at::Tensor&, Rest...)>(
      call, result);
}

}  // namespace

std::unique_ptr<const Unboxed> unbox(const OperatorCall& call, int result) {
  // A call from a file has no recorded keys: the dispatcher finds its kernel in each run.
  if (call.keys.empty()) return nullptr;
  using T = const at::Tensor&;
  using S = const at::Scalar&;
  using Make = std::unique_ptr<const Unboxed> (*)(const OperatorCall&, int);
  static constexpr Make kForms[] = {
      of_forms<>,                                                              // relu, sigmoid
      of_forms<T>,                                                             // mul, mm, silu_backward
      of_forms<S>,                                                             // div.Scalar
      of_forms<S, S>,                                                          // add.Scalar
      of_forms<T, S>,                                                          // add.Tensor
      of_forms<T, T>,                                                          // where.self
      of_forms<T, T, S>,                                                       // addcmul
      of_forms<T, T, S, S>,                                                    // addmm, baddbmm
      of_forms<std::string_view>,                                              // gelu
      of_forms<T, std::string_view>,                                           // gelu_backward
      of_forms<std::int64_t, bool>,                                            // _softmax
      of_forms<T, std::int64_t, at::ScalarType>,                               // _softmax_backward_data
      of_forms<at::OptionalIntArrayRef, bool, std::optional<at::ScalarType>>,  // sum.dim_IntList
      of_forms<T, bool>,                                                       // copy_
  };
  for (const Make make : kForms) {
    if (auto found = make(call, result)) return found;
  }
  return nullptr;
}

}  // namespace cohort::script
