#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/contains.h"

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

/// The program of a number: the same operators in each call, on tensors of its inputs [4, 4], [4, 4] and [4],
/// of what it captured, and of its own results.
class RandomProgram {
 public:
  /// `draws`: with random operators.
  RandomProgram(unsigned seed, const Captured& captured, bool draws = true)
      : seed_(seed), captured_(captured), draws_(draws) {}

  /// Returns some of the tensors that it saw.
  Tensors operator()(const Tensors& inputs) const {
    Draw draw{std::mt19937(seed_)};
    Tensors pool = inputs;
    for (const Tensors* some : {&captured_.parameters, &captured_.buffers}) {
      pool.insert(pool.end(), some->begin(), some->end());
    }
    for (int left = 3 + draw(14); left > 0; --left) {
      const int size = static_cast<int>(pool.size());
      const at::Tensor a = pool[at(draw(3) == 0 ? draw(size) : size - 1 - draw(std::min(size, 5)))],
                       b = pool[at(draw(size))];
      const bool no_gradients = draw(12) == 0;
      const at::AutoGradMode mode(at::GradMode::is_enabled() && !no_gradients);
      const int which = draw(32);
      if (!draws_ && (which == kDropout || which == kRand)) continue;
      for (const at::Tensor& made : step(which, a, b, draw)) pool.push_back(made);
    }
    Tensors results;
    for (int left = 1 + draw(3); left > 0; --left) {
      const int size = static_cast<int>(pool.size());
      results.push_back(pool[at(size - 1 - draw(draw(3) == 0 ? size : std::min(size, 5)))]);
    }
    return results;
  }

 private:
  static constexpr int kDropout = 16, kRand = 23;
  struct Draw {
    std::mt19937 generator;
    int operator()(int below) { return static_cast<int>(generator() % static_cast<unsigned>(below)); }
  };

  static std::size_t at(int index) { return static_cast<std::size_t>(index); }

