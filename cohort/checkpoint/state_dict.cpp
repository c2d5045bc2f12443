// A single walk names the module's tensors in PyTorch's order, for saving and for loading. Loading matches
// names and shapes first and notes the copies, which run only when the match is accepted. So
// load_module_state() changes everything or nothing.
#include "cohort/checkpoint/state_dict.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <map>
#include <sstream>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"

namespace cohort::checkpoint {
namespace {

using base::concat;

/// Calls `visit(name, tensor)` for the module's own tensors, aliases included, in PyTorch's order.
template <typename Visit>
void visit_state(const torch::nn::Module& module, const std::string& prefix, const Visit& visit) {
  // PyTorch's order: parameters, buffers, then children. Tied weights stand under each of their names, as
  // there.
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    if (item.value().defined()) {
      visit(prefix + item.key(), item.value());
    }
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    if (item.value().defined()) {
      visit(prefix + item.key(), item.value());
    }
  }
  for (const auto& child : module.named_children()) {
    visit_state(*child.value(), prefix + child.key() + ".", visit);
  }
}

struct Copy {
  at::Tensor to;
  at::Tensor from;
};

std::string describe(const at::Tensor& tensor) {
  std::ostringstream out;
  out << c10::toString(tensor.scalar_type()) << " " << tensor.sizes();
  return out.str();
}

StateDifference match(const torch::nn::Module& module, const TensorMap& tensors, std::vector<Copy>& copies) {
  StateDifference difference;
  std::map<std::string_view, std::pair<const at::Tensor*, bool>> by_name;
  for (const auto& [name, tensor] : tensors) {
    by_name[name] = {&tensor, false};
  }
  visit_state(module, "", [&](const std::string& name, const at::Tensor& own) {
    if (own.is_meta()) {
      throw UsageError("checkpoint.load_module_state", concat(printable(name), " is on the meta device"),
                       "move the module to a device with memory first");
    }
    const auto found = by_name.find(name);
    if (found == by_name.end()) {
      difference.missing.push_back(name);
      return;
    }
    found->second.second = true;
    const at::Tensor& from = *found->second.first;
    if (!from.defined() || own.sizes() != from.sizes() ||
        // A cast may round, but must not drop an imaginary part.
        !c10::canCast(from.scalar_type(), own.scalar_type())) {
      difference.differing.push_back(concat(name, " (got ", from.defined() ? describe(from) : "nothing",
                                            ", expected ", describe(own), ")"));
      return;
    }
    copies.push_back({own, from});
  });
  for (const auto& [name, tensor] : tensors) {
    if (!by_name[name].second) {
      difference.unexpected.push_back(name);
    }
  }
  return difference;
}

void run(const std::vector<Copy>& copies) {
  // In-place writes to leaves that require grad. copy_() converts type and device.
  at::NoGradGuard no_grad;
  for (Copy copy : copies) {
    copy.to.copy_(copy.from);
  }
}

void append(base::TextList& list, const char* kind, const std::vector<std::string>& names) {
  constexpr size_t kShown = 10;
  if (names.empty()) {
    return;
  }
  base::TextList shown;
  // A model of another kind differs in hundreds of names. Ten of each kind show what is wrong.
  for (size_t i = 0; i < names.size() && i < kShown; ++i) shown.add(names[i].substr(0, 200));
  const std::string more = names.size() > kShown ? concat(" and ", names.size() - kShown, " more") : "";
  list.add(names.size(), " ", kind, ": ", shown.text(), more);
}

}  // namespace

TensorMap module_state(const torch::nn::Module& module) {
  TensorMap result;
  visit_state(module, "", [&](const std::string& name, const at::Tensor& tensor) {
    result.emplace_back(name, tensor.detach());
  });
  return result;
}

std::string StateDifference::to_text() const {
  base::TextList list("; ");
  append(list, "missing", missing);
  append(list, "unexpected", unexpected);
  append(list, "differing", differing);
  return list.text();
}

void load_module_state(torch::nn::Module& module, const TensorMap& tensors) {
  std::vector<Copy> copies;
  const StateDifference difference = match(module, tensors, copies);
  if (!difference.empty()) {
    throw DataError(
        "checkpoint.load_module_state", concat("the state is not of this model: ", difference.to_text()),
        "build the model with the options of the run that saved it, or load what fits (load_partial)");
  }
  run(copies);
}

StateDifference load_partial(torch::nn::Module& module, const TensorMap& tensors) {
  std::vector<Copy> copies;
  StateDifference difference = match(module, tensors, copies);
  run(copies);
  return difference;
}

}  // namespace cohort::checkpoint
