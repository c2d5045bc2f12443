// Random programs with several backwards have the same bits on two, three and four workers as on one, and
// nearly the numbers of plain code. On several workers two programs run at a time, in contexts of their own.
// COHORT_RANDOM_PROGRAMS, COHORT_RANDOM_FIRST: other seeds.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <exception>
#include <future>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/rpc/dist_autograd.h"
#include "tests/rpc/autograd/dist_autograd_program.h"
#include "tests/rpc/job.h"
#include "tests/support/comes_true.h"
#include "tests/support/seeds.h"

namespace cohort::rpc::programs {
namespace {

using dist_autograd::Context;
using dist_autograd::ContextId;
using test::comes_true;
using test::Job;
using test::Seeds;
using Tensors = std::vector<at::Tensor>;

constexpr std::int64_t kRoot = 0;  // the place where programs begin

std::optional<at::Tensor> weight_gradient(ContextId id, std::int64_t place, std::int64_t index) {
  for (const auto& [leaf, gradient] : dist_autograd::get_gradients(id)) {
    if (leaf.is_same(weight_of(place, index))) return gradient;
  }
  return std::nullopt;
}
COHORT_REMOTE(weight_gradient);

struct Outcome {
  Tensors losses;
  Tensors gradients;  // of x, then of the weights: in the context
  Tensors grads;      // their grad()
};

Tensors grads_of(const at::Tensor& x) {
  Tensors grads{x.grad()};
  for (std::int64_t i = 0; i < 2 * kPlaces; ++i) {
    const at::Tensor& grad = weight_of(i / 2, i % 2).grad();
    grads.push_back(grad.defined() ? grad.clone() : grad);
  }
  return grads;
}
void clear_grads() {
  for (std::int64_t i = 0; i < 2 * kPlaces; ++i) weight_of(i / 2, i % 2).mutable_grad().reset();
}
at::Tensor new_x() {
  return at::linspace(0.1, 0.9, 8, at::kFloat).requires_grad_();
}
// Programs beside each other share the grad() of weights: only those of odd seeds use it.
bool goes_into_grad(std::int64_t seed) {
  return seed % 4 == 3;
}
std::int64_t depth_of(std::int64_t step) {
  return step == 0 ? 3 : 2;
}
std::int64_t seed_of(std::int64_t seed, std::int64_t step) {
  return 10 * seed + step;
}

std::int64_t num_steps_of(std::int64_t seed) {
  return 1 + seed % 3;
}
std::string describe_steps(std::int64_t seed) {
  std::string text = "seed " + std::to_string(seed);
  for (std::int64_t step = 0; step < num_steps_of(seed); ++step) {
    text += "\nstep " + std::to_string(step) + ": " + describe_program(seed_of(seed, step), depth_of(step));
  }
  return text;
}

// Programs, each of the result of the one before. After each comes a backward, from its loss or from all so
// far.
template <typename Backward>
Tensors run_steps(Execution execution, std::int64_t seed, const at::Tensor& x, const Backward& backward) {
  const std::int64_t num_steps = num_steps_of(seed);
  Tensors losses;
  at::Tensor y = x;
  for (std::int64_t step = 0; step < num_steps; ++step) {
    y = run_program(execution, kRoot, seed_of(seed, step), depth_of(step), y);
    losses.push_back(y.sum());
    Tensors roots;
    for (const at::Tensor& loss : losses) {
      const bool is_root = seed % 4 == 0 || loss.is_same(losses.back());
      if (is_root && loss.requires_grad()) roots.push_back(loss);
    }
    if (!roots.empty()) backward(roots, step + 1 < num_steps);
  }
  return losses;
}

Outcome run_remotely(std::int64_t seed, Agent& agent) {
  const bool into_grad = goes_into_grad(seed);
  if (into_grad) clear_grads();
  const at::Tensor x = new_x();
  Context context(agent);
  Outcome outcome;
  outcome.losses = run_steps(Execution::kRemote, seed, x, [&](const Tensors& roots, bool keep_graph) {
    dist_autograd::backward(context, roots, {.keep_graph = keep_graph, .into_grad = into_grad});
  });
  if (into_grad) outcome.grads = grads_of(x);
  outcome.gradients.emplace_back();
  for (const auto& [leaf, gradient] : dist_autograd::get_gradients(context)) {
    if (leaf.is_same(x)) outcome.gradients.back() = gradient;
  }
  const at::NoGradGuard no_grad;
  for (std::int64_t i = 0; i < 2 * kPlaces; ++i) {
    at::Tensor gradient;
    try {
      gradient = agent.rpc_sync<weight_gradient>(worker_of(i / 2), context.id(), i / 2, i % 2)
                     .value_or(at::Tensor());
    } catch (const UsageError&) {  // no call came there
    }
    outcome.gradients.push_back(gradient);
  }
  return outcome;
}

Outcome run_plainly(std::int64_t seed) {
  clear_grads();
  const at::Tensor x = new_x();
  Outcome outcome;
  outcome.losses = run_steps(Execution::kPlain, seed, x, [](const Tensors& roots, bool keep_graph) {
    at::Tensor sum = roots.front();
    for (std::size_t i = 1; i < roots.size(); ++i) sum = sum + roots[i];
    sum.backward({}, keep_graph);
  });
  outcome.grads = grads_of(x);
  return outcome;
}

// Names the program that throws.
Outcome run_remotely_or_say(std::int64_t seed, Agent& agent) {
  try {
    return run_remotely(seed, agent);
  } catch (const std::exception& error) {
    ADD_FAILURE() << describe_steps(seed) << "\n" << error.what();
    throw;
  }
}

bool are_equal(const Tensors& a, const Tensors& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const at::Tensor& x, const at::Tensor& y) {
    return x.defined() == y.defined() && (!x.defined() || at::equal(x, y));
  });
}

