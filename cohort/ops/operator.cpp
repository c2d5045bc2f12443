// Each operator gets a boxed autograd kernel: it redispatches below autograd, or makes a node for a call with
// gradients. The node keeps tensors as saved variables and the rest of the arguments beside them, so each
// tensor is kept once. A call without gradients still counts versions and makes views, so that autograd
// notices writes. A schema that writes or returns its arguments is rejected where a gradient is wanted, never
// wrong in silence.
#include "cohort/ops/operator.h"

#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <utility>

#include "cohort/base/text/nearest_name.h"

namespace cohort::ops {

namespace detail {

/// What the autograd kernel of an operator knows. Filled while the operator is being defined. Shared with the
/// kernel, which is registered before backward() and the other setters are called.
struct Recipe {
  Backward backward;
  bool save_outputs = false;
  std::string no_gradient;  // why the schema admits none: "writes to its arguments"; empty: it does
};

}  // namespace detail

using detail::Recipe;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

using Stack = torch::jit::Stack;

bool is_tensor_list(const c10::IValue& value) {
  return value.isTensorList();
}

/// Calls fn(tensor) for each tensor among `values`; an optional one that is absent counts as undefined where
/// the schema says Tensor.
template <typename Fn>
void each_tensor(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> values, const Fn& fn) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i].isTensor()) {
      fn(i, values[i].toTensor());
    } else if (is_tensor_list(values[i])) {
      for (const at::Tensor& tensor : values[i].toTensorVector()) fn(i, tensor);
    } else if (values[i].isNone() &&
               schema.arguments()[i].type()->str().find("Tensor") != std::string::npos) {
      fn(i, at::Tensor());
    }
  }
}

bool holds_tensors(const c10::Type& type) {
  if (type.kind() == c10::TypeKind::TensorType) return true;
  const auto within = type.containedTypes();
  return std::any_of(within.begin(), within.end(), [](const auto& each) { return holds_tensors(*each); });
}

/// Whether each_tensor() finds what is in it: Tensor, Tensor[], and either of them where it is optional.
bool is_seen(const c10::Type& type) {
  if (!holds_tensors(type) || type.kind() == c10::TypeKind::TensorType) return true;
  const c10::Type& within = *type.containedTypes().front();
  if (type.kind() == c10::TypeKind::ListType) return within.kind() == c10::TypeKind::TensorType;
  return type.kind() == c10::TypeKind::OptionalType && is_seen(within);
}

std::string why_no_gradient(const c10::FunctionSchema& schema) {
  // autograd::Function returns new tensors. A written argument, a view or a list of tensors would need a
  // graph of its own kind, and without one gradients would be wrong in silence.
  if (schema.is_mutable()) return "writes to its arguments";
  for (const c10::Argument& result : schema.returns()) {
    if (result.alias_info() != nullptr) return "returns its arguments or parts of them";
    if (holds_tensors(*result.type()) && result.type()->kind() != c10::TypeKind::TensorType) {
      return "returns lists of tensors";
    }
  }
  return "";
}

/// Goes from forward to backward: the arguments, their tensors taken out (autograd keeps those).
struct SavedCall : torch::CustomClassHolder {
  std::string name;  // "mine::scale"
  std::shared_ptr<const Recipe> recipe;
  std::vector<c10::IValue> arguments;
  std::vector<std::size_t> tensor_arguments;  // of each tensor, the argument that it belongs to
  std::vector<bool> is_defined;               // of each tensor; autograd is given only those that are
};

/// One call on its way through autograd::Function. autograd::Function hands only tensors through by itself. A
/// pointer to the frame carries the rest, for the time of the call.
struct Frame {
  const c10::OperatorHandle& op;
  c10::DispatchKeySet keys;
  Stack* stack;
  c10::intrusive_ptr<SavedCall> saved;
  std::vector<c10::IValue> outputs;
};

std::vector<std::size_t> tensor_outputs(const std::vector<c10::IValue>& outputs) {
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i].isTensor()) places.push_back(i);
  }
  return places;
}

}  // namespace

