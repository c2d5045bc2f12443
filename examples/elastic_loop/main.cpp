// A loop of one's own that continues when processes come, leave and die, with the same bits as without.
//
//   Run:      elastic_loop [STEPS]      or: cohort run --elastic --nnodes 1:4 -- elastic_loop [STEPS]
//   Expect:   a line per 20 steps with a falling loss; then "60 steps, sum of the parameters": a number that
//             is the same for any number of processes, and for any changes of it
//
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <optional>

#include "cohort/base/random.h"
#include "cohort/elastic/run.h"
#include "cohort/elastic/state_of.h"
#include "cohort/optim/sgd.h"

namespace {

using namespace cohort;

constexpr std::uint64_t kSeed = 1;
constexpr std::int64_t kVirtualRanks = 4, kSamples = 16;

struct NetImpl : torch::nn::Module {
  NetImpl()
      : body(register_module("body",
                             torch::nn::Sequential(torch::nn::Linear(2, 64), torch::nn::Tanh(),
                                                   torch::nn::Dropout(0.1), torch::nn::Linear(64, 1)))) {}
  torch::nn::Sequential body;
};

void train(std::uint64_t steps) {
  // The same numbers in each process: an operator adds in an order that depends on its threads.
  torch::set_num_threads(1);
  torch::manual_seed(kSeed);
  const auto net = std::make_shared<NetImpl>();
  const auto optimizer =
      std::make_shared<optim::SGD>(net->parameters(), optim::SGDOptions(0.05).momentum(0.9));

  const std::shared_ptr<elastic::Session> session = elastic::session_of_process();
  const std::int64_t virtual_ranks = session ? session->virtual_ranks() : kVirtualRanks;
  parallel::VirtualRankSync sync({}, {.num_virtual_ranks = virtual_ranks});
  sync.begin({.modules = {{"", net}}, .optimizers = {{"", optimizer, nullptr}}});

  const auto make_step = [&](elastic::StepContext& context) {
    sync.begin_step();
    const parallel::ShareRange shares = sync.shares();  // the virtual ranks of this process
    double loss_of_share = 0;
    for (std::int64_t share = shares.first; share < shares.first + shares.count; ++share) {
      // All that a virtual rank draws follows from the seed, the step and its number.
      torch::manual_seed(base::generator_seed(kSeed, context.step(), static_cast<std::uint64_t>(share)));
      sync.begin_share(share, kSamples);
      const at::Tensor x = torch::rand({kSamples, 2});
      const at::Tensor loss = torch::mse_loss(net->body->forward(x), x.prod(1, /*keepdim=*/true));
      loss.backward();
      loss_of_share = loss.item<double>();
    }
    sync.end_shares();
    sync.average(*optimizer, kSamples, true);  // throws where a process is gone: the step is made again
    context.begin_changes();
    optimizer->step();
    const bool is_last = shares.first + shares.count == virtual_ranks;
    if (is_last && (context.step() + 1) % 20 == 0) {
      std::printf("step %llu of %d processes: loss %.4f\n",
                  static_cast<unsigned long long>(context.step() + 1), context.info().num_processes,
                  loss_of_share);
    }
  };
  const elastic::RunOptions options{.total_steps = steps, .session = session, .sync = &sync};
  const std::optional<elastic::GenerationInfo> last =
      elastic::run(options, elastic::state_of(net, optimizer), make_step);

  if (!last || last->process != 0)
    return;  // nothing: it was not needed at the end, and lacks the final state
  double sum = 0;
  for (const at::Tensor& parameter : net->parameters()) sum += parameter.sum().item<double>();
  std::printf("%llu steps, sum of the parameters %.9f\n", static_cast<unsigned long long>(steps), sum);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    train(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 100);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "elastic_loop: %s\n", error.what());
    return 1;
  }
}
