#pragma once

#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cohort/bench/compare.h"
#include "cohort/optim/adam.h"
#include "cohort/optim/sgd.h"
#include "cohort/script/step.h"
#include "tests/script/nets.h"

/// Training steps of a model in every way of computing them, measured turn by turn.
namespace cohort::benchmarks {

using test::cross_entropy;

using Body = std::function<void()>;
using BenchmarkCase = std::pair<const char*, std::function<Body()>>;

/// Prints a table of variants; ratios to the first.
inline void compare(const std::string& what, const std::vector<BenchmarkCase>& entries, int rounds) {
  std::vector<bench::Variant> variants;
  for (const auto& [name, make] : entries) {
    variants.push_back({name, [make = make](const bench::Shape& /*none*/) {
                          Body body = make();
                          for (int warm = 0; warm < 6; ++warm) body();  // recordings, the warm-up
                          return body;
                        }});
  }
  const auto options = bench::CompareOptions().timeit(bench::TimeitOptions().rounds(rounds));
  std::printf("%s\n\n%s\n", what.c_str(), bench::compare(variants, options).markdown().c_str());
  std::fflush(stdout);
}

/// Any module of one tensor, so that what follows is compiled for one type.
struct AnyNetImpl : torch::nn::Module {
  template <typename M>
  explicit AnyNetImpl(M net) : forward([net](const at::Tensor& x) mutable { return net->forward(x); }) {
    register_module("net", net);
  }
  std::function<at::Tensor(const at::Tensor&)> forward;
};
TORCH_MODULE(AnyNet);
using MakeNet = std::function<AnyNet()>;

/// What a step of a model with an optimizer does, eagerly and scripted.
template <typename Optimizer>
struct Training {
  Training(AnyNet made, at::Tensor input, at::Tensor target)
      : model(std::move(made)), x(std::move(input)), y(std::move(target)), optimizer(options()) {}

  Body eager(std::shared_ptr<Training> self) {
    return [self] {
      self->optimizer.zero_grad();
      cross_entropy(self->model->forward(self->x), self->y).backward();
      self->optimizer.step();
    };
  }
  Body scripted(std::shared_ptr<Training> self) {
    return [self, step = script::script_step(self->model, cross_entropy, self->optimizer)]() mutable {
      step(self->x, self->y);
    };
  }
  Body function(std::shared_ptr<Training> self) {
    return [self, fast = script::script(self->model)]() mutable {
      self->optimizer.zero_grad();
      cross_entropy(fast(self->x), self->y).backward();
      self->optimizer.step();
    };
  }
  Optimizer options() {
    const auto parameters = model->parameters();
    if constexpr (std::is_same_v<Optimizer, optim::SGD>) {
      return Optimizer(parameters, optim::SGDOptions(1e-3).momentum(0.9));
    } else if constexpr (std::is_same_v<Optimizer, torch::optim::SGD>) {
      return Optimizer(parameters, torch::optim::SGDOptions(1e-3).momentum(0.9));
    } else {
      return Optimizer(parameters);
    }
  }

  AnyNet model;
  at::Tensor x, y;
  Optimizer optimizer;
};

enum class Way { kEager, kStep, kFunction };

template <typename Optimizer>
std::function<Body()> training(const MakeNet& make, const at::Tensor& x, const at::Tensor& y, Way way) {
  return [=] {
    auto made = std::make_shared<Training<Optimizer>>(make(), x, y);
    return way == Way::kEager  ? made->eager(made)
           : way == Way::kStep ? made->scripted(made)
                               : made->function(made);
  };
}

/// Steps with SGD and with Adam, ours and LibTorch's.
inline void steps(const std::string& what, const MakeNet& make, const at::Tensor& x, const at::Tensor& y,
                  int rounds) {
  compare(what + ", SGD",
          {{"eager", training<optim::SGD>(make, x, y, Way::kEager)},
           {"script_step", training<optim::SGD>(make, x, y, Way::kStep)},
           {"script(model)", training<optim::SGD>(make, x, y, Way::kFunction)},
           {"eager, torch::optim", training<torch::optim::SGD>(make, x, y, Way::kEager)}},
          rounds);
  compare(what + ", Adam",
          {{"eager", training<optim::Adam>(make, x, y, Way::kEager)},
           {"script_step", training<optim::Adam>(make, x, y, Way::kStep)},
           {"eager, torch::optim", training<torch::optim::Adam>(make, x, y, Way::kEager)}},
          rounds);
}

}  // namespace cohort::benchmarks
