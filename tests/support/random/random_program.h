#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <functional>
#include <random>
#include <set>
#include <utility>
#include <vector>

/// Functions made at random, of operators that compute, alias, write and draw, to compare what runs them in
/// another way (a recording, a cut graph, a second run in backward) with the plain call.
namespace cohort::test {

using Tensors = std::vector<at::Tensor>;

/// What a program uses besides its inputs.
struct Captured {
  Tensors parameters, buffers;

  static Captured make(unsigned seed) {
    at::manual_seed(seed);
    return {{at::randn({4, 4}).requires_grad_(), at::randn({4}).requires_grad_()}, {at::randn({4, 4})}};
  }
};

/// Numbers of a program's own.
struct Draw {
  explicit Draw(unsigned seed) : generator(seed) {}
  int operator()(int below) { return static_cast<int>(generator() % static_cast<unsigned>(below)); }
  std::mt19937 generator;
};

/// A step that some programs take beside those of RandomProgram: returns what it made of two tensors.
using ExtraStep = std::function<Tensors(const at::Tensor& a, const at::Tensor& b, Draw& draw)>;

struct RandomProgramOptions {
  bool draws = true;                        ///< with random operators
  bool switches_gradients = true;           ///< with steps under NoGradGuard
  std::vector<ExtraStep> extra_steps = {};  ///< one step in three is one of them
  std::set<int> left_out = {};              ///< steps that are not taken, to find out which matter
};

/// The program of a number: the same operators in each call, on tensors of its inputs [4, 4], [4, 4] and [4],
/// of what it captured, and of its own results. What a step does depends on its number and on the tensors
/// that it finds, so that a program without some of its steps still takes the others.
class RandomProgram {
 public:
  RandomProgram(unsigned seed, Captured captured, RandomProgramOptions options = {})
      : seed_(seed), captured_(std::move(captured)), options_(std::move(options)) {}

  static int steps_of(unsigned seed) { return 3 + Draw(seed * 7919 + 3)(14); }

  /// Returns some of the tensors that it saw.
  Tensors operator()(const Tensors& inputs) const {
    Tensors pool = inputs;
    for (const Tensors* some : {&captured_.parameters, &captured_.buffers}) {
      pool.insert(pool.end(), some->begin(), some->end());
    }
    for (int number = 0; number < steps_of(seed_); ++number) {
      if (options_.left_out.count(number) != 0) continue;
      for (const at::Tensor& made : take(number, pool)) pool.push_back(made);
    }
    Draw draw(seed_ * 7919 + 2);
    Tensors results;
    for (int left = 1 + draw(3); left > 0; --left) {
      const int size = static_cast<int>(pool.size());
      results.push_back(pool[at(size - 1 - draw(draw(3) == 0 ? size : std::min(size, 5)))]);
    }
    return results;
  }

  /// By LibTorch's rules.
  static bool may_write(const at::Tensor& tensor) {
    for (std::int64_t i = 0; i < tensor.dim(); ++i) {
      if (tensor.stride(i) == 0 && tensor.size(i) > 1) return false;
    }
    const auto is_parameter = [](const at::Tensor& each) { return each.requires_grad() && each.is_leaf(); };
    return !at::GradMode::is_enabled() ||
           !(is_parameter(tensor) || (tensor.is_view() && is_parameter(at::Tensor(tensor._base()))));
  }

 private:
  static constexpr int kDropout = 16, kRand = 23;

  static std::size_t at(int index) { return static_cast<std::size_t>(index); }

  Tensors take(int number, const Tensors& pool) const {
    Draw draw(seed_ * 7919 + 100 + static_cast<unsigned>(number));
    const int size = static_cast<int>(pool.size());
    const at::Tensor a = pool[at(draw(3) == 0 ? draw(size) : size - 1 - draw(std::min(size, 5)))],
                     b = pool[at(draw(size))];
    const bool no_gradients = draw(12) == 0 && options_.switches_gradients;
    const at::AutoGradMode mode(at::GradMode::is_enabled() && !no_gradients);
    const auto& extra = options_.extra_steps;
    if (!extra.empty() && draw(3) == 0) return extra[at(draw(static_cast<int>(extra.size())))](a, b, draw);
    const int which = draw(32);
    if (!options_.draws && (which == kDropout || which == kRand)) return {};
    return step(which, a, b, draw);
  }