struct CallParts {
  static Call make(const SavedCall& saved, const variable_list& tensors, const std::vector<bool>& needed) {
    Call call;
    call.name_ = saved.name;
    call.arguments_ = saved.arguments;
    for (c10::IValue& argument : call.arguments_) {
      if (is_tensor_list(argument)) argument = c10::List<at::Tensor>();  // a copy of a list would share it
    }
    call.needs_gradient_.resize(saved.arguments.size());
    std::size_t next = 0;
    for (std::size_t i = 0; i < saved.tensor_arguments.size(); ++i) {
      const std::size_t argument = saved.tensor_arguments[i];
      const at::Tensor tensor = saved.is_defined[i] ? tensors[next++] : at::Tensor();
      if (needed[i]) call.needs_gradient_[argument] = true;
      call.tensors_.push_back(tensor);
      c10::IValue& place = call.arguments_[argument];
      if (is_tensor_list(place)) {
        c10::List<at::Tensor> list = place.toTensorList();
        list.push_back(tensor);
      } else {
        place = tensor;
      }
    }
    call.outputs_.assign(tensors.begin() + static_cast<std::ptrdiff_t>(next), tensors.end());
    return call;
  }
  static const variable_list& tensors(const Call& call) { return call.tensors_; }
};

namespace {

struct Differentiated : torch::autograd::Function<Differentiated> {
  static variable_list forward(AutogradContext* ctx, at::TensorList tensors, Frame* frame) {
    const std::size_t num_outputs = frame->op.schema().returns().size();
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      frame->op.redispatchBoxed(frame->keys & c10::after_ADInplaceOrView_keyset, frame->stack);
    }
    frame->outputs = torch::jit::pop(*frame->stack, num_outputs);
    variable_list outputs;
    for (const std::size_t place : tensor_outputs(frame->outputs)) {
      outputs.push_back(frame->outputs[place].toTensor());
    }
    // save_for_backward() takes results as well without a cycle between the node and its own output.
    variable_list kept = tensors.vec();
    if (frame->saved->recipe->save_outputs) kept.insert(kept.end(), outputs.begin(), outputs.end());
    ctx->save_for_backward(std::move(kept));
    ctx->saved_data["call"] = c10::IValue::make_capsule(frame->saved);
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto saved = c10::static_intrusive_pointer_cast<SavedCall>(ctx->saved_data["call"].toCapsule());
    const Recipe& recipe = *saved->recipe;
    if (!recipe.backward) {
      throw UsageError("ops.backward", base::concat(saved->name, " has no derivative"),
                       "define it with backward() or derivative(), or call it where no gradient is needed");
    }
    const std::size_t num_inputs = saved->tensor_arguments.size();
    std::vector<bool> needed(num_inputs);
    std::size_t edge = 0;
    for (std::size_t i = 0; i < num_inputs; ++i)
      // The node has an edge for each defined tensor only, so edges and tensors are counted separately.
      needed[i] = saved->is_defined[i] && ctx->needs_input_grad(edge++);
    const Call call = CallParts::make(*saved, ctx->get_saved_variables(), needed);
    const variable_list given = recipe.backward(call, gradients);
    if (given.size() != num_inputs) {
      throw UsageError("ops.backward", base::concat("backward of ", saved->name, " gave ", given.size(),
                                                    " gradients, expected ", num_inputs,
                                                    ", one for each tensor among the arguments"));
    }
    variable_list result;
    for (std::size_t i = 0; i < num_inputs; ++i) {
      if (saved->is_defined[i]) result.push_back(given[i]);
    }
    result.emplace_back();  // of the frame
    return result;
  }
};

/// The kernel under the key Autograd of every operator defined here.
class AutogradKernel : public c10::OperatorKernel {
 public:
  explicit AutogradKernel(std::shared_ptr<const Recipe> recipe) : recipe_(std::move(recipe)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    const c10::FunctionSchema& schema = op.schema();
    const auto arguments = torch::jit::last(*stack, schema.arguments().size());
    bool needs_gradient = false;
    each_tensor(schema, arguments, [&](std::size_t, const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      needs_gradient = needs_gradient || tensor.requires_grad();
      if (tensor._fw_grad(/*level=*/0).defined()) {
        throw UsageError("ops.forward", base::concat(schema.name(), " has no forward-mode derivative"));
      }
    });
    // Inference and evaluation pay for no node.
    if (!needs_gradient || !at::GradMode::is_enabled()) {
      write_without_gradient(op, keys, stack);
      return;
    }
    if (!recipe_->no_gradient.empty()) {
      throw UsageError(
          "ops.forward",
          base::concat(schema.name(), " ", recipe_->no_gradient, ", which cannot be differentiated"),
          "at::NoGradGuard around the call");
    }
    differentiate(op, keys, stack);
  }