// Of each leaf: in the context, and in its grad().
Tensors total_of(const Outcome& outcome) {
  Tensors total = outcome.gradients;
  for (std::size_t i = 0; i < outcome.grads.size(); ++i) {
    const at::Tensor& grad = outcome.grads[i];
    if (grad.defined()) total.at(i) = total[i].defined() ? total[i] + grad : grad;
  }
  return total;
}

bool are_close(const Tensors& a, const Tensors& b) {
  float scale = 1;
  for (const at::Tensor& tensor : b) {
    if (tensor.defined()) scale = std::max(scale, tensor.abs().max().item<float>());
  }
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [&](const at::Tensor& x, const at::Tensor& y) {
    return x.defined() == y.defined() && (!x.defined() || at::allclose(x, y, 1e-4, 1e-4 * scale));
  });
}

bool is_left_with_nothing(Job& job, std::int64_t num_workers) {
  return comes_true([&] {
    std::size_t left = 0;
    for (std::size_t i = 0; i < static_cast<std::size_t>(num_workers); ++i) {
      left += job[i].metrics().contexts + job[i].metrics().references;
    }
    return left == 0;
  });
}

TEST(DistAutogradProgramsTest, HaveTheSameBitsOnAnyNumberOfWorkers) {
  const Seeds seeds = Seeds::usual(24);
  const std::int64_t first = seeds.first / 2 * 2, end = first + (seeds.count() + 1) / 2 * 2;
  std::map<std::int64_t, Outcome> outcomes;
  for (std::int64_t num_workers = 2; num_workers <= kPlaces; ++num_workers) {
    set_num_workers(num_workers);
    Job job(static_cast<int>(num_workers));
    for (std::int64_t seed = first; seed < end; seed += 2) {
      if (seed / 2 % 3 != num_workers - 2) continue;
      auto beside =
          std::async(std::launch::async, [&, seed] { return run_remotely_or_say(seed + 1, job[0]); });
      outcomes[seed] = run_remotely_or_say(seed, job[0]);
      outcomes[seed + 1] = beside.get();
    }
    EXPECT_TRUE(is_left_with_nothing(job, num_workers)) << num_workers << " workers";
    job.shutdown();
  }
  set_num_workers(1);
  Job job(1);
  std::ptrdiff_t num_gradients = 0;
  for (std::int64_t seed = first; seed < end; ++seed) {
    SCOPED_TRACE(describe_steps(seed));
    const Outcome &on_several = outcomes.at(seed), on_one = run_remotely_or_say(seed, job[0]),
                  plain = run_plainly(seed);
    ASSERT_TRUE(are_equal(on_several.losses, on_one.losses));
    ASSERT_TRUE(are_equal(on_several.gradients, on_one.gradients))
        << at::TensorList(on_several.gradients) << "\n"
        << at::TensorList(on_one.gradients);
    ASSERT_TRUE(are_equal(on_several.grads, on_one.grads)) << at::TensorList(on_several.grads) << "\n"
                                                           << at::TensorList(on_one.grads);
    ASSERT_TRUE(are_equal(on_several.losses, plain.losses));
    const Tensors total = total_of(on_several);
    ASSERT_TRUE(are_close(total, plain.grads)) << at::TensorList(total) << "\n"
                                               << at::TensorList(plain.grads);
    num_gradients +=
        std::count_if(total.begin(), total.end(), [](const at::Tensor& tensor) { return tensor.defined(); });
  }
  EXPECT_GT(num_gradients, end - first);
  EXPECT_TRUE(is_left_with_nothing(job, 1));
  job.shutdown();
}

}  // namespace
}  // namespace cohort::rpc::programs
