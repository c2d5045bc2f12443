#include "cohort/autograd/internal/recompute_node.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "cohort/base/error.h"

namespace cohort::autograd::recompute_detail {
namespace {

using torch::autograd::AutogradContext;

// A function of the inputs and parameters that need a gradient, whose results are there already.
struct Recompute : torch::autograd::Function<Recompute> {
  static Tensors forward(AutogradContext* context, at::TensorList /*edges*/, const Tensors& results,
                         const Tensors& to_save, const c10::intrusive_ptr<torch::CustomClassHolder>& run) {
    context->set_materialize_grads(false);
    context->save_for_backward(to_save);
    context->saved_data["run"] = c10::IValue::make_capsule(run);
    return results;
  }

  static Tensors backward(AutogradContext* context, const Tensors& gradients) {
    if (at::GradMode::is_enabled()) {
      throw UsageError("autograd.recompute",
                       "backward with create_graph goes through a recomputed part, which has no graph",
                       "the plain call fn(inputs...) where second derivatives are taken");
    }
    // Ends the second backward through one graph with LibTorch's message, and a changed input too.
    const Tensors saved = context->get_saved_variables();
    const auto capsule = context->saved_data["run"].toCapsule();
    auto& run = static_cast<SecondRun&>(*capsule);
    std::vector<bool> wanted;
    for (std::size_t i = 0; i < run.num_edges(); ++i) wanted.push_back(context->needs_input_grad(i));
    Tensors result = run.backward(saved, gradients, wanted);
    result.resize(result.size() + 3);  // of the arguments that are no list of tensors
    return result;
  }
};

}  // namespace

Tensors attach_recompute_node(const Tensors& edges, const Tensors& results, const Tensors& to_save,
                              const c10::intrusive_ptr<SecondRun>& run) {
  return Recompute::apply(at::TensorList(edges), results, to_save,
                          c10::intrusive_ptr<torch::CustomClassHolder>(run));
}

bool is_recompute_node(const torch::autograd::Node& node) {
  return dynamic_cast<const torch::autograd::CppNode<Recompute>*>(&node) != nullptr;
}

}  // namespace cohort::autograd::recompute_detail
