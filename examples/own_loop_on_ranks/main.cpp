// A loop of one's own on several ranks: processes that this program starts itself, or that a launcher does.
//
//   Run:      own_loop_on_ranks [RANKS] [STEPS]      or: cohort run --nproc-per-node 2 -- own_loop_on_ranks
//   Expect:   a line per 20 steps with a falling loss, the same for any number of ranks up to rounding; then
//             "the parameters are the same on all ranks"
//
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <exception>

#include "cohort/comm/group.h"
#include "cohort/comm/init.h"
#include "cohort/comm/text_collectives.h"
#include "cohort/data/loader.h"
#include "cohort/launch/spawn.h"
#include "cohort/optim/adam.h"
#include "cohort/parallel/average.h"

namespace {

/// Points of a sine.
class Sine : public cohort::data::ExampleDataset {
 public:
  std::int64_t size() const override { return 1000; }
  std::vector<at::Tensor> get(std::int64_t index, cohort::base::RandomStream&) const override {
    const double x = 6.28 * static_cast<double>(index) / 1000;
    return {at::full({1}, x, at::kFloat), at::full({1}, std::sin(x), at::kFloat)};
  }
};

void train(std::int64_t steps) {
  cohort::comm::Group group = cohort::comm::init_process_group();
  torch::manual_seed(1 + group.rank());  // other values on each rank, until broadcast() makes them rank 0's
  torch::nn::Sequential net(torch::nn::Linear(1, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  cohort::parallel::GradientAverager averager(group);
  averager.broadcast(*net);

  cohort::optim::Adam optimizer(net->parameters(), cohort::optim::AdamOptions(1e-2));
  cohort::data::LoaderOptions options{.global_batch_size = 64, .shuffle = true, .seed = 1};
  options.rank = group.rank();
  options.world_size = group.size();
  options.last_batch =
      cohort::data::LastBatchPolicy::kKeep;  // nothing is repeated: shares differ by one sample
  cohort::data::Loader loader(std::make_shared<Sine>(), options);

  std::int64_t step = 0;
  for (std::int64_t epoch = 0; step < steps; ++epoch) {
    loader.set_epoch(epoch);
    while (auto batch = loader.next()) {
      optimizer.zero_grad();
      at::Tensor sum = at::zeros({1});  // of the squared errors of all ranks
      if (batch->size > 0) {            // a share may be empty
        at::Tensor loss = torch::mse_loss(net->forward(batch->input()), batch->target());
        loss.backward();
        sum += loss.detach() * batch->size;
      }
      const auto average = averager.average(net->parameters(), static_cast<double>(batch->size));
      optimizer.step();
      group.step_done();
      if (++step % 20 == 0) {
        group.all_reduce(sum).wait();
        if (group.rank() == 0) {
          std::printf("step %lld  loss %.5f\n", static_cast<long long>(step),
                      sum.item<double>() / average.weight);
        }
      }
      if (step == steps) break;
    }
  }

  double total = 0;
  for (const at::Tensor& parameter : net->parameters())
    total += parameter.to(at::kDouble).sum().item<double>();
  cohort::comm::require_same(group, "the sum of the parameters", std::to_string(total));
  if (group.rank() == 0) std::puts("the parameters are the same on all ranks");
}

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 2;
  const std::int64_t steps = argc > 2 ? std::atoll(argv[2]) : 200;
  try {
    cohort::launch::spawn_unless_launched([&](int) { train(steps); }, ranks);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
