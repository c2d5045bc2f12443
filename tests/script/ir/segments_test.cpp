// Gradients that are handed on while the rest of a replayed backward runs.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <mutex>
#include <thread>

#include "cohort/parallel/distributed.h"
#include "cohort/script/script.h"
#include "tests/script/nets.h"
#include "tests/support/ranks.h"

namespace cohort::script {
namespace {

using test::same_bits;

thread_local std::vector<std::string> events;

// An operator that says when it runs.
at::Tensor mark(const at::Tensor& x, std::string what) {
  events.push_back(std::move(what));
  return x.clone();
}
TORCH_LIBRARY(cohort_segments_test, library) {
  library.def("mark(Tensor x, str what) -> Tensor");
  library.impl("mark", c10::DispatchKey::CPU, TORCH_FN(mark));
}

// Nothing in forward; in backward the operator above.
struct MarkBackward : torch::autograd::Function<MarkBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const std::string& what) {
    context->saved_data["what"] = what;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("cohort_segments_test::mark", "")
                               .typed<at::Tensor(const at::Tensor&, std::string)>();
    return {op.call(gradients[0], context->saved_data["what"].toStringRef()), at::Tensor()};
  }
};

struct MarkedImpl : torch::nn::Module {
  MarkedImpl() {
    for (const char* name : {"a", "b", "c"}) layers.push_back(register_module(name, torch::nn::Linear(8, 8)));
  }
  at::Tensor forward(at::Tensor x) {
    for (std::size_t i = 0; i < layers.size(); ++i) {
      x = MarkBackward::apply(x, std::string("below ") + "abc"[i]);  // runs after this layer's backward
      x = layers[i]->forward(x).tanh();
    }
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Marked);

std::vector<std::string> events_of_backward(std::int64_t chunk_bytes, int calls) {
  Marked net;
  for (const auto& entry : net->named_parameters()) {
    entry.value().register_hook(
        [name = entry.key()](const at::Tensor& /*gradient*/) { events.push_back("hook of " + name); });
  }
  auto fast = script(net, ScriptOptions().gradient_chunk_bytes(chunk_bytes));
  for (int call = 0; call < calls; ++call) {
    const at::Tensor loss = fast(at::ones({4, 8}).requires_grad_()).sum();
    events.clear();
    loss.backward();
  }
  EXPECT_NE(fast.explain().find("program:"), std::string::npos) << fast.explain();
  return events;
}

std::ptrdiff_t place_of(const std::vector<std::string>& list, const std::string& what) {
  return std::find(list.begin(), list.end(), what) - list.begin();
}

TEST(SegmentsTest, HooksFireWhileBackwardRuns) {
  const std::vector<std::string> found = events_of_backward(1, 5);
  ASSERT_EQ(found.size(), 9U);
  for (const char* part : {"weight", "bias"}) {
    EXPECT_LT(place_of(found, std::string("hook of c.") + part), place_of(found, "below c"));
    EXPECT_LT(place_of(found, "below c"), place_of(found, std::string("hook of b.") + part));
    EXPECT_LT(place_of(found, std::string("hook of b.") + part), place_of(found, "below b"));
    EXPECT_LT(place_of(found, "below b"), place_of(found, std::string("hook of a.") + part));
  }
}

TEST(SegmentsTest, WithoutChunksAndInSmallModelsTheyFireAtItsEnd) {
  for (const std::int64_t bytes : {std::int64_t{0}, ScriptOptions().gradient_chunk_bytes()}) {
    const std::vector<std::string> found = events_of_backward(bytes, 5);
    ASSERT_EQ(found.size(), 9U);
    EXPECT_EQ(place_of(found, "below a"), 2);
  }
}

// Losses and gradients of some steps, the input's too.
template <typename Model>
std::vector<at::Tensor> gradients_of(Model model, const at::Tensor& input, const ScriptOptions* options) {
  std::vector<at::Tensor> found;
  std::optional<Scripted<Model>> fast;
  if (options != nullptr) fast.emplace(model, *options);
  at::manual_seed(2);
  for (int call = 0; call < 6; ++call) {
    const at::Tensor x =
        input.is_floating_point() ? (input * (call + 1)).detach().requires_grad_() : input + call;
    const at::Tensor loss = (fast ? (*fast)(x) : model->forward(x)).square().mean();
    loss.backward();
    found.push_back(loss.detach());
    found.push_back(x.grad());
    for (at::Tensor& parameter : model->parameters()) {
      found.push_back(parameter.grad().clone());
      const at::NoGradGuard no_grad;
      parameter.sub_(parameter.grad(), 0.01);
      parameter.mutable_grad().reset();
    }
  }
  if (fast) {
    EXPECT_NE(fast->explain().find("program:"), std::string::npos) << fast->explain();
    EXPECT_EQ(fast->explain().find("(in 1 parts)"), std::string::npos) << fast->explain();
  }
  return found;
}

TEST(SegmentsTest, GradientsAreEagersHoweverBackwardIsCut) {
  const auto check = [](const auto& make, const at::Tensor& input) {
    const auto seeded = [&] {
      at::manual_seed(1);
      return make();
    };
    const std::vector<at::Tensor> expected = gradients_of(seeded(), input, nullptr);
    for (const std::int64_t bytes : {1, 1000, 5000}) {
      const auto options = ScriptOptions().gradient_chunk_bytes(bytes);
      EXPECT_TRUE(same_bits(gradients_of(seeded(), input, &options), expected)) << bytes;
    }
  };
  check([] { return test::small_mlp(); }, at::rand({16, 32}));
  check([] { return test::Residual(); }, at::rand({4, 3, 12, 12}));
  check([] { return test::Encoder(); }, at::rand({6, 4, 32}));
  check([] { return test::Tagger(); }, at::randint(40, {4, 6}));
}

struct Chain {
  at::Tensor a = at::rand({3, 3}).requires_grad_(), b = at::rand({3, 3}).requires_grad_();
  Scripted<std::function<at::Tensor(const at::Tensor&)>> fast{
      [this](const at::Tensor& x) { return x.mm(a).sigmoid().mm(b).sigmoid(); },
      ScriptOptions().gradient_chunk_bytes(1)};
  Chain() {
    for (int call = 0; call < 3; ++call) fast(at::ones({2, 3})).sum().backward();
    EXPECT_NE(fast.explain().find("(in 2 parts)"), std::string::npos) << fast.explain();
  }
};

TEST(SegmentsTest, BackwardCanGoAgainAndToSomeOfTheLeavesOnly) {
  Chain chain;
  const at::Tensor x = at::rand({2, 3});
  const at::Tensor eager = x.mm(chain.a).sigmoid().mm(chain.b).sigmoid();
  const auto expected = torch::autograd::grad({eager.sum()}, {chain.a, chain.b});
  const at::Tensor y = chain.fast(x).sum();
  for (int again = 0; again < 3; ++again) {
    EXPECT_TRUE(same_bits(torch::autograd::grad({y}, {chain.a, chain.b}, {}, true), expected));
    EXPECT_TRUE(same_bits(torch::autograd::grad({y}, {chain.b}, {}, true)[0], expected[1]));
    EXPECT_TRUE(same_bits(torch::autograd::grad({y}, {chain.a}, {}, true)[0], expected[0]));
  }
}

TEST(SegmentsTest, TwoThreadsGoThroughOneGraphAtOnce) {
  Chain chain;
  const at::Tensor y = chain.fast(at::rand({2, 3})).sum();
  const auto expected = torch::autograd::grad({y}, {chain.a, chain.b}, {}, true);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        if (!same_bits(torch::autograd::grad({y}, {chain.a, chain.b}, {}, true), expected)) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(SegmentsTest, AHookThatThrowsBetweenSegmentsLeavesTheProgramUsable) {
  Chain chain;
  bool throws = true;
  chain.b.register_hook([&](const at::Tensor& /*gradient*/) {
    if (throws) throw std::runtime_error("the hook fails");
  });
  const at::Tensor x = at::rand({2, 3});
  EXPECT_THROW(chain.fast(x).sum().backward(), std::runtime_error);
  throws = false;
  const auto expected =
      torch::autograd::grad({x.mm(chain.a).sigmoid().mm(chain.b).sigmoid().sum()}, {chain.a, chain.b});
  EXPECT_TRUE(same_bits(torch::autograd::grad({chain.fast(x).sum()}, {chain.a, chain.b}), expected));
}

// The same values on every rank.
test::Residual make_net() {
  static std::mutex mutex;  // of the generator that initial values come from
  const std::lock_guard lock(mutex);
  at::manual_seed(1);
  return {};
}

// Takes steps of gradient descent on images of this rank's own; backward(images) leaves the gradients.
template <typename Backward>
void descend(test::Residual& net, int rank, int steps, const Backward& backward) {
  for (int step = 0; step < steps; ++step) {
    for (at::Tensor& parameter : net->parameters()) parameter.mutable_grad().reset();
    const at::Tensor x = (at::arange(2 * 3 * 12 * 12, at::kFloat) * (0.1 + rank) + step).sin();
    backward(x.view({2, 3, 12, 12}));
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : net->parameters()) parameter.sub_(parameter.grad(), 0.05);
  }
}

// Parameters after some steps, of rank 0.
std::vector<at::Tensor> train_with_reducer(const ScriptOptions* options) {
  std::vector<at::Tensor> result;
  test::run_ranks(2, "gloo", [&](comm::Group& group) {
    test::Residual net = make_net();
    parallel::Reducer reducer(group, parallel::parameters_to_reduce(*net),
                              {.first_bucket_bytes = 256, .bucket_cap_bytes = 1024});
    std::optional<Scripted<test::Residual>> fast;
    if (options != nullptr) fast.emplace(net, *options);
    // Buckets are grouped anew after the first step and the 18th.
    descend(net, group.rank(), 24, [&](const at::Tensor& images) {
      const at::Tensor loss = (fast ? (*fast)(images) : net->forward(images)).square().mean();
      reducer.prepare({.weight = 1.0 + group.rank()});
      loss.backward();
      reducer.finish();
    });
    if (group.rank() != 0) return;
    if (fast) {
      EXPECT_NE(fast->explain().find("program:"), std::string::npos) << fast->explain();
    }
    for (const at::Tensor& parameter : net->parameters()) result.push_back(parameter.detach().clone());
  });
  return result;
}

TEST(SegmentsTest, AReducerHasEagersBits) {
  const std::vector<at::Tensor> expected = train_with_reducer(nullptr);
  for (const std::int64_t bytes : {0, 1, 2000}) {
    const auto options = ScriptOptions().gradient_chunk_bytes(bytes);
    EXPECT_TRUE(same_bits(train_with_reducer(&options), expected)) << bytes;
  }
}

// Parameters and buffers after some steps, of rank 0.
std::vector<at::Tensor> train_distributed(bool scripted) {
  std::vector<at::Tensor> result;
  test::run_ranks(2, "gloo", [&](comm::Group& group) {
    test::Residual net = make_net();
    parallel::DistributedOptions options;
    options.bucket_cap_bytes = 1024;
    parallel::DistributedDataParallel<test::Residual> model(net, group, options);
    auto fast = script(net, ScriptOptions().gradient_chunk_bytes(1000));
    descend(net, group.rank(), 6, [&](const at::Tensor& images) {
      (scripted ? model.forward_by(fast, images) : model.forward(images)).square().mean().backward();
    });
    if (group.rank() != 0) return;
    if (scripted) {
      EXPECT_NE(fast.explain().find("program:"), std::string::npos) << fast.explain();
    }
    for (const at::Tensor& each : net->parameters()) result.push_back(each.detach().clone());
    for (const at::Tensor& each : net->buffers()) result.push_back(each.clone());
  });
  return result;
}

TEST(SegmentsTest, AScriptedModuleInDistributedDataParallelHasEagersBits) {
  EXPECT_TRUE(same_bits(train_distributed(true), train_distributed(false)));
}

struct TwoHeadsImpl : torch::nn::Module {
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    const at::Tensor y = trunk->forward(x).tanh();
    return {left->forward(y), right->forward(y)};
  }
  torch::nn::Linear trunk = register_module("trunk", torch::nn::Linear(4, 8)),
                    left = register_module("left", torch::nn::Linear(8, 2)),
                    right = register_module("right", torch::nn::Linear(8, 2));
};
TORCH_MODULE(TwoHeads);

