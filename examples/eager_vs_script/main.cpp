// What courses measure first, here in C++: a loop over elements against one operator on whole tensors, and
// eager mode against script mode (a function recorded once, then replayed).
//
//   Run:      OMP_NUM_THREADS=1 eager_vs_script [ELEMENTS] [ROUNDS]     by default 1000 15
//   Expect:   three tables, a line for each way ("element by element, script", "one operator", "script_step"
//             and others): its fastest round, median, 99th percentile, and how many times as fast as the
//             first it is; then "every way gives the same numbers: yes"
//
// Of the first table: the loop is not slow because it is a loop (over C++'s own numbers it is not), but
// because each element takes five operators. Script mode replays those for less, and one operator does them
// all. Of the other two: what is left of a small computation when only its operators run. Published for
// Python, ten times x = x * x: 18.5 us eager, 4.41 us in TorchScript.
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "cohort/bench/compare.h"
#include "cohort/optim/sgd.h"
#include "cohort/script/step.h"

namespace {

using at::Tensor;
namespace bench = cohort::bench;
namespace script = cohort::script;

bool same_numbers = true;

// Script mode records for two calls and replays from the third on, so five calls say whether it replays well.
template <typename First, typename Second>
void expect_same(First&& first, Second&& second) {
  for (int call = 0; call < 5; ++call) same_numbers = same_numbers && torch::equal(first(), second());
}

void print(const std::string& title, const bench::Comparison& figures) {
  std::printf("%s\n%s\n", title.c_str(), figures.text().c_str());
}

Tensor element_by_element(const Tensor& a, const Tensor& b) {
  Tensor sum = torch::empty_like(a);
  for (std::int64_t i = 0; i < a.size(0); ++i) sum[i] = a[i] + b[i];
  return sum;
}

Tensor numbers_of_cpp(const Tensor& a, const Tensor& b) {
  Tensor sum = torch::empty_like(a);
  const auto x = a.accessor<float, 1>(), y = b.accessor<float, 1>();
  auto result = sum.accessor<float, 1>();
  for (std::int64_t i = 0; i < a.size(0); ++i) result[i] = x[i] + y[i];
  return sum;
}

void loop_against_operator(std::int64_t elements, const bench::CompareOptions& options) {
  const torch::NoGradGuard no_grad;
  const Tensor a = torch::rand(elements), b = torch::rand(elements);
  auto scripted = script::script(element_by_element);
  const auto one_operator = [&] { return a + b; };
  expect_same(one_operator, [&] { return element_by_element(a, b); });
  expect_same(one_operator, [&] { return scripted(a, b); });
  expect_same(one_operator, [&] { return numbers_of_cpp(a, b); });
  print("The sum of two vectors of " + std::to_string(elements) + " floats",
        bench::compare({{"element by element", [&] { bench::keep(element_by_element(a, b)); }},
                        {"element by element, script", [&] { bench::keep(scripted(a, b)); }},
                        {"numbers of C++", [&] { bench::keep(numbers_of_cpp(a, b)); }},
                        {"one operator", [&] { bench::keep(one_operator()); }}},
                       options));
}

Tensor square_ten_times(Tensor x) {
  for (int i = 0; i < 10; ++i) x = x * x;
  return x;
}

void the_lecture(const bench::CompareOptions& options) {
  const torch::NoGradGuard no_grad;
  const Tensor x = torch::rand(5);
  auto scripted = script::script(square_ten_times);
  expect_same([&] { return square_ten_times(x); }, [&] { return scripted(x); });
  print("Ten times x = x * x on 5 floats",
        bench::compare({{"eager", [&] { bench::keep(square_ten_times(x)); }},
                        {"script", [&] { bench::keep(scripted(x)); }}},
                       options));
}

torch::nn::Sequential small_mlp() {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(32, 64), torch::nn::ReLU(), torch::nn::Linear(64, 64),
                               torch::nn::ReLU(), torch::nn::Linear(64, 10));
}

Tensor cross_entropy(const Tensor& output, const Tensor& target) {
  return torch::cross_entropy_loss(output, target);
}

void a_training_step(const bench::CompareOptions& options) {
  const Tensor x = torch::rand({16, 32}), y = torch::randint(10, {16});
  auto model = small_mlp(), twin = small_mlp();
  cohort::optim::SGD sgd(model->parameters(), cohort::optim::SGDOptions(0.01).momentum(0.9));
  cohort::optim::SGD twin_sgd(twin->parameters(), cohort::optim::SGDOptions(0.01).momentum(0.9));
  const auto eager = [&] {
    sgd.zero_grad();
    const Tensor loss = cross_entropy(model->forward(x), y);
    loss.backward();
    sgd.step();
    return loss.detach();
  };
  auto scripted = script::script_step(twin, cross_entropy, twin_sgd);
  expect_same(eager, [&] { return scripted(x, y); });  // the loss shows what earlier steps did to the weights
  print("A training step: three linear layers of 64, batch 16, SGD with momentum",
        bench::compare({{"eager", eager}, {"script_step", [&] { scripted(x, y); }}}, options));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::int64_t elements = argc > 1 ? std::atoll(argv[1]) : 1000;
    const int rounds = argc > 2 ? std::atoi(argv[2]) : 15;
    const auto options = bench::CompareOptions().threads({1}).timeit(bench::TimeitOptions().rounds(rounds));
    loop_against_operator(elements, options);
    the_lecture(options);
    a_training_step(options);
    std::printf("every way gives the same numbers: %s\n", same_numbers ? "yes" : "no");
    return same_numbers ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
