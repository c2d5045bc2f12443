#include "opinfo.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <optional>

#include "opinfo_values.h"
#include "tests/script/same_bits.h"

namespace cohort::test::opinfo {
namespace {

// The operator that computes the same and returns it, for out= of the right types.
std::optional<c10::OperatorHandle> without_out(const c10::OperatorHandle& op) {
  const auto& wanted = op.schema().arguments();
  const auto end = std::find_if(wanted.begin(), wanted.end(), is_out);
  for (const c10::OperatorName& name : names()) {
    if (name.name != op.operator_name().name || name == op.operator_name()) continue;
    const auto other = c10::Dispatcher::singleton().findSchema(name);
    if (!other) continue;
    const auto& has = other->schema().arguments();
    const bool same =
        std::equal(has.begin(), has.end(), wanted.begin(), end, [](const auto& a, const auto& b) {
          return a.name() == b.name() && *a.type() == *b.type() && !is_written(a);
        });
    if (same) return other;
  }
  return std::nullopt;
}

c10::IValue empty_like_result(const c10::IValue& result) {
  const auto empty_like = [](const at::Tensor& tensor) { return at::empty({0}, tensor.options()); };
  if (result.isTensor()) return empty_like(result.toTensor());
  c10::List<at::Tensor> list;
  if (result.isTensorList()) {
    for (const at::Tensor& tensor : result.toTensorVector()) list.push_back(empty_like(tensor));
  }
  return list;
}

torch::jit::Stack make_all(const c10::OperatorHandle& op, const Attempt& attempt) {
  at::manual_seed(attempt.variant + 1);
  torch::jit::Stack stack, results;
  for (const c10::Argument& argument : op.schema().arguments()) {
    if (is_out(argument)) break;
    stack.push_back(value_for(argument, op.operator_name(), attempt));
  }
  const std::size_t num_out = op.schema().arguments().size() - stack.size();
  if (num_out == 0) return stack;
  if (const auto other = without_out(op)) {
    results = make_all(*other, attempt);
    other->callBoxed(&results);
  }
  for (std::size_t i = 0; i < num_out; ++i) {
    const bool is_list = op.schema().arguments()[stack.size()].type()->kind() == c10::TypeKind::ListType;
    const c10::IValue sample =
        is_list ? c10::IValue(c10::List<at::Tensor>({at::empty({0})})) : at::empty({0});
    stack.push_back(empty_like_result(i < results.size() ? results[i] : sample));
  }
  return stack;
}

Tensors copies_of(const Tensors& tensors) {
  Tensors copies;
  for (const at::Tensor& tensor : tensors) copies.push_back(tensor.clone());
  return copies;
}

bool computes_something(const Case& sample) {
  const Tensors inputs = copies_of(sample.inputs());
  const Tensors results = sample(inputs);
  const auto has_elements = [](const at::Tensor& tensor) { return tensor.defined() && tensor.numel() > 0; };
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (sample.is_written()[i] && has_elements(inputs[i])) return true;
  }
  return std::any_of(results.begin(), results.end(), has_elements);
}

std::string first_line(const std::exception& error) {
  const auto* const ours = dynamic_cast<const c10::Error*>(&error);
  const std::string text = ours != nullptr ? ours->what_without_backtrace() : error.what();
  return text.substr(0, std::min<std::size_t>(text.find('\n'), 120));
}

// Of so many draws of a single bool, all are the same for one operator in 32.
constexpr std::size_t kNumCases = 6;

bool has_tensors(const c10::FunctionSchema& schema) {
  const auto is_tensors = [](const c10::Argument& argument) {
    return argument.type()->str().find("Tensor") != std::string::npos;
  };
  return std::any_of(schema.returns().begin(), schema.returns().end(), is_tensors) ||
         std::any_of(schema.arguments().begin(), schema.arguments().end(), is_written);
}

template <typename Visit>
void each_tensor(c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) value = visit(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(visit(tensor));
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional(visit(*tensor)) : std::nullopt);
    }
    value = list;
  }
}

}  // namespace