 private:
  /// What is written to gets a new version, so that autograd sees that values it has saved are gone. Results
  /// that share memory with an argument share its count of versions too, and one that is not in a list is a
  /// view of it to autograd, which does not let what needs a gradient write to it: the argument would
  /// miss that.
  static void write_without_gradient(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    std::vector<at::Tensor> written, shared;
    const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
    each_tensor(op.schema(), arguments, [&](std::size_t index, const at::Tensor& tensor) {
      const c10::AliasInfo* alias = op.schema().arguments()[index].alias_info();
      if (!tensor.defined() || alias == nullptr || tensor.is_inference()) return;
      if (alias->isWrite()) written.push_back(tensor);
      shared.push_back(tensor);
    });
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
    }
    for (const at::Tensor& tensor : written) tensor.unsafeGetTensorImpl()->bump_version();
    if (shared.empty()) return;
    const auto owner_of = [&](const at::Tensor& result) -> const at::Tensor* {
      if (!result.defined() || result.is_inference()) return nullptr;
      const auto of = std::find_if(shared.begin(), shared.end(), [&](const at::Tensor& each) {
        return each.is_same(result) ||
               (each.has_storage() && result.has_storage() && each.is_alias_of(result));
      });
      return of == shared.end() ? nullptr : &*of;
    };
    for (std::size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) {
      c10::IValue& value = (*stack)[i];
      if (value.isTensor()) {
        const at::Tensor result = value.toTensor();
        const at::Tensor* const owner = owner_of(result);
        if (owner != nullptr && !owner->is_same(result)) value = view_of(*owner, result);
      } else if (is_tensor_list(value)) {
        for (const at::Tensor& each : value.toTensorVector()) {
          const at::Tensor* const owner = owner_of(each);
          if (owner == nullptr) continue;
          each.unsafeGetTensorImpl()->set_version_counter(owner->unsafeGetTensorImpl()->version_counter());
        }
      }
    }
  }

  static at::Tensor view_of(const at::Tensor& base, const at::Tensor& result) {
    using torch::autograd::CreationMeta;
    return torch::autograd::as_view(
        base, result, /*is_bw_differentiable=*/true, /*is_fw_differentiable=*/false, nullptr, nullptr,
        at::GradMode::is_enabled() ? CreationMeta::IN_CUSTOM_FUNCTION : CreationMeta::NO_GRAD_MODE);
  }

  void differentiate(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    const std::size_t num_arguments = op.schema().arguments().size();
    auto saved = c10::make_intrusive<SavedCall>();
    saved->name = op.schema().name();
    saved->recipe = recipe_;
    variable_list tensors;
    const auto arguments = torch::jit::last(*stack, num_arguments);
    each_tensor(op.schema(), arguments, [&](std::size_t index, const at::Tensor& tensor) {
      saved->tensor_arguments.push_back(index);
      saved->is_defined.push_back(tensor.defined());
      if (tensor.defined()) tensors.push_back(tensor);
    });
    for (const c10::IValue& argument : arguments) {
      // Tensors are taken out: in here they would live as long as the graph, past the checks of saved
      // variables.
      saved->arguments.push_back(argument.isTensor()        ? c10::IValue()
                                 : is_tensor_list(argument) ? c10::IValue(c10::List<at::Tensor>())
                                                            : argument);
    }
    Frame frame{op, keys, stack, saved, {}};
    const variable_list outputs = Differentiated::apply(at::TensorList(tensors), &frame);
    const std::vector<std::size_t> places = tensor_outputs(frame.outputs);
    for (std::size_t i = 0; i < places.size(); ++i) frame.outputs[places[i]] = outputs[i];
    for (c10::IValue& output : frame.outputs) stack->push_back(std::move(output));
  }

  std::shared_ptr<const Recipe> recipe_;
};

}  // namespace