// Gradients after each step, of rank 0. The loss is made of one head.
std::vector<at::Tensor> train_one_head(bool is_scripted) {
  std::vector<at::Tensor> result;
  test::run_ranks(2, "gloo", [&](comm::Group& group) {
    TwoHeads net;
    for (at::Tensor& parameter : net->parameters()) {
      const at::NoGradGuard no_grad;
      parameter.copy_(at::arange(parameter.numel()).view(parameter.sizes()).sin());
    }
    parallel::Reducer reducer(group, parallel::parameters_to_reduce(*net), {.find_unused_parameters = true});
    auto fast = script(net, ScriptOptions().gradient_chunk_bytes(1));
    for (int step = 0; step < 8; ++step) {
      for (at::Tensor& parameter : net->parameters()) parameter.mutable_grad().reset();
      const at::Tensor x = (at::arange(12, at::kFloat) + step + group.rank()).view({3, 4}).sin();
      const auto heads = is_scripted ? fast(x) : net->forward(x);
      const at::Tensor used = step % 3 == 2 ? heads.second : heads.first;
      reducer.prepare(std::vector<at::Tensor>{used});
      used.square().mean().backward();
      reducer.finish();
      if (group.rank() != 0) continue;
      for (const at::Tensor& parameter : net->parameters()) {
        result.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
      }
    }
  });
  return result;
}

TEST(SegmentsTest, AReducerFindsParametersThatTheLossIsNotMadeOf) {
  const std::vector<at::Tensor> expected = train_one_head(false);
  EXPECT_FALSE(expected.back().defined() && expected[4].defined());
  EXPECT_TRUE(same_bits(train_one_head(true), expected));
}

}  // namespace
}  // namespace cohort::script