  // By LibTorch's rules.
  static bool may_write(const at::Tensor& tensor) {
    for (std::int64_t i = 0; i < tensor.dim(); ++i) {
      if (tensor.stride(i) == 0 && tensor.size(i) > 1) return false;
    }
    const auto is_parameter = [](const at::Tensor& each) { return each.requires_grad() && each.is_leaf(); };
    return !at::GradMode::is_enabled() ||
           !(is_parameter(tensor) || (tensor.is_view() && is_parameter(at::Tensor(tensor._base()))));
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
  bool draws_;
};

namespace random_program {

struct Seen {
  Tensors results, inputs, gradients;
  std::string form, error;
  at::Tensor drawn;
};

inline std::string form_of(const Tensors& results, const Tensors& inputs, const Captured& captured) {
  Tensors all = results;
  for (const Tensors* some : {&inputs, &captured.parameters, &captured.buffers}) {
    all.insert(all.end(), some->begin(), some->end());
  }
  std::ostringstream form;
  for (const at::Tensor& tensor : all) {
    form << tensor.sizes() << tensor.strides();
    // A view that was taken without gradients says that it needs one where its base does, and has none.
    if (tensor.requires_grad() && (!tensor.is_view() || tensor.grad_fn() != nullptr)) form << " grad";
    for (std::size_t k = 0; k < all.size(); ++k) {
      if (all[k].is_alias_of(tensor))
        form << " " << k << "+" << tensor.storage_offset() - all[k].storage_offset();
    }
    form << "\n";
  }
  return form.str();
}

// `kind`: two bits for each of the inputs, and one for whether the first two are the same.
inline Tensors make_inputs(unsigned kind, Tensors& leaves) {
  Tensors inputs;
  for (unsigned i = 0; i < 3; ++i) {
    at::Tensor input = i == 2 ? at::randn({4}) : at::randn({4, 4});
    const unsigned how = (kind >> (2 * i)) & 3U;
    if (how == 1 || how == 2) leaves.push_back(input.requires_grad_());
    if (how == 2) input = input * 1.0;
    if (how == 3 && i < 2) input = at::randn({4, 8}).slice(1, 0, 8, 2);
    inputs.push_back(input);
  }
  if (((kind >> 6) & 1U) != 0) inputs[1] = inputs[0];
  return inputs;
}

inline void go_back(unsigned seed, Seen& seen, const at::Tensor& parameter) {
  if (seed % 2 != 0) {
    at::Tensor result = seen.results[seed / 2 % seen.results.size()];
    seed % 4 == 1 ? result.mul_(parameter.sum()) : result.sigmoid_();
  }
  at::Tensor loss = at::zeros({});
  for (const at::Tensor& result : seen.results) {
    if (result.requires_grad()) loss = loss + (result * (result.detach() + 0.5)).sum();
  }
  for (const at::Tensor& input : seen.inputs) {
    if (input.requires_grad()) loss = loss + (input * 0.7).sum();
  }
  if (loss.requires_grad()) loss.backward();
}

inline Seen call(const std::function<Tensors(const Tensors&)>& run, unsigned seed, int number, bool gradients,
                 unsigned kind, const Captured& captured) {
  Seen seen;
  Tensors leaves;
  at::manual_seed(seed * 100 + static_cast<unsigned>(number));
  seen.inputs = make_inputs(kind, leaves);
  for (const at::Tensor& parameter : captured.parameters) parameter.mutable_grad().reset();
  try {
    const at::AutoGradMode mode(gradients);
    seen.results = run(seen.inputs);
    seen.form = form_of(seen.results, seen.inputs, captured);
    if (gradients) go_back(seed, seen, captured.parameters[0]);
  } catch (const std::exception& error) {
    seen.error = error.what();
  }
  leaves.insert(leaves.end(), captured.parameters.begin(), captured.parameters.end());
  for (const at::Tensor& leaf : leaves) seen.gradients.push_back(leaf.grad());
  seen.drawn = at::rand({3});
  return seen;
}

inline bool near(const Tensors& a, const Tensors& b, double tolerance) {
  return a.size() == b.size() &&
         std::equal(a.begin(), a.end(), b.begin(), [&](const at::Tensor& x, const at::Tensor& y) {
           if (x.defined() != y.defined()) return false;
           return !x.defined() || (x.sizes() == y.sizes() &&
                                   at::allclose(x.detach(), y.detach(), tolerance, tolerance, true));
         });
}

}  // namespace random_program

/// Calls the program of `seed` five times, and in turn what `wrap` makes of it, on inputs that are leaves,
/// have a graph, are views or each other, with and without gradients; writes to a result and goes back.
/// Expects the same values, effects, gradients, random numbers, and shared memory. Where either throws, the
/// other must, or the error be one of `refusals`.
inline void expect_like_plain(
    unsigned seed, const std::function<std::function<Tensors(const Tensors&)>(RandomProgram)>& wrap,
    const std::vector<std::string>& refusals) {
  std::mt19937 draw(seed * 7919 + 1);
  const unsigned kind = static_cast<unsigned>(draw()) & 127U;
  const bool gradients = draw() % 4 != 0;
  const Captured ours = Captured::make(seed), theirs = Captured::make(seed);
  const RandomProgram plain(seed, ours);
  const auto wrapped = wrap(RandomProgram(seed, theirs));
  for (int number = 0; number < 5; ++number) {
    const auto expected = random_program::call(plain, seed, number, gradients, kind, ours);
    const auto found = random_program::call(wrapped, seed, number, gradients, kind, theirs);
    const std::string where = "program " + std::to_string(seed) + ", call " + std::to_string(number);
    if (!expected.error.empty()) return;  // LibTorch refuses some writes to aliases that are allowed here
    if (contains_one_of(found.error, refusals)) return;
    ASSERT_EQ(found.error, "") << where;
    ASSERT_TRUE(random_program::near(expected.results, found.results, 0)) << where;
    ASSERT_TRUE(random_program::near(expected.inputs, found.inputs, 0)) << where;
    ASSERT_TRUE(random_program::near(ours.parameters, theirs.parameters, 0)) << where;
    ASSERT_TRUE(random_program::near(ours.buffers, theirs.buffers, 0)) << where;
    ASSERT_TRUE(random_program::near(expected.gradients, found.gradients, 1e-4))
        << where;  // another order of sums
    ASSERT_TRUE(at::equal(expected.drawn, found.drawn)) << where;
    ASSERT_EQ(expected.form, found.form) << where;
  }
}

}  // namespace cohort::test
