// Script mode beside eager mode, turn by turn in one process, on one thread: a loop from courses (10 times x
// = x * x on 5 floats), and training steps of small models, with our fused optimizer and with torch::optim's.
// Run: OMP_NUM_THREADS=1 script_replay [rounds=30] [tuned]; `tuned` raises the allocator's thresholds first.
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "cohort/core/allocator.h"
#include "cohort/optim/adam.h"
#include "cohort/optim/sgd.h"
#include "cohort/script/step.h"
#include "tests/script/nets.h"

namespace {

using Clock = std::chrono::steady_clock;
using cohort::test::cross_entropy;
namespace script = cohort::script;
namespace optim = cohort::optim;
int rounds = 30;

struct Entry {
  const char* name;
  std::function<void()> body;
  std::vector<double> times = {};
};

// Microseconds of one call, each round some calls of each entry in turn; ratios to the first entry.
void compare(const char* what, int calls, std::vector<Entry> entries) {
  for (Entry& entry : entries) {
    for (int warm = 0; warm < 10; ++warm) entry.body();
  }
  for (int round = 0; round < rounds; ++round) {
    for (Entry& entry : entries) {
      const auto begin = Clock::now();
      for (int call = 0; call < calls; ++call) entry.body();
      entry.times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count() / calls);
    }
  }
  for (Entry& entry : entries) std::sort(entry.times.begin(), entry.times.end());
  for (const Entry& entry : entries) {
    const auto at = [&](const Entry& e, double share) {
      return e.times[static_cast<std::size_t>(share * static_cast<double>(e.times.size() - 1))];
    };
    std::printf("%-22s %-22s %9.2f %9.2f %9.2f  %5.2fx\n", what, entry.name, at(entry, 0), at(entry, 0.5),
                at(entry, 0.99), at(entries.front(), 0.5) / at(entry, 0.5));
  }
}

template <typename Optimizer, typename Model>
std::function<void()> eager_step(Model model, std::shared_ptr<Optimizer> optimizer, at::Tensor x,
                                 at::Tensor y) {
  return [=]() mutable {
    optimizer->zero_grad();
    cross_entropy(model->forward(x), y).backward();
    optimizer->step();
  };
}

template <typename Make>
void steps(const char* what, int calls, const Make& make, const at::Tensor& x, const at::Tensor& y) {
  const auto sgd_options = optim::SGDOptions(1e-3).momentum(0.9);
  auto a = make(), b = make(), c = make(), d = make(), e = make(), f = make();
  const auto own = std::make_shared<optim::SGD>(a->parameters(), sgd_options);
  const auto own_scripted = std::make_shared<optim::SGD>(b->parameters(), sgd_options);
  const auto theirs =
      std::make_shared<torch::optim::SGD>(c->parameters(), torch::optim::SGDOptions(1e-3).momentum(0.9));
  const auto adam = std::make_shared<optim::Adam>(d->parameters());
  const auto adam_scripted = std::make_shared<optim::Adam>(e->parameters());
  const auto their_adam = std::make_shared<torch::optim::Adam>(f->parameters());
  auto scripted = script::script_step(b, cross_entropy, *own_scripted);
  auto scripted_adam = script::script_step(e, cross_entropy, *adam_scripted);
  auto g = make();
  auto fast = script::script(g);
  const auto function_sgd = std::make_shared<optim::SGD>(g->parameters(), sgd_options);
  compare(what, calls,
          {{"eager SGD", eager_step(a, own, x, y)},
           {"script_step SGD", [&] { scripted(x, y); }},
           {"script(model) SGD",
            [&] {
              function_sgd->zero_grad();
              cross_entropy(fast(x), y).backward();
              function_sgd->step();
            }},
           {"eager torch::optim SGD", eager_step(c, theirs, x, y)}});
  compare(what, calls,
          {{"eager Adam", eager_step(d, adam, x, y)},
           {"script_step Adam", [&] { scripted_adam(x, y); }},
           {"eager torch::optim Adam", eager_step(f, their_adam, x, y)}});
}

at::Tensor lecture(at::Tensor x) {
  for (int i = 0; i < 10; ++i) x = x * x;
  return x;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) rounds = std::atoi(argv[1]);
  if (argc > 2) cohort::core::tune_allocator();
  at::set_num_threads(1);
  at::manual_seed(1);
  std::printf("us per call, 1 thread, %d rounds, allocator %s\n%-45s %9s %9s %9s  ratio\n", rounds,
              argc > 2 ? "tuned" : "as it comes", "", "min", "median", "p99");
  {
    const at::NoGradGuard no_grad;
    const at::Tensor x = at::rand({5});
    auto fast = script::script(lecture);
    compare("lecture loop", 1000, {{"eager", [&] { lecture(x); }}, {"script", [&] { fast(x); }}});
  }
  const at::Tensor y16 = at::randint(0, 10, {16});
  steps("MLP 64, batch 16", 100, [] { return cohort::test::small_mlp(); }, at::randn({16, 32}), y16);
  steps(
      "MLP 512, batch 128", 10, [] { return cohort::test::small_mlp(512); }, at::randn({128, 32}),
      at::randint(0, 10, {128}));
  steps(
      "transformer layer 64", 30, [] { return cohort::test::Encoder(64); }, at::randn({6, 4, 64}),
      at::randint(0, 10, {24}));
  steps(
      "conv net, batch 8", 30, [] { return cohort::test::small_conv_net(); }, at::randn({8, 3, 16, 16}),
      at::randint(0, 10, {8}));
  const at::Tensor tokens = at::randint(0, 50, {4, 12});
  steps("LSTM 2 x 32", 30, [] { return cohort::test::Tagger(); }, tokens, tokens.view(-1));
}