const c10::IValue& Call::at(std::size_t index) const {
  if (index < arguments_.size()) return arguments_[index];
  throw UsageError("ops.backward", base::concat("backward of ", name_, " asked for argument ", index,
                                                ", there are ", arguments_.size(), " (from 0)"));
}

const at::Tensor& Call::tensor(std::size_t index) const {
  static const at::Tensor undefined;
  const c10::IValue& value = at(index);
  if (value.isNone()) return undefined;
  if (value.isTensor()) return value.toTensor();
  throw UsageError("ops.backward", base::concat("backward of ", name_, " asked for argument ", index,
                                                " as a tensor, which is a ", value.tagKind()));
}

const at::Tensor& Call::output(std::size_t index) const {
  if (index < outputs_.size()) return outputs_[index];
  throw UsageError("ops.backward",
                   base::concat("backward of ", name_, " asked for output ", index, " of ", outputs_.size(),
                                " that were kept"),
                   "save_outputs() in its definition");
}

bool Call::needs_gradient(std::size_t index) const {
  return index < needs_gradient_.size() && needs_gradient_[index];
}

Definition::Definition(torch::Library& library, const std::string& schema, const std::vector<at::Tag>& tags)
    : library_(library), recipe_(std::make_shared<Recipe>()) {
  c10::FunctionSchema parsed = torch::schema(schema.c_str());
  name_ = parsed.name();
  if (!parsed.overload_name().empty()) name_ += "." + parsed.overload_name();
  for (const c10::Argument& argument : parsed.arguments()) {
    if (is_seen(*argument.type())) continue;
    throw UsageError("ops.define",
                     base::concat("argument '", argument.name(), "' of ", name_, " is ",
                                  argument.type()->str(), ", whose tensors autograd does not see"),
                     "Tensor, Tensor? or Tensor[] in the schema");
  }
  recipe_->no_gradient = why_no_gradient(parsed);
  library_.def(std::move(parsed), tags);
  // Also for an operator without backward(). Without an autograd kernel LibTorch would drop its gradient in
  // silence.
  library_.impl(name_.c_str(),
                torch::dispatch(c10::DispatchKey::Autograd, torch::CppFunction::makeFromBoxedFunctor(
                                                                std::make_unique<AutogradKernel>(recipe_))));
}

Definition& Definition::backward(Backward function) {
  if (!recipe_->no_gradient.empty()) {
    throw UsageError("ops.define",
                     base::concat(name_, " ", recipe_->no_gradient, ", so it has no backward()"),
                     "a schema whose results are new tensors");
  }
  recipe_->backward = std::move(function);
  return *this;
}

Definition& Definition::derivative(Derivative function) {
  return backward([function = std::move(function)](const Call& call, const auto& gradients) {
    std::vector<at::Tensor> result = function(call);
    const variable_list& tensors = CallParts::tensors(call);
    for (std::size_t i = 0; i < std::min(result.size(), tensors.size()); ++i) {
      if (!result[i].defined() || !tensors[i].defined()) continue;
      // The transpose of broadcasting is a sum over the dimensions that were expanded.
      result[i] = at::sum_to(gradients[0] * result[i], tensors[i].sizes());
    }
    return result;
  });
}

Definition& Definition::save_outputs() {
  recipe_->save_outputs = true;
  return *this;
}

Definition& Definition::autocast(Autocast rule) {
  detail::add_autocast(library_, name_, rule);
  return *this;
}

c10::OperatorHandle find_operator(const std::string& name) {
  // The overload comes after the name; a dot in the namespace does not count.
  const std::size_t dot = name.find('.', name.find("::") == std::string::npos ? 0 : name.find("::"));
  const std::string base = name.substr(0, dot);
  const std::string overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  if (const auto found = c10::Dispatcher::singleton().findSchema({base, overload})) return *found;
  throw UsageError(
      "ops.find", base::concat("there is no operator '", name, "'"),
      "TORCH_LIBRARY in a library that is linked or given with --load; its namespace belongs to the "
      "name: mine::scale");
}

}  // namespace cohort::ops