  static Tensors step(int which, at::Tensor a, const at::Tensor& b, Draw& draw) {
    const bool alike = a.sizes() == b.sizes(), has_rows = a.dim() > 0 && a.size(0) > 1;
    const int rows = has_rows ? static_cast<int>(a.size(0)) : 0;
    switch (which) {
      case 0:
        return {a.relu()};
      case 1:
        return {a.sigmoid()};
      case 2:
        return {a.tanh()};
      case 3:
        return a.dim() > 0 ? Tensors{a.softmax(-1)} : Tensors{};
      case 4:
        return {alike ? a + b : a * 0.5};
      case 5:
        return alike ? Tensors{a * b} : Tensors{};
      case 6:
        return a.dim() == 2 ? Tensors{a.mm(b.dim() == 2 && b.size(0) == a.size(1) ? b : a.t())} : Tensors{};
      case 7:
        return a.dim() > 1 ? Tensors{a.transpose(0, -1)} : Tensors{};
      case 8:
        return has_rows ? Tensors{a.select(0, draw(rows))} : Tensors{};
      case 9: {
        if (!has_rows) return {};
        const int begin = draw(rows - 1), end = begin + 1 + draw(rows - begin);
        return {a.slice(0, begin, end, 1 + draw(2))};
      }
      case 10:
        return {a.reshape({-1})};
      case 11:
        return {a.unsqueeze(draw(static_cast<int>(a.dim()) + 1))};
      case 12: {
        std::vector<std::int64_t> sizes = a.sizes().vec();
        sizes.insert(sizes.begin(), 2);
        return a.dim() < 4 ? Tensors{a.expand(sizes)} : Tensors{};
      }
      case 13:
        return has_rows ? a.chunk(2) : Tensors{};
      case 14:
        return alike && a.dim() > 0 ? Tensors{at::cat({a, b})} : Tensors{};
      case 15:
        return a.dim() > 0 ? Tensors{a.sum({draw(static_cast<int>(a.dim()))}, draw(2) == 0)} : Tensors{};
      case kDropout:
        return {at::dropout(a, 0.5, true)};
      case 17:
        return alike ? Tensors{at::where(a > b, a, b)} : Tensors{};
      case 18:
        return {a.detach()};
      case 19:
        return {a.to(at::kDouble).mul(1.5).to(at::kFloat)};
      case 20: {
        if (a.dim() == 0) return {};
        const auto [values, indices] = a.max(0);
        return {values, a.index_select(0, indices.reshape({-1}).slice(0, 0, 2))};
      }
      case 21:
        return {draw(2) == 0 ? a.contiguous() : a.clone()};
      case 22:
        return {at::zeros_like(a)};
      case kRand:
        return {at::rand(a.sizes())};
      case 24: {
        at::Tensor out = at::empty_like(a);
        return {at::sigmoid_out(out, a.detach())};
      }
      case 25:
        return alike ? Tensors{draw(2) == 0 ? at::imag(at::complex(a, b))
                                            : at::view_as_real(at::complex(a, b)).select(-1, 0)}
                     : Tensors{};
      default:
        break;
    }
    if (!may_write(a)) return {};
    switch (which) {
      case 26:
        a.add_(0.25);
        break;
      case 27:
        alike && !a.is_alias_of(b) ? a.mul_(b) : a.mul_(0.5);
        break;
      case 28:
        a.relu_();
        break;
      case 29:
        if (alike) a.copy_(b);
        break;
      case 30:
        draw(2) == 0 ? a.zero_() : a.fill_(0.3);
        break;
      default:
        if (has_rows && a.dim() == 2) a.select(0, 0).mul_(0.5);
    }
    return {};
  }

  unsigned seed_;
  Captured captured_;
  RandomProgramOptions options_;
};

}  // namespace cohort::test
