#pragma once

#include <ATen/ATen.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/rnn.h>
#include <torch/types.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "tests/support/random/random_program.h"

/// Steps of random programs that operators alone do not show: memory that C++ fills, threads, lazy tensors.
namespace cohort::test::random_steps {

/// Four numbers of `a`, with its graph.
inline at::Tensor four_of(const at::Tensor& a) {
  const at::Tensor flat = a.reshape({-1});
  return flat.size(0) >= 4 ? flat.slice(0, 0, 4) : flat.slice(0, 0, 1).expand({4});
}

/// A tensor [2, 4] that C++ filled, in one of several ways.
inline at::Tensor fill(Draw& draw) {
  std::vector<float> numbers(8);
  for (float& number : numbers) number = static_cast<float>(draw(16) - 6) * 0.25F + 0.125F;
  const int how = draw(7);
  if (how == 0) return torch::tensor(numbers).view({2, 4});
  if (how == 1) {
    auto* const kept = new std::vector<float>(numbers);
    return at::from_blob(kept->data(), {2, 4}, [kept](void*) { delete kept; });
  }
  if (how == 2) return torch::tensor({{numbers[0], numbers[1], 0.5F, 1.0F}, {numbers[2], 1.0F, 2.0F, -1.0F}});
  at::Tensor t = how == 3 ? at::zeros({2, 4}) : at::empty({2, 4});
  auto rows = t.accessor<float, 2>();
  for (std::int64_t row = how == 4 ? 1 : 0; row < 2; ++row) {
    for (std::int64_t i = 0; i < 4; ++i) rows[row][i] = numbers[static_cast<std::size_t>(row * 4 + i)];
  }
  if (how == 4) t[0].fill_(0.25);
  return t;
}

inline Tensors parts_of(const at::Tensor& t, Draw& draw) {
  switch (draw(7)) {
    case 0:
      return t.unbind(0);
    case 1:
      return t.split(3, 1);
    case 2:
      return {t.narrow(1, 1, 2), t.narrow(1, 0, 3)};
    case 3:
      return {t.select(0, 1), t.select(1, 2)};
    case 4:
      return t.chunk(2, 1);
    case 5:
      return {t.view({-1}).slice(0, 1, 5), t.view({-1}).slice(0, 3, 7)};
    default:
      return {t.t(), t};
  }
}

inline Tensors use_filled(const at::Tensor& a, const at::Tensor&, Draw& draw) {
  at::Tensor t = fill(draw);
  const at::Tensor x = four_of(a);
  const at::Tensor plain = x.detach();
  switch (draw(9)) {
    case 0:
      t.add_(x);
      break;
    case 1:
      t[draw(2)].copy_(x);
      break;
    case 2:
      t.index_put_({torch::tensor({draw(2)})}, x);
      break;
    case 3:
      t.div_(t.abs().sum()).mul_(x);
      break;
    case 4:
      t.clamp_(-0.5, 0.5);
      break;
    case 5: {
      at::Tensor row = t[1];
      at::sin_out(row, plain);
      break;
    }
    default:
      break;
  }
  Tensors made = parts_of(t, draw);
  if (draw(2) == 0) made.push_back(x * made.front().reshape({-1}).slice(0, 0, 1));
  return made;
}

inline Tensors use_indices(const at::Tensor& a, const at::Tensor&, Draw& draw) {
  const at::Tensor x = four_of(a);
  std::vector<std::int64_t> numbers(8);
  for (auto& number : numbers) number = draw(4);
  at::Tensor t = torch::tensor(numbers).view({2, 4});
  if (draw(2) == 0) t[0].copy_(t[1]);
  const at::Tensor mask = t.remainder(2).to(at::kBool);
  return {x.index_select(0, t[1]), x.gather(0, t[0]), at::where(mask[draw(2)], x, -x)};
}

/// Imaginary parts and negative views, and writes to them.
inline Tensors use_lazy(const at::Tensor& a, const at::Tensor& b, Draw& draw) {
  const at::Tensor other = a.sizes() == b.sizes() ? b : a * 0.5;
  const auto complex = [&] { return at::complex(a, other); };
  switch (draw(7)) {
    case 0:
      return {at::imag(complex().conj())};
    case 1:
      return {a._neg_view()};
    case 2:
      return {at::view_as_real(complex().conj().mul(complex())).select(-1, draw(2))};
    case 3: {
      at::Tensor part = at::imag(complex().conj());
      part.mul_(0.5);
      return {part};
    }
    case 4:
      return {at::imag(complex().conj()) * other, at::real(complex().conj())};
    case 5: {
      at::Tensor negated = a.clone();
      negated._neg_view().copy_(other);
      return {negated};
    }
    default:
      return {at::imag(complex().conj().exp()), a._neg_view() + other};
  }
}

template <typename Part>
void on_a_thread(const Part& part) {
  std::thread thread([&] {
    const at::NoGradGuard no_grad;
    part();
  });
  thread.join();
}

/// Two threads that write to parts of one tensor, or one that writes to `a`.
inline Tensors use_threads(const at::Tensor& a, const at::Tensor& b, Draw& draw) {
  const at::Tensor x = four_of(a).detach(), y = four_of(b).detach();
  if (draw(3) == 0 && !a.requires_grad() && RandomProgram::may_write(a)) {
    on_a_thread([&] { at::Tensor(a).mul_(0.5); });
    return {};
  }
  const int which = draw(3);
  at::Tensor out = which == 0 ? at::zeros({2, 4}) : which == 1 ? at::empty({2, 4}) : fill(draw);
  if (draw(2) == 0) {
    on_a_thread([&] { out[1].copy_(x * 2); });
    out[0].copy_(y + 1);
    return {out.mul(1)};
  }
  out.copy_(y);
  on_a_thread([&] { out[draw(2)].add_(x); });
  return {out};
}

/// Operators that ask LibTorch's switches, and layers that ask their training flag.
inline ExtraStep use_switches(torch::nn::Dropout dropout, torch::nn::LSTM lstm) {
  return [=](const at::Tensor& a, const at::Tensor&, Draw& draw) mutable -> Tensors {
    const at::Tensor x = four_of(a);
    switch (draw(3)) {
      case 0:
        return {dropout->forward(a)};
      case 1: {
        const at::Tensor q = x.view({1, 1, 4, 1}) * x.detach().view({1, 1, 1, 4});
        return {at::scaled_dot_product_attention(q, q, q)[0][0]};
      }
      default: {
        const at::NoGradGuard no_grad;
        return {std::get<0>(lstm->forward(x.detach().view({2, 1, 2}).repeat({3, 2, 8})))[draw(6)]};
      }
    }
  };
}

}  // namespace cohort::test::random_steps
