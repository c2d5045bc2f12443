#include <ATen/ATen.h>
#include <c10/core/StorageImpl.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/sgd.h>

#include <functional>

#include "cohort/optim/sgd.h"
#include "cohort/script/step.h"
#include "tests/script/nets.h"

// A model that changes between calls: the next call does what eager mode would.
namespace cohort::script {
namespace {

namespace nn = torch::nn;
using test::cross_entropy;
using test::same_bits;

/// Two layers that can be replaced, as members of a model of one's own can.
struct ChangingNetImpl : nn::Module {
  ChangingNetImpl()
      : first(register_module("first", nn::Linear(8, 8))),
        drop(register_module("drop", nn::Dropout(0.5))),
        last(register_module("last", nn::Linear(8, 10))),
        scale(register_parameter("scale", at::ones({10}))) {}
  at::Tensor forward(const at::Tensor& x) {
    return last->forward(drop->forward(first->forward(x)).tanh()) * scale;
  }
  void replace_scale() { parameters_["scale"] = scale = at::randn({10}).requires_grad_(); }
  nn::Linear first;
  nn::Dropout drop;
  nn::Linear last;
  at::Tensor scale;
};
TORCH_MODULE(ChangingNet);

using Change = std::function<void(ChangingNet&)>;

Tensors train(const Change& change, bool scripted, bool whole_step) {
  at::manual_seed(1);
  ChangingNet net;
  optim::SGD sgd(net->parameters(), optim::SGDOptions(0.05));
  auto fast = script(net);
  auto step = script_step(net, cross_entropy, sgd);
  Tensors all;
  for (int i = 0; i < 16; ++i) {
    if (i == 6) {
      at::manual_seed(4);
      change(net);
    }
    at::manual_seed(i);
    const at::Tensor x = at::randn({4, 8}).to(net->first->weight.scalar_type());
    const at::Tensor y = at::randint(0, 10, {4});
    if (scripted && whole_step) {
      all.push_back(step(x, y));
    } else {
      sgd.zero_grad();
      const at::Tensor loss = cross_entropy(scripted ? fast(x) : net->forward(x), y);
      loss.backward();
      sgd.step();
      all.push_back(loss.detach());
    }
    for (const at::Tensor& parameter : net->parameters()) {
      all.push_back(parameter.detach().clone());
      all.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
    }
    if (i == 5 && scripted) {
      const std::string explained = whole_step ? step.explain() : fast.explain();
      EXPECT_NE(explained.find("program: "), std::string::npos) << explained;
    }
  }
  return all;
}

void expect_heard(const char* what, const Change& change) {
  SCOPED_TRACE(what);
  const Tensors eager = train(change, false, false);
  EXPECT_TRUE(same_bits(eager, train(change, true, false))) << "script(model)";
  EXPECT_TRUE(same_bits(eager, train(change, true, true))) << "script_step";
}

TEST(InPlaceTest, OfWhatAModelConsistsOfAreHeard) {
  expect_heard("nothing", [](ChangingNet&) {});
  expect_heard("training flag", [](ChangingNet& net) { net->eval(); });
  expect_heard("training flag of one layer", [](ChangingNet& net) { net->drop->eval(); });
  expect_heard("frozen", [](ChangingNet& net) { net->first->weight.set_requires_grad(false); });
  expect_heard("dtype", [](ChangingNet& net) { net->to(at::kDouble); });
  expect_heard("parameter's memory",
               [](ChangingNet& net) { net->last->weight.set_data(at::randn({10, 8})); });
  expect_heard("values in place", [](ChangingNet& net) {
    const at::NoGradGuard no_grad;
    net->last->weight.mul_(2);
  });
  // The optimizer has the old ones: the new ones get gradients, and nobody steps them.
  expect_heard("module replaced",
               [](ChangingNet& net) { net->last = net->replace_module("last", nn::Linear(8, 10)); });
  expect_heard("parameter replaced", [](ChangingNet& net) { net->replace_scale(); });
}

// A tensor that a function captured, and that no module watches.
TEST(InPlaceTest, OfWhatAFunctionCapturedAreHeard) {
  const auto expect_heard = [](const char* what, bool needs_gradient,
                               const std::function<void(at::Tensor&)>& change) {
    SCOPED_TRACE(what);
    at::manual_seed(1);
    at::Tensor w = at::randn({4, 4}).set_requires_grad(needs_gradient);
    const auto fn = [&w](const at::Tensor& x) { return (at::matmul(x, w).relu() * 2).sum(); };
    auto fast = script(fn);
    const auto run = [&](auto& body, const at::Tensor& x) {
      Tensors found{body(x)};
      if (found[0].requires_grad()) {
        w.mutable_grad().reset();
        found[0].backward();
        found.push_back(w.grad());
      }
      return found;
    };
    for (int i = 0; i < 12; ++i) {
      if (i == 5) {
        EXPECT_NE(fast.explain().find("program: "), std::string::npos) << fast.explain();
        change(w);
      }
      const at::Tensor x = at::randn({4, 4}).to(w.scalar_type());
      const Tensors expected = run(fn, x);
      EXPECT_TRUE(same_bits(run(fast, x), expected)) << "call " << i << "\n" << fast.explain();
    }
  };
  for (const bool needs_gradient : {false, true}) {
    expect_heard("nothing", needs_gradient, [](at::Tensor&) {});
    expect_heard("needs a gradient now, or no more", needs_gradient,
                 [=](at::Tensor& w) { w.requires_grad_(!needs_gradient); });
    expect_heard("its strides", needs_gradient, [](at::Tensor& w) {
      const at::NoGradGuard no_grad;
      w.t_();
    });
    expect_heard("its sizes", needs_gradient, [](at::Tensor& w) {
      const at::NoGradGuard no_grad;
      w.unsqueeze_(0);
    });
    expect_heard("its offset", needs_gradient,
                 [](at::Tensor& w) { w.set_data(at::randn({5, 4}).slice(0, 1)); });
    expect_heard("the memory of its storage", needs_gradient, [](at::Tensor& w) {
      const at::Tensor other = at::randn({4, 4});
      c10::StorageImpl* const theirs = other.storage().unsafeGetStorageImpl();
      c10::StorageImpl* const ours = w.storage().unsafeGetStorageImpl();
      ASSERT_EQ(ours->nbytes(), theirs->nbytes());
      ours->set_data_ptr(theirs->set_data_ptr(c10::DataPtr()));
    });
    expect_heard("its type", needs_gradient, [](at::Tensor& w) { w.set_data(w.detach().to(at::kDouble)); });
  }
}

class Counting : public torch::autograd::FunctionPostHook {
 public:
  explicit Counting(int& count) : count_(count) {}
  Tensors operator()(const Tensors& outputs, const Tensors&) override {
    ++count_;
    return outputs;
  }

 private:
  int& count_;
};

// As wrappers that average gradients hang theirs, after steps have been recorded.
TEST(InPlaceTest, AHookThatComesLaterFiresInTheWholeStepToo) {
  auto model = test::small_mlp();
  optim::SGD sgd(model->parameters(), optim::SGDOptions(0.05));
  auto step = script_step(model, cross_entropy, sgd);
  const at::Tensor x = at::randn({16, 32}), y = at::randint(0, 10, {16});
  for (int i = 0; i < 4; ++i) step(x, y);
  int on_tensor = 0, on_accumulator = 0;
  const auto accumulator = torch::autograd::impl::grad_accumulator(model->parameters()[1]);
  accumulator->add_post_hook(std::make_unique<Counting>(on_accumulator));
  for (int i = 0; i < 4; ++i) step(x, y);
  EXPECT_EQ(on_accumulator, 4);
  model->parameters()[0].register_hook([&](const at::Tensor& gradient) {
    ++on_tensor;
    return gradient;
  });
  for (int i = 0; i < 4; ++i) step(x, y);
  EXPECT_EQ(on_tensor, 4);
}

}  // namespace
}  // namespace cohort::script
