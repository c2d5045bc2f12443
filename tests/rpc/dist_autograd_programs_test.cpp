#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <random>

#include "cohort/base/error.h"
#include "cohort/rpc/dist_autograd.h"
#include "tests/rpc/job.h"
#include "tests/support/comes_true.h"

namespace cohort::rpc {
namespace {

using dist_autograd::Context;
using dist_autograd::ContextId;
using test::agent_of;
using test::comes_true;
using test::Job;

// Random programs that run on three workers, whose calls are functions of the seed. Run again with all calls to one worker they
// give the same bits; run as plain functions, without contexts, nearly the same numbers.
constexpr int kPlaces = 3;
int num_workers = 1;
thread_local bool is_plain = false;  // this thread calls functions in place of workers
std::vector<at::Tensor> weights;     // two for each place

std::string worker_of(std::int64_t place) {
  return "w" + std::to_string(place % num_workers);
}
at::Tensor random_program(std::int64_t place, std::int64_t seed, std::int64_t depth, const at::Tensor& x);
COHORT_REMOTE(random_program);
// The same on the value of an object, which lies at `owner`.
at::Tensor program_of_object(std::int64_t place, std::int64_t owner, std::int64_t seed, std::int64_t depth,
                             const RRef<at::Tensor>& x);
COHORT_REMOTE(program_of_object);
// Makes an object at `there` by another program, and returns a reference to it.
RRef<at::Tensor> make_by_program(std::int64_t place, std::int64_t there, std::int64_t seed,
                                 std::int64_t depth, const at::Tensor& x);
COHORT_REMOTE(make_by_program);

at::Tensor call_program(std::int64_t here, std::int64_t there, std::int64_t seed, std::int64_t depth,
                        const at::Tensor& x) {
  if (is_plain) return random_program(there, seed, depth, x);
  return agent_of(worker_of(here)).rpc_sync<random_program>(worker_of(there), there, seed, depth, x);
}

at::Tensor program_of_object(std::int64_t place, std::int64_t owner, std::int64_t seed, std::int64_t depth,
                             const RRef<at::Tensor>& x) {
  // The object itself may be used where it lies; gradients then add up in another order.
  const at::Tensor first = seed % 2 == 0 && place == owner ? *x.local_value() : x.to_here();
  const at::Tensor y = random_program(place, seed, depth, first);
  return seed % 3 == 0 ? y + x.to_here() : y;
}
RRef<at::Tensor> make_by_program(std::int64_t place, std::int64_t there, std::int64_t seed,
                                 std::int64_t depth, const at::Tensor& x) {
  Agent& agent = agent_of(worker_of(place));
  if (seed % 3 == 0) return agent.make_rref(random_program(place, seed, depth, x * 0.5));
  return agent.remote<random_program>(worker_of(there), there, seed, depth, x * 0.5);
}

// An object of one or two programs, made here or by another worker, and used by none, or by some of them.
at::Tensor use_object(std::int64_t place, std::mt19937& random, std::int64_t depth, const at::Tensor& x) {
  const auto pick = [&](int below) {
    return static_cast<std::int64_t>(random() % static_cast<unsigned>(below));
  };
  const std::int64_t maker = pick(kPlaces), owner = pick(kPlaces), user = pick(kPlaces),
                     seed = pick(1'000'000), seed_of_user = pick(1'000'000), uses = pick(8);
  const bool is_made_here = pick(2) == 0;
  const std::int64_t lies_at = seed % 3 == 0 ? (is_made_here ? place : maker) : owner;
  if (is_plain) {
    const at::Tensor value = random_program(lies_at, seed, depth, x * 0.5);
    at::Tensor y = x;
    if (uses & 1) y = y + value;
    if (uses & 2) {
      const at::Tensor z = random_program(user, seed_of_user, depth, value);
      y = y + (seed_of_user % 3 == 0 ? z + value : z);
    }
    if (uses & 4) y = y * value.tanh();
    return y;
  }
  Agent& agent = agent_of(worker_of(place));
  const RRef<at::Tensor> object =
      is_made_here ? make_by_program(place, owner, seed, depth, x)
                   : agent.rpc_sync<make_by_program>(worker_of(maker), maker, owner, seed, depth, x);
  at::Tensor y = x;
  if (uses & 1) y = y + object.to_here();
  if (uses & 2) {
    y = y + agent.rpc_sync<program_of_object>(worker_of(user), user, lies_at, seed_of_user, depth, object);
  }
  if (uses & 4) y = y * object.to_here().tanh();
  return y;
}

at::Tensor random_program(std::int64_t place, std::int64_t seed, std::int64_t depth, const at::Tensor& x) {
  std::mt19937 random(static_cast<std::uint32_t>(seed));
  const auto pick = [&](int below) {
    return static_cast<std::int64_t>(random() % static_cast<unsigned>(below));
  };
  at::Tensor y = x;
  for (std::int64_t steps = 1 + pick(4); steps > 0; --steps) {
    const std::int64_t there = pick(kPlaces), next_seed = static_cast<std::int64_t>(random() % 1'000'000);
    switch (depth == 0 ? pick(2) : pick(9)) {
      case 0:
        y = y * weights[static_cast<std::size_t>(place * 2 + pick(2))];
        break;
      case 1:
        y = y.sin();
        break;
      case 2:
        call_program(place, there, next_seed, depth - 1, y);  // nobody uses it
        break;
      case 3: {
        const at::NoGradGuard no_grad;
        y = y + call_program(place, there, next_seed, depth - 1, y);
        break;
      }
      case 4:
        y = y + call_program(place, there, next_seed, depth - 1, y.detach());
        break;
      case 5:
      case 6:
        y = use_object(place, random, depth - 1, y);
        break;
      default:
        y = y + call_program(place, there, next_seed, depth - 1, y * 0.5);
    }
  }
  return pick(8) == 0 ? y.detach() : y;
}

std::optional<at::Tensor> weight_gradient(ContextId id, std::int64_t index) {
  for (const auto& [leaf, gradient] : dist_autograd::get_gradients(id)) {
    if (leaf.is_same(weights[static_cast<std::size_t>(index)])) return gradient;
  }
  return std::nullopt;
}
COHORT_REMOTE(weight_gradient);

struct Outcome {
  at::Tensor loss;
  std::vector<at::Tensor> gradients;  // of x, then of the weights
};

// Without a job: as plain functions.
Outcome run_program(std::int64_t seed, Job* job) {
  is_plain = job == nullptr;
  std::mt19937 random(static_cast<std::uint32_t>(seed));
  const at::Tensor x = at::linspace(0.1, 0.9, 8, at::kFloat).requires_grad_();
  for (at::Tensor& weight : weights) weight.mutable_grad().reset();
  Outcome outcome;
  if (job == nullptr) {
    outcome.loss = random_program(0, seed, 3, x).sum();
    if (outcome.loss.requires_grad()) outcome.loss.backward();
    outcome.gradients.push_back(x.grad());
    for (const at::Tensor& weight : weights)
      outcome.gradients.push_back(weight.grad().defined() ? weight.grad().clone() : weight.grad());
    return outcome;
  }
  Context context((*job)[0]);
  outcome.loss = random_program(0, seed, 3, x).sum();
  if (outcome.loss.requires_grad()) dist_autograd::backward(context, {outcome.loss});
  outcome.gradients.emplace_back();
  for (const auto& [leaf, gradient] : dist_autograd::get_gradients(context)) {
    if (leaf.is_same(x)) outcome.gradients.back() = gradient;
  }
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const std::string worker = worker_of(static_cast<std::int64_t>(i / 2));
    at::Tensor gradient;
    try {
      gradient = (*job)[0]
                     .rpc_sync<weight_gradient>(worker, context.id(), static_cast<std::int64_t>(i))
                     .value_or(at::Tensor());
    } catch (const UsageError&) {  // no call came there
    }
    outcome.gradients.push_back(gradient);
  }
  return outcome;
}

TEST(DistAutogradProgramsTest, HaveTheSameBitsOnOneWorkerAndOnThree) {
  for (int i = 0; i < 2 * kPlaces; ++i) {
    weights.push_back((at::linspace(0.5, 1.5, 8, at::kFloat) + 0.1 * i).requires_grad_());
  }
  num_workers = 3;
  Job three(3);
  const char* const text = std::getenv("COHORT_RPC_PROGRAMS");
  const int num_programs = text == nullptr ? 40 : std::atoi(text);
  std::vector<Outcome> outcomes;
  int num_gradients = 0;
  for (int seed = 1; seed <= num_programs; ++seed) outcomes.push_back(run_program(seed, &three));
  three.shutdown();
  num_workers = 1;  // handlers of objects that nobody waited for have ended
  Job job_of_one(1);
  for (int seed = 1; seed <= num_programs; ++seed) {
    const Outcome &on_three = outcomes[static_cast<std::size_t>(seed - 1)],
                  on_one = run_program(seed, &job_of_one), plain = run_program(seed, nullptr);
    ASSERT_TRUE(at::equal(on_three.loss, plain.loss)) << "seed " << seed;
    for (std::size_t i = 0; i < plain.gradients.size(); ++i) {
      const at::Tensor &a = on_three.gradients[i], &b = on_one.gradients[i], &c = plain.gradients[i];
      ASSERT_EQ(a.defined(), c.defined()) << "seed " << seed << " gradient " << i;
      ASSERT_EQ(b.defined(), c.defined()) << "seed " << seed << " gradient " << i;
      if (!a.defined()) continue;
      ++num_gradients;
      ASSERT_TRUE(at::equal(a, b)) << "seed " << seed << " gradient " << i << "\n" << a << "\n" << b;
      ASSERT_TRUE(at::allclose(a, c, 1e-4)) << "seed " << seed << " gradient " << i << "\n" << a << "\n" << c;
    }
  }
  EXPECT_GT(num_gradients, num_programs);
  EXPECT_TRUE(comes_true([&] { return job_of_one[0].metrics().contexts == 0; }));
  job_of_one.shutdown();
}

}  // namespace
}  // namespace cohort::rpc