std::string text_of(const c10::OperatorName& name) {
  return c10::toString(name);
}

std::string base_of(const c10::OperatorName& name) {
  return name.name.substr(name.name.find("::") + 2);
}

std::vector<c10::OperatorName> names() {
  static const auto all = [] {
    std::vector<c10::OperatorName> found;
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
      if (name.name.rfind("aten::", 0) == 0 && c10::Dispatcher::singleton().findSchema(name))
        found.push_back(name);
    }
    std::sort(found.begin(), found.end(),
              [](const auto& a, const auto& b) { return text_of(a) < text_of(b); });
    return found;
  }();
  return all;
}

Case::Case(c10::OperatorHandle op, torch::jit::Stack arguments)
    : op_(std::move(op)), arguments_(std::move(arguments)) {
  for (std::size_t i = 0; i < arguments_.size(); ++i) {
    const c10::Argument& argument = op_.schema().arguments()[i];
    if (is_out(argument)) continue;
    each_tensor(arguments_[i], [&](const at::Tensor& tensor) {
      inputs_.push_back(tensor);
      is_written_.push_back(opinfo::is_written(argument));
      return tensor;
    });
  }
}

Tensors Case::operator()(const Tensors& inputs) const {
  torch::jit::Stack stack = arguments_;
  auto next = inputs.begin();
  Tensors out, results;
  for (std::size_t i = 0; i < stack.size(); ++i) {
    const bool goes_out = is_out(op_.schema().arguments()[i]);
    each_tensor(stack[i], [&](const at::Tensor& tensor) {
      if (!goes_out) return *next++;
      return out.emplace_back(at::empty({0}, tensor.options()));
    });
  }
  op_.callBoxed(&stack);
  for (c10::IValue& value : stack) {
    each_tensor(value, [&](const at::Tensor& tensor) { return results.emplace_back(tensor); });
  }
  results.insert(results.end(), out.begin(), out.end());
  return results;
}

std::vector<std::size_t> Found::fixed_inputs() const {
  std::vector<std::size_t> fixed;
  for (std::size_t i = 0; i < cases.front().inputs().size(); ++i) {
    const at::Tensor& first = cases.front().inputs()[i];
    const bool is_fixed = std::all_of(cases.begin(), cases.end(), [&](const Case& other) {
      return same_bits(other.inputs().at(i), first);
    });
    if (is_fixed && first.numel() > 0) fixed.push_back(i);
  }
  return fixed;
}

Found find_inputs(const c10::OperatorHandle& op) {
  const auto& left_out = inputs_of("*left_out");
  const std::string base = base_of(op.operator_name());
  if (const auto found = left_out.find(base); found != left_out.end()) {
    std::string reason = found->second;
    std::replace(reason.begin(), reason.end(), '_', ' ');
    return {.reason = reason};
  }
  if (!has_tensors(op.schema())) return {.reason = "computes no tensor"};
  const at::NoGradGuard no_grad;
  std::vector<std::vector<std::int64_t>> shapes = {{4, 4}, {2, 4, 8, 8}, {4}, {2, 4, 4}, {}, {2, 2, 4, 4, 4}};
  if (const std::size_t dimensions = dimensions_in(base))
    shapes.insert(shapes.begin(), shape_for(dimensions));
  Found found;
  for (const auto& shape : shapes) {
    for (const char kind : {'f', 'i', 'c', 'b'}) {
      try {
        for (std::size_t variant = 0; variant < kNumCases; ++variant) {
          Case sample(op, make_all(op, {shape, kind, variant}));
          if (computes_something(sample)) found.cases.push_back(std::move(sample));
        }
      } catch (const std::exception& error) {
        if (found.reason.empty()) found.reason = first_line(error);
      }
      if (!found.cases.empty()) return found;
    }
  }
  if (found.reason.empty()) found.reason = "computes no elements";
  return found;
}

}  // namespace cohort::test::opinfo
