#pragma once

#include <functional>
#include <tuple>
#include <utility>

#include "cohort/script/script.h"

namespace cohort::script {

struct Trace;

/// A training step that is recorded and then replayed: what ScriptedStep is made of. Threads: one caller at a
/// time.
class TrainingStep {
 public:
  /// What a step consists of.
  struct Parts {
    std::function<at::Tensor(const Tensors& inputs)> loss;  ///< forward and loss
    std::function<void()> zero_grad;                        ///< comes first
    std::function<void()> before_update;                    ///< may be empty
    std::function<void()> update;                           ///< the optimizer's step
    std::function<Tensors()> parameters;                    ///< of the optimizer
  };
  TrainingStep(Parts parts, ScriptOptions options);
  ~TrainingStep();
  TrainingStep(const TrainingStep&) = delete;
  TrainingStep& operator=(const TrainingStep&) = delete;

  at::Tensor operator()(const Tensors& inputs);
  /// Says what was recorded under which guards, and why steps run eagerly.
  std::string explain() const;
  /// Forgets all recordings and programs.
  void clear();

 private:
  at::Tensor run(const Tensors& inputs);
  at::Tensor record(const Tensors& inputs, Trace& trace);
  void find_gradients(Trace& trace);
  at::Tensor replay(const Tensors& inputs, const Program& program);
  void update();

  Parts parts_;
  const std::unique_ptr<Cache> cache_;
};

namespace script_detail {

// Parameters of an optimizer of ours, or of torch::optim's.
template <typename Optimizer>
Tensors parameters_of(Optimizer& optimizer) {
  Tensors all;
  for (auto& group : optimizer.param_groups()) {
    const auto& own = [&]() -> const auto& {
      if constexpr (requires { group.params(); }) {
        return group.params();
      } else {
        return group.params;
      }
    }();
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

template <typename Model, typename Loss, std::size_t... I>
at::Tensor loss_of(Model& model, Loss& loss, const Tensors& inputs, std::index_sequence<I...>) {
  return std::invoke(loss, core::call(model, inputs[I]...), inputs[sizeof...(I)]);
}

}  // namespace script_detail

/// What script_step() returns. Copies share their programs. Threads: one caller at a time.
template <typename Model, typename Loss, typename Optimizer>
class ScriptedStep {
 public:
  ScriptedStep(Model model, Loss loss, Optimizer& optimizer, ScriptOptions options,
               std::function<void()> before_update)
      : state_(std::make_shared<State>(std::move(model), std::move(loss), optimizer, std::move(options),
                                       std::move(before_update))) {
    script_detail::watch(state_->model, state_->options);
  }

  /// Trains on one batch and returns the loss, without a graph: `step(input, target)`, or more inputs before
  /// the target.
  template <std::same_as<at::Tensor>... Inputs>
    requires(sizeof...(Inputs) >= 2)
  at::Tensor operator()(const Inputs&... inputs_and_target) {
    return step<sizeof...(Inputs) - 1>()({inputs_and_target...});
  }

  /// As Scripted's.
  std::string explain() const {
    std::string text;
    for (const auto& [count, step] : state_->steps) text += step->explain();
    return text;
  }
  /// Forgets all recordings and programs: the next step records.
  void clear() {
    for (auto& [count, step] : state_->steps) step->clear();
  }

 private:
  struct State {
    State(Model model_, Loss loss_, Optimizer& optimizer_, ScriptOptions options_,
          std::function<void()> before)
        : model(std::move(model_)),
          loss(std::move(loss_)),
          optimizer(optimizer_),
          options(std::move(options_)),
          before_update(std::move(before)) {}
    Model model;
    Loss loss;
    Optimizer& optimizer;
    ScriptOptions options;
    std::function<void()> before_update;
    std::map<std::size_t, std::unique_ptr<TrainingStep>> steps;  // by the number of inputs
  };

  template <std::size_t kInputs>
  TrainingStep& step() {
    auto& made = state_->steps[kInputs];
    if (made == nullptr) {
      State* const state = state_.get();
      made = std::make_unique<TrainingStep>(
          TrainingStep::Parts{
              .loss =
                  [state](const Tensors& inputs) {
                    return script_detail::loss_of(state->model, state->loss, inputs,
                                                  std::make_index_sequence<kInputs>());
                  },
              .zero_grad = [state] { state->optimizer.zero_grad(); },
              .before_update = state->before_update,
              .update = [state] { state->optimizer.step(); },
              .parameters = [state] { return script_detail::parameters_of(state->optimizer); }},
          state->options);
    }
    return *made;
  }

  std::shared_ptr<State> state_;
};

/// Returns the whole training step: zero_grad, loss(model(input), target), backward, optimizer's step.
///
///     auto step = script::script_step(model, [](const at::Tensor& y, const at::Tensor& t) {
///       return torch::nn::functional::cross_entropy(y, t); }, sgd);
///     for (auto& [x, y] : batches) { schedule->apply(sgd, n++); at::Tensor loss = step(x, y); }
///
/// Forward and backward are one program, without autograd's engine; it ends with gradients in `.grad`, where
/// `before_update` finds them (clipping), and the optimizer steps as ever, so its options and counts are
/// live. With gradients as eager mode has them, bit for bit. Parameters of the model that the optimizer does
/// not have must not need a gradient, and hooks must not hang on parameters: else every call runs eagerly.
/// Ownership: keeps model and loss; `optimizer` (of ours or torch::optim's) must outlive it.
template <typename Model, typename Loss, typename Optimizer>
ScriptedStep<std::decay_t<Model>, std::decay_t<Loss>, Optimizer> script_step(
    Model&& model, Loss&& loss, Optimizer& optimizer, ScriptOptions options = ScriptOptions(),
    std::function<void()> before_update = nullptr) {
  return {std::forward<Model>(model), std::forward<Loss>(loss), optimizer, std::move(options),
          std::move(before_update)};
}

}  // namespace cohort::script
